"""Score samples."""

from prefect import task

from tasks.settings import RETRIED
from verl_omni_core.stages import reward
from verl_omni_core.stages.session import RunRef
from verl_omni_core.store.manifest import ArtifactRef


@task(name="reward", task_run_name="step-{step}/reward", **RETRIED)
def score(run: RunRef, step: int, planned: ArtifactRef, samples: ArtifactRef) -> ArtifactRef:
    """Collect streamed scores, score what is missing, combine."""
    return reward.reward(run, step, planned, samples)
