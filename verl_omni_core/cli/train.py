"""``verl-omni train``: run a profile in the foreground and watch it."""

import importlib
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from verl_omni_core.cli._arguments import Overrides, Profile

if TYPE_CHECKING:
    from verl_omni_core.report.progress import Progress
    from verl_omni_core.settings.run import RunConfig


def train(
    profile: Profile,
    set_: Overrides = None,
    run_id: Annotated[str | None, typer.Option(help="Name of the run; one that exists is resumed.")] = None,
    prefect: Annotated[bool, typer.Option(help="Run as a Prefect flow, else as plain Python.")] = True,
) -> None:
    """Train a generator by reinforcement learning.

    Ray and Prefect are started on this machine if RAY_ADDRESS and PREFECT_API_URL name none; they stay up afterwards.
    """
    from verl_omni_core.settings.check import check
    from verl_omni_core.settings.loader import load
    from verl_omni_core.store.runs import new_run_id

    explicit = {"run.id": run_id} if run_id else {}
    config = load(profile, overrides=set_ or (), explicit=explicit).config
    if config.run.id is None:
        named = config.run.model_copy(update={"id": new_run_id(config.run.store, profile)})
        config = config.model_copy(update={"run": named})
    for note in check(config).notes:
        print(f"note: {note}", file=sys.stderr)
    print(_run(config, prefect))


def _run(config: "RunConfig", prefect: bool) -> str:
    from verl_omni_core.report.progress import Progress
    from verl_omni_core.stages.observe import observe_with

    display = Progress()
    display.start(str(config.run.id), steps=config.run.steps)
    remove = observe_with(display)
    try:
        return _surrounded(config, prefect, display)
    finally:
        remove()
        display.stop()


def _surrounded(config: "RunConfig", prefect: bool, display: "Progress") -> str:
    from verl_omni_core.cluster.start import start

    display.message(f"run {config.run.id}: starting Ray{' and Prefect' if prefect else ''}")
    surroundings = start(config.cluster, with_prefect=prefect, say=display.message)
    if surroundings.prefect_url:
        display.message(f"Prefect UI: {surroundings.prefect_url.removesuffix('/api')}")
    if surroundings.started:
        display.message("both stay up for the next run; stop them with: verl-omni down")
    if not prefect:
        from verl_omni_core.train import train as run

        return run(config)
    # one line a task would tear the live display; the flow's own page has the log
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "WARNING")
    return _online_flow()(config)


def _online_flow() -> Callable[["RunConfig"], str]:
    # by name, because the core never imports what stands above it
    flow: Callable[[RunConfig], str] = importlib.import_module("flows.online").online
    return flow
