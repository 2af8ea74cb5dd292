"""Stage keys: a digest of everything that changes a stage's result, and of nothing else."""

from typing import Any

from verl_omni_core.identity import digest
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.store.manifest import ArtifactRef

STAGE_VERSION = 1
"""Raised when the meaning of a stage's tables changes."""


def stage_key(stage: str, step: int, parents: list[ArtifactRef], **inputs: Any) -> str:
    """Return the key of a stage.

    Args:
        stage: name of the stage.
        step: 1-based step; 0 for work before the first.
        parents: the artifacts it reads.
        inputs: settings and versions that change the result, JSON-like.
    """
    return digest(
        {
            "stage": stage,
            "stage_version": STAGE_VERSION,
            "step": step,
            "parents": [parent.manifest_sha256 for parent in parents],
            "inputs": inputs,
        }
    )


def generation_inputs(config: RunConfig) -> dict[str, Any]:
    """Return the settings that decide what an engine draws for a request."""
    rollout = config.rollout
    return {
        "seed": config.run.seed,
        "deterministic": config.run.deterministic,
        "model": config.model.model_dump(mode="json", exclude={"gradient_checkpointing"}),
        "sampler": config.sampler.model_dump(mode="json", exclude={"validation"}),
        "engine": {"name": rollout.name, "dtype": rollout.dtype, "options": rollout.options},
        "batch": {"pack_size": rollout.pack_size, "max_batch": rollout.max_batch} if config.run.deterministic else None,
    }
