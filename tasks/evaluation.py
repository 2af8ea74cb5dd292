"""Look at the policy: held-out validation, pictures, the step's log."""

from prefect import task

from tasks.settings import RETRIED, STAGE
from verl_omni_core.stages import evaluate, log, preview, validate
from verl_omni_core.stages.session import RunRef
from verl_omni_core.stages.subjects import Evaluation
from verl_omni_core.store.manifest import ArtifactRef


@task(name="validate", task_run_name="step-{step}/validate", **RETRIED)
def validate_policy(run: RunRef, step: int) -> ArtifactRef:
    """Draw and score the held-out prompts with fixed seeds."""
    return validate.validate(run, step)


@task(name="preview", task_run_name="step-{step}/preview", **RETRIED)
def draw_preview(run: RunRef, step: int) -> ArtifactRef:
    """Draw the fixed prompts of the image grid."""
    return preview.preview(run, step)


@task(name="log", task_run_name="step-{step}/log", **STAGE)
def log_step(run: RunRef, step: int, sources: list[ArtifactRef]) -> ArtifactRef:
    """Collect the step's metrics into its table, TensorBoard and the live display."""
    return log.log(run, step, sources)


@task(name="open", **STAGE)
def open_evaluation(evaluation: Evaluation) -> RunRef:
    """Make the evaluation's run, start its actors and take over the weights that it judges."""
    return evaluate.open_evaluation(evaluation)


@task(name="validate", task_run_name="step-{step}/validate", **RETRIED)
def judge_weights(run: RunRef, step: int) -> ArtifactRef:
    """Draw and score the held-out prompts with the weights that stand under a step."""
    return evaluate.judge(run, step)


@task(name="finish", **STAGE)
def finish_evaluation(run: RunRef, evaluation: Evaluation) -> evaluate.EvaluationResult:
    """Commit the result and end the evaluation's actors."""
    return evaluate.finish_evaluation(run, evaluation)
