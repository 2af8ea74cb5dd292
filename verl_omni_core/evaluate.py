"""An evaluation as plain Python: the stages of ``flows/evaluate.py`` without an orchestrator, with equal results."""

from verl_omni_core.stages.ending import end_on_failure
from verl_omni_core.stages.evaluate import EvaluationResult, finish_evaluation, judge, open_evaluation
from verl_omni_core.stages.subjects import Evaluation


def evaluate(evaluation: Evaluation) -> EvaluationResult:
    """Draw and score the held-out prompts with every subject, and compare.

    Args:
        evaluation: as :func:`verl_omni_core.stages.subjects.plan_evaluation` returns it.
    Raises:
        ConfigError, DataError: the settings cannot work; nothing was started.
    """
    run = open_evaluation(evaluation)
    with end_on_failure(run, evaluation.config.cluster):
        for subject in evaluation.subjects:
            judge(run, subject.step)
        return finish_evaluation(run, evaluation)
