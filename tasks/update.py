"""Everything the trainer computes in a step."""

from prefect import task

from tasks.settings import STAGE
from verl_omni_core.stages import advantage, log_probs, snapshot, update
from verl_omni_core.stages.session import RunRef
from verl_omni_core.store.manifest import ArtifactRef


@task(name="old_log_probs", task_run_name="step-{step}/old_log_probs", **STAGE)
def recompute_old_log_probs(run: RunRef, step: int, samples: ArtifactRef) -> ArtifactRef | None:
    """Score the stored samples with the policy before the update, unless the engine's log-probs serve."""
    return log_probs.old_log_probs(run, step, samples)


@task(name="reference", task_run_name="step-{step}/reference", **STAGE)
def evaluate_reference(run: RunRef, step: int, samples: ArtifactRef) -> ArtifactRef | None:
    """Evaluate the reference policy on the stored samples, where the loss needs it."""
    return log_probs.reference(run, step, samples)


@task(name="advantage", task_run_name="step-{step}/advantage", **STAGE)
def estimate_advantages(run: RunRef, step: int, rewards: ArtifactRef) -> ArtifactRef:
    """Compare each sample with its group."""
    return advantage.advantage(run, step, rewards)


@task(name="update", task_run_name="step-{step}/update", **STAGE)
def train_on(
    run: RunRef,
    step: int,
    samples: ArtifactRef,
    advantages: ArtifactRef,
    old: ArtifactRef | None,
    reference: ArtifactRef | None,
) -> ArtifactRef:
    """Take the step's optimizer steps and begin to save what they made."""
    updated = update.update(run, step, samples, advantages, old, reference)
    snapshot.begin_checkpoint(run, step)
    return updated
