"""``verl-omni fork``: start a run from a step of another one."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verl_omni_core.cli._arguments import Overrides, Store, WithPrefect
from verl_omni_core.cli._refusals import before_anything_starts

if TYPE_CHECKING:
    from verl_omni_core.stages.fork import Forked


def fork(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run to go on from.")],
    step: Annotated[int | None, typer.Option(min=1, help="Step to go on from; none: its newest snapshot.")] = None,
    new_id: Annotated[str | None, typer.Option("--run-id", help="Name of the new run; none derives one.")] = None,
    set_: Overrides = None,
    store: Store = "runs",
    start: Annotated[bool, typer.Option("--start", help="Start the new run at once.")] = False,
    prefect: WithPrefect = True,
) -> None:
    """Make a run that goes on from a step of another one, with other settings if wanted.

    The other run stays as it is, and may be alive. Steps are counted on: run.steps includes those of the other run.
    """
    from verl_omni_core.stages.fork import fork as make

    with before_anything_starts():
        made = make(run_id, store=store, step=step, new_id=new_id, overrides=set_ or ())
    print("\n".join(_lines(made)))
    if not start:
        print(f"start it: verl-omni train --run-id {made.run.run_id} --set run.store={store}")
        return
    from verl_omni_core.cli.train import run_in_the_foreground, tell_the_scheduler, until_the_machines_end

    config = until_the_machines_end(made.config)
    print(run_in_the_foreground(config, None, prefect))
    tell_the_scheduler(config)


def _lines(made: "Forked") -> list[str]:
    head = f"run {made.run.run_id} goes on from step {made.lineage.step} of {made.lineage.run_id}: {made.run.root}"
    return [head, *(f"  {name} = {_text(new)} (there {_text(old)})" for name, old, new in made.lineage.settings)]


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
