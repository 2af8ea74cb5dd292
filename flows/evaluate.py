"""Evaluate: judge trained weights or a base model on held-out prompts."""

from typing import Any, Literal

from prefect import flow

from tasks.evaluation import finish_evaluation, judge_weights, open_evaluation
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages.ending import end_on_failure
from verl_omni_core.stages.subjects import plan_evaluation


@flow(name="evaluate", flow_run_name="{target}", log_prints=False)
def evaluate(
    target: str,
    step: int | None = None,
    network: Literal["policy", "average"] | None = None,
    adapter: str | None = None,
    prompts: str | None = None,
    overrides: list[str] | None = None,
    store: str = "runs",
    base: bool = True,
    config: RunConfig | None = None,
    run_id: str | None = None,
) -> dict[str, Any]:
    """Judge a run's policy, an exported adapter, or a base model on held-out prompts.

    Args:
        target: Name of a run, or else a profile: a base model with its settings.
        step: Step of the run whose weights are judged; none: the newest that has them.
        network: The policy or its moving average; none: the average where the run keeps one.
        adapter: Folder of an exported adapter, judged instead of a run's weights.
        prompts: File of held-out prompts instead of the settings' own.
        overrides: Changes to single settings, each ``a.b=c``.
        store: Folder that holds the runs.
        base: Judge what training started from as well, and compare.
        config: Settings of a base model that were resolved elsewhere, instead of the profile's.
        run_id: Name of the evaluation's own run; none derives one from the time.

    Returns:
        The numbers of the evaluation.
    """
    evaluation = plan_evaluation(
        target,
        store=store,
        step=step,
        network=network,
        adapter=adapter,
        prompts=prompts,
        overrides=overrides or [],
        base=base,
        environ={},
        config=config,
        run_id=run_id,
    )
    run = open_evaluation(evaluation)
    with end_on_failure(run, evaluation.config.cluster):
        for subject in evaluation.subjects:
            judge_weights(run, subject.step)
        return finish_evaluation(run, evaluation).to_json()
