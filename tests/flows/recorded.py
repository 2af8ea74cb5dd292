"""What a run left in its folder, read back."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import load_file

from verl_omni_core.batches.tables import read_tensor
from verl_omni_core.stages.metric_table import metrics_of
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.manifest import ArtifactRef, Manifest


class Recorded:
    """A run's committed artifacts."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = RunStore(root)

    def ref(self, step: int, stage: str) -> ArtifactRef:
        found = self.store.find(step, stage)
        assert found is not None, f"stage {stage} of step {step} is not committed"
        return found

    def manifest(self, step: int, stage: str) -> Manifest:
        return self.store.manifest(self.ref(step, stage))

    def table(self, step: int, stage: str, name: str) -> pa.Table:
        return self.store.table(self.ref(step, stage), name)

    def rewards(self, step: int, stage: str = "reward") -> np.ndarray:
        return self.table(step, stage, "reward_summary").column("rm_score").to_numpy()

    def latents(self, step: int) -> torch.Tensor:
        return read_tensor(self.table(step, "rollout", "trajectories"), "all_latents")

    def pixels(self, step: int, stage: str) -> torch.Tensor:
        return read_tensor(self.table(step, stage, "media"), "pixels")

    def seeds(self, step: int) -> list[int]:
        return self.table(step, "rollout", "trajectories").column("seed").to_pylist()

    def metrics(self, step: int) -> dict[str, float]:
        return metrics_of(self.table(step, "log", "metrics"))

    def checksum(self, step: int, stage: str = "sync") -> str:
        return str(self.manifest(step, stage).producer["checksum"])

    def weights(self, step: int) -> dict[str, torch.Tensor]:
        ref = self.ref(step, "sync")
        (name,) = [file.name for file in self.store.manifest(ref).files if file.name.endswith(".safetensors")]
        return load_file(self.store.path_of(ref, name))

    def samples_drawn(self) -> int:
        drawn = [self.store.find(s, n) for s in self.store.steps() for n in ("rollout", "validate-samples", "preview")]
        return sum(ref.rows for ref in drawn if ref is not None)

    def commits(self) -> dict[str, Any]:
        """Return every commit marker's content, by its path."""
        markers = sorted(self.root.glob("steps/*/*/COMMIT"))
        return {str(path.relative_to(self.root)): path.read_text() for path in markers}
