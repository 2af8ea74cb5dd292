"""Weights out of the trainer: to the replicas and to disk."""

from prefect import task

from tasks.settings import RETRIED, STAGE
from verl_omni_core.stages import checkpoint, sync
from verl_omni_core.stages.session import RunRef
from verl_omni_core.store.manifest import ArtifactRef


@task(name="sync", task_run_name="step-{step}/sync", **RETRIED)
def sync_weights(run: RunRef, step: int) -> ArtifactRef:
    """Bring every replica to the policy of ``step``."""
    return sync.sync(run, step)


@task(name="checkpoint", task_run_name="step-{step}/checkpoint", **STAGE)
def save_checkpoint(run: RunRef, step: int) -> ArtifactRef | None:
    """Commit the trainer's whole state once it is on the disk."""
    return checkpoint.checkpoint(run, step)
