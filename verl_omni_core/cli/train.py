"""``verl-omni train``: run a profile in the foreground and watch it."""

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from verl_omni_core.cli._arguments import Overrides, WithPrefect
from verl_omni_core.cli._refusals import before_anything_starts
from verl_omni_core.cli._surroundings import flow, surround

if TYPE_CHECKING:
    from verl_omni_core.report.progress import Progress
    from verl_omni_core.settings.run import RunConfig

STOPPED_EARLY = 75
"""Exit code of a run that saved and stopped because its machine's time ends: EX_TEMPFAIL, which schedulers requeue."""


def train(
    profile: Annotated[
        str | None,
        typer.Argument(help="A profile's name, or the path of a TOML file; none: the settings of the run that exists."),
    ] = None,
    set_: Overrides = None,
    run_id: Annotated[str | None, typer.Option(help="Name of the run; one that exists is resumed.")] = None,
    prefect: WithPrefect = True,
) -> None:
    """Train a generator by reinforcement learning.

    Ray and Prefect are started on this machine if RAY_ADDRESS and PREFECT_API_URL name none; they stay up afterwards.
    """
    from verl_omni_core.settings.check import check
    from verl_omni_core.settings.loader import load

    origins: dict[str, str] | None = None
    with before_anything_starts():
        if profile is None:
            config = _of_the_run(run_id, set_ or ())
        else:
            resolved = load(profile, overrides=set_ or (), explicit={} if run_id is None else {"run.id": run_id})
            config, origins = _named(resolved.config, profile), resolved.record()
        for note in check(config).notes:
            print(f"note: {note}", file=sys.stderr)
        told = nothing_to_do(config)
    print(told or run_in_the_foreground(config, origins, prefect))
    if told is None:
        tell_the_scheduler(config)


def _named(config: "RunConfig", profile: str) -> "RunConfig":
    from verl_omni_core.store.runs import new_run_id

    if config.run.id is not None:
        return config
    named = config.run.model_copy(update={"id": new_run_id(config.run.store, profile)})
    return config.model_copy(update={"run": named})


def _of_the_run(run_id: str | None, overrides: Sequence[str]) -> "RunConfig":
    """Return the settings that a run had last, with changes; its place is that of the changes, or the default."""
    from verl_omni_core.errors import ConfigError
    from verl_omni_core.settings.loader import apply_overrides, load, of_a_new_start, override_names
    from verl_omni_core.stages.trained import config_of
    from verl_omni_core.store.runs import open_run

    if run_id is None:
        raise ConfigError("neither a profile nor --run-id is given; name a profile, or a run that exists")
    place = [text for text in overrides if override_names([text]) == ["run.store"]]
    store = load(overrides=place).config.run.store
    config = apply_overrides(until_the_machines_end(of_a_new_start(config_of(open_run(store, run_id)))), overrides)
    return config.model_copy(update={"run": config.run.model_copy(update={"id": run_id, "store": store})})


def until_the_machines_end(config: "RunConfig") -> "RunConfig":
    """Return settings with the end of the machine's time as this start is told of it, by its scheduler for instance."""
    from verl_omni_core.settings.loader import load

    return config.model_copy(update={"run": config.run.model_copy(update={"end_by": load().config.run.end_by})})


def tell_the_scheduler(config: "RunConfig") -> None:
    """End with a code of its own where the run stopped early: whoever starts jobs starts this one again."""
    from verl_omni_core.stages.time_limit import stopped_early

    if stopped_early(config):
        raise typer.Exit(STOPPED_EARLY)


def nothing_to_do(config: "RunConfig") -> str | None:
    """Return what to say of a finished run; refuse, before anything starts, what opening the run would refuse."""
    from verl_omni_core.stages.opening import finished, refuse_owned, resumed
    from verl_omni_core.stages.time_limit import refuse_past_end

    refuse_past_end(config)
    folder = resumed(config)
    if folder is not None:
        refuse_owned(folder)
    return finished(config)


def run_in_the_foreground(config: "RunConfig", origins: dict[str, str] | None, prefect: bool) -> str:
    """Train with a live display; return the summary of the run.

    Args:
        origins: where each setting comes from, by dotted name; none leaves what the run recorded.
        prefect: as a flow, else as plain Python.
    """
    from verl_omni_core.report.progress import Progress
    from verl_omni_core.stages.observe import observe_with
    from verl_omni_core.store.places import folder_of
    from verl_omni_core.store.runs import steps_done

    display = Progress()
    done = steps_done(folder_of(config.run.store).absolute() / str(config.run.id))
    if isinstance(config.run.resume, int):
        done = min(done, config.run.resume)
    display.start(str(config.run.id), steps=config.run.steps, step=done)
    remove = observe_with(display)
    try:
        return _surrounded(config, origins, prefect, display)
    finally:
        remove()
        display.stop()


def _surrounded(config: "RunConfig", origins: dict[str, str] | None, prefect: bool, display: "Progress") -> str:
    from verl_omni_core.cluster import prefect_server
    from verl_omni_core.errors import VerlOmniError
    from verl_omni_core.store.lease import newest_epoch
    from verl_omni_core.store.places import folder_of

    display.message(f"run {config.run.id}: starting Ray{' and Prefect' if prefect else ''}")
    surround(config.cluster, with_prefect=prefect, say=display.message)
    if prefect:
        root = folder_of(config.run.store).absolute() / str(config.run.id)
        epoch = newest_epoch(root)
        try:
            return str(flow("online")(config, origins=origins))
        except Exception as error:
            address = os.environ["PREFECT_API_URL"]
            if isinstance(error, VerlOmniError) or prefect_server.answers(address):
                raise
            # Prefect only keeps the record: the store knows what is done, and the actors live
            display.message(f"the Prefect server {address} does not answer any more; the run goes on without it")
            if newest_epoch(root) > epoch:  # the flow has opened the run: what run.resume asked for is done
                config = config.model_copy(update={"run": config.run.model_copy(update={"resume": "auto"})})
    from verl_omni_core.online import train as run

    return run(config, origins)
