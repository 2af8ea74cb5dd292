"""``verl-omni evaluate``: judge a run's policy, an exported adapter or a base model on held-out prompts."""

import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verl_omni_core.cli._arguments import Network, Overrides, Step, Store, WithPrefect
from verl_omni_core.cli._refusals import before_anything_starts
from verl_omni_core.cli._surroundings import flow, surround

if TYPE_CHECKING:
    from verl_omni_core.stages.subjects import Evaluation


def evaluate(
    target: Annotated[
        str, typer.Argument(metavar="RUN|PROFILE", help="Name of a run, or else a profile: a base model.")
    ],
    step: Step = None,
    network: Network = None,
    adapter: Annotated[
        str | None, typer.Option(help="Folder of an exported adapter, judged instead of a run's weights.")
    ] = None,
    prompts: Annotated[str | None, typer.Option(help="File of held-out prompts instead of the settings' own.")] = None,
    set_: Overrides = None,
    store: Store = "runs",
    base: Annotated[
        bool, typer.Option("--base/--no-base", help="Judge what training started from as well, and compare.")
    ] = True,
    json_: Annotated[bool, typer.Option("--json", help="Print the result as one line of JSON.")] = False,
    prefect: WithPrefect = True,
) -> None:
    """Judge a run's policy, an exported adapter or a base model on held-out prompts, through the engine.

    No training run need be alive. The evaluation is a run of its own in the store.
    """
    from verl_omni_core.stages.observe import observe_with
    from verl_omni_core.stages.subjects import plan_evaluation

    asked: dict[str, Any] = {
        "step": step,
        "network": network,
        "adapter": adapter,
        "prompts": prompts,
        "overrides": set_ or [],
        "store": store,
        "base": base,
    }
    with before_anything_starts():
        evaluation = plan_evaluation(target, **asked)
    _say(f"evaluation {evaluation.config.run.id}: {evaluation.title}")
    surround(evaluation.config.cluster, with_prefect=prefect, say=_say)
    stop_watching = observe_with(_Lines(evaluation))
    try:
        if prefect:
            # the flow reads no environment, so it takes a profile's settings as they were resolved here
            result = flow("evaluate")(target, **asked, config=evaluation.config, run_id=evaluation.config.run.id)
        else:
            from verl_omni_core.evaluate import evaluate as run

            result = run(evaluation).to_json()
    finally:
        stop_watching()
    print(json.dumps(result) if json_ else text_of(result))


def text_of(result: Mapping[str, Any]) -> str:
    """Return an evaluation's numbers for people."""
    judged = result["judged"]
    last = judged[-1]
    lines = [f"{last['prompts']} held-out prompts, {last['samples_per_prompt']} fixed seeds each", ""]
    best = [f"best@{k}" for k in last["best"]]
    worst = [f"worst@{k}" for k in last["worst"]]
    width = max(len(subject["label"]) for subject in judged) + 2
    lines.append("".ljust(width) + "".join(name.rjust(9) for name in ["mean", "std", *best, *worst, "exact"]))
    for subject in judged:
        values = [
            subject["mean"],
            subject["std"],
            *subject["best"].values(),
            *subject["worst"].values(),
            subject["exact"],
        ]
        lines.append(subject["label"].ljust(width) + "".join(_number(value).rjust(9) for value in values))
        if subject["invalid"]:
            lines.append(f"  {subject['invalid']:.1%} of the samples have no score and are left out")
    if result["gain"] is not None:
        gain = result["gain"]
        lines += [
            "",
            f"Gain: {gain['mean']:+.4f}, paired bootstrap 95 % interval {gain['low']:+.4f} to {gain['high']:+.4f}",
        ]
    return "\n".join([*lines, "", f"Picture: {result['picture']}", f"Tables:  {result['folder']}"])


class _Lines:
    """Tells of each stage in a line."""

    def __init__(self, evaluation: "Evaluation") -> None:
        self._labels = {subject.step: subject.label for subject in evaluation.subjects}

    def stage(self, step: int, name: str) -> None:
        _say(f"drawing and scoring: {self._labels[step]}")

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        return None

    def validated(self, step: int, metrics: Mapping[str, float]) -> None:
        return None


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
