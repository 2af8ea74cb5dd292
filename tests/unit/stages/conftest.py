from pathlib import Path

import pytest

from tests.unit.stages import recorded_run
from tests.unit.training import tiny
from verl_omni_core.rollout._contract import WeightUpdate


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-sd3")
    tiny.ADAPTER.build_tiny(str(folder), seed=0)
    return folder


@pytest.fixture(scope="session")
def weights(pipeline: Path) -> dict[str, WeightUpdate]:
    made = {name: recorded_run.trained(pipeline, 4, scale) for name, scale in (("policy", 0.5), ("average", 0.4))}
    return made | {"full": recorded_run.trained(pipeline, 0, 0.1)}


@pytest.fixture
def store(tmp_path: Path, pipeline: Path, weights: dict[str, WeightUpdate]) -> Path:
    """A store with three runs: one with adapters and their average, one without an average, one fully trained."""
    folder = tmp_path / "runs"
    policy, average = weights["policy"], weights["average"]
    recorded_run.record(
        recorded_run.settings(folder, pipeline),
        "adapters",
        {(0, "sync"): policy, (1, "sync"): policy, (2, "sync"): policy, (1, "sync-average"): average},
    )
    recorded_run.record(recorded_run.settings(folder, pipeline, ema_decay=None), "plain", {(1, "sync"): policy})
    recorded_run.record(
        recorded_run.settings(folder, pipeline, rank=0, ema_decay=None), "full", {(3, "sync"): weights["full"]}
    )
    return folder
