"""Plan a step and draw its samples."""

from prefect import task

from tasks.settings import RETRIED, STAGE
from verl_omni_core.stages import plan, rollout
from verl_omni_core.stages.session import RunRef
from verl_omni_core.store.manifest import ArtifactRef


@task(name="plan", task_run_name="step-{step}/plan", **STAGE)
def plan_step(run: RunRef, step: int) -> ArtifactRef:
    """Choose prompts, groups and seeds."""
    return plan.plan(run, step)


@task(name="rollout", task_run_name="step-{step}/rollout", **RETRIED)
def generate(run: RunRef, step: int, planned: ArtifactRef) -> ArtifactRef:
    """Draw the planned samples, scoring them as they come."""
    return rollout.rollout(run, step, planned)
