"""``verl-omni train``: run a profile in the foreground and watch it."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from verl_omni_core.cli._arguments import Overrides, WithPrefect
from verl_omni_core.cli._refusals import before_anything_starts
from verl_omni_core.cli._surroundings import flow, surround

if TYPE_CHECKING:
    from verl_omni_core.report.progress import Progress
    from verl_omni_core.settings.run import RunConfig


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
        _refuse_early(config)
    print(run_in_the_foreground(config, origins, prefect))


def _named(config: "RunConfig", profile: str) -> "RunConfig":
    from verl_omni_core.store.runs import new_run_id

    if config.run.id is not None:
        return config
    named = config.run.model_copy(update={"id": new_run_id(config.run.store, profile)})
    return config.model_copy(update={"run": named})


def _of_the_run(run_id: str | None, overrides: Sequence[str]) -> "RunConfig":
    """Return the settings that a run had last, with changes; its place is that of the changes, or the default."""
    from verl_omni_core.errors import ConfigError
    from verl_omni_core.settings.loader import apply_overrides, load, override_names
    from verl_omni_core.stages.trained import config_of
    from verl_omni_core.store.runs import open_run

    if run_id is None:
        raise ConfigError("neither a profile nor --run-id is given; name a profile, or a run that exists")
    place = [text for text in overrides if override_names([text]) == ["run.store"]]
    store = load(overrides=place).config.run.store
    config = apply_overrides(config_of(open_run(store, run_id)), overrides)
    return config.model_copy(update={"run": config.run.model_copy(update={"id": run_id, "store": store})})


def _refuse_early(config: "RunConfig") -> None:
    """Refuse before anything starts what opening the run would refuse after it."""
    from verl_omni_core.stages.opening import refuse_owned, resumed

    folder = resumed(config)
    if folder is not None:
        refuse_owned(folder)


def run_in_the_foreground(config: "RunConfig", origins: dict[str, str] | None, prefect: bool) -> str:
    """Train with a live display; return the summary of the run.

    Args:
        origins: where each setting comes from, by dotted name; none leaves what the run recorded.
        prefect: as a flow, else as plain Python.
    """
    from verl_omni_core.report.progress import Progress
    from verl_omni_core.stages.observe import observe_with
    from verl_omni_core.store.runs import steps_done

    display = Progress()
    done = steps_done(Path(config.run.store) / str(config.run.id))
    display.start(str(config.run.id), steps=config.run.steps, step=done)
    remove = observe_with(display)
    try:
        return _surrounded(config, origins, prefect, display)
    finally:
        remove()
        display.stop()


def _surrounded(config: "RunConfig", origins: dict[str, str] | None, prefect: bool, display: "Progress") -> str:
    display.message(f"run {config.run.id}: starting Ray{' and Prefect' if prefect else ''}")
    surround(config.cluster, with_prefect=prefect, say=display.message)
    if prefect:
        return str(flow("online")(config, origins=origins))
    from verl_omni_core.online import train as run

    return run(config, origins)
