"""What an evaluation judges: weights of a run, an exported adapter, or a base model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from verl_omni_core.errors import ConfigError, StoreError
from verl_omni_core.given_files import json_object
from verl_omni_core.settings.check import check
from verl_omni_core.settings.loader import apply_overrides, load, override_names, profile_names
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages.trained import Network, TrainedWeights, config_of, find_weights
from verl_omni_core.store import runs
from verl_omni_core.weights.filesystem import read_update


@dataclass(frozen=True)
class Subject:
    """Weights to judge."""

    label: str
    step: int
    """Under which its results stand; 0 for a base."""
    folder: str | None
    """As ``weights.filesystem`` reads it; none: the model as the engine loads it."""


@dataclass(frozen=True)
class Evaluation:
    """What to judge, and how samples are drawn and scored."""

    title: str
    config: RunConfig
    subjects: tuple[Subject, ...]


_OWN = ("run.id", "run.store", "run.steps", "cluster.keep_actors")
"""Settings that an evaluation sets itself."""


class Target(NamedTuple):
    """Settings to judge under, and the run that they and the weights come from, if they come from one."""

    config: RunConfig
    run_id: str | None


def plan_evaluation(
    target: str,
    *,
    store: str | Path = "runs",
    step: int | None = None,
    network: Network | None = None,
    adapter: str | Path | None = None,
    prompts: str | Path | None = None,
    overrides: Sequence[str] = (),
    base: bool = True,
    environ: Mapping[str, str] | None = None,
    config: RunConfig | None = None,
    run_id: str | None = None,
) -> Evaluation:
    """Return what an evaluation judges. Writes nothing.

    Args:
        target: name of a run in ``store``, or else a profile: a base model with its settings.
        step, network: of the run's weights; see :func:`verl_omni_core.stages.trained.find_weights`.
        adapter: folder of an exported adapter, judged instead of a run's weights.
        prompts: file of held-out prompts instead of the settings' own.
        overrides: ``a.b=c`` texts over the settings.
        base: judge what training started from as well, and compare.
        environ: variables over a profile; none: this process's.
        config: settings of a profile that are resolved already, but for the overrides.
        run_id: name of the evaluation's own run; none derives one from the time.
    Raises:
        ConfigError, DataError: no such target or weights, or settings that cannot work.
    """
    _refuse_own_settings(overrides)
    found = _target(target, store, overrides, environ, config)
    if found.run_id is None and (step is not None or network is not None):
        raise ConfigError(f"{target!r} is a profile, which has no steps; leave --step and --network, or name a run")
    changes: dict[str, Any] = {} if prompts is None else {"data.validation": str(prompts)}
    if adapter is not None:
        if step is not None or network is not None:
            raise ConfigError("an adapter folder and a step of a run were given; judge one of them")
        subjects, lora = _of_adapter(Path(adapter), base)
        changes |= lora
        title = f"{target}, adapter {adapter}"
    elif found.run_id is not None:
        weights = find_weights(store, found.run_id, step=step, network=network)
        subjects = _of_run(store, weights, base)
        title = f"{found.run_id}, {weights.network} after step {weights.step}"
    else:
        subjects, title = (Subject(f"base {found.config.model.path}", 0, None),), target
    own_id = run_id or runs.new_run_id(store, f"evaluate-{Path(target).stem if target.endswith('.toml') else target}")
    changes |= dict(zip(_OWN, (own_id, str(store), 0, False), strict=True))
    settings = _changed(found.config, changes)
    check(settings, splits=("validation",))
    return Evaluation(title, settings, subjects)


def _refuse_own_settings(overrides: Sequence[str]) -> None:
    taken = [name for name in override_names(overrides) if name in _OWN]
    if taken:
        hint = "name the store with --store" if taken[0] == "run.store" else "leave it out"
        raise ConfigError(f"--set {taken[0]}: an evaluation is a run of its own and sets {taken[0]} itself; {hint}")


def _target(
    target: str,
    store: str | Path,
    overrides: Sequence[str],
    environ: Mapping[str, str] | None,
    config: RunConfig | None,
) -> Target:
    names = [run.run_id for run in runs.list_runs(store)]
    if target in names:
        return Target(apply_overrides(config_of(runs.open_run(store, target)), overrides), target)
    if config is not None:
        return Target(apply_overrides(config, overrides), None)
    if target in profile_names() or target.endswith(".toml") or Path(target).is_file():
        return Target(load(target, overrides=overrides, environ=environ).config, None)
    raise ConfigError(
        f"{target!r} is neither a run nor a profile; store {store} has {', '.join(names[-5:]) or 'no runs'}; the "
        f"profiles are {', '.join(profile_names())}"
    )


def _of_run(store: str | Path, weights: TrainedWeights, base: bool) -> tuple[Subject, ...]:
    subject = Subject(f"{weights.network} after step {weights.step}", weights.step, str(weights.folder))
    if weights.step == 0 or not base:
        return (subject,)
    start = find_weights(store, weights.run_id, step=0, network="policy")
    return Subject("base", 0, str(start.folder)), subject


def _of_adapter(folder: Path, base: bool) -> tuple[tuple[Subject, ...], dict[str, Any]]:
    try:
        update = read_update(folder, 1)
    except StoreError as error:
        raise ConfigError(f"--adapter: {error}") from error
    from verl_omni_core.stages.export import RECORD  # late: it loads the libraries that exports are for

    record = folder / RECORD
    step = json_object(record).get("step") if record.is_file() else 1
    if not isinstance(step, int):
        raise ConfigError(f"--adapter: {str(record)!r} does not say its step; give the folder that an export wrote")
    step = max(step, 1)
    subject = Subject(f"adapter {folder}", step, str(folder))
    subjects = (Subject("base", 0, None), subject) if base else (subject,)
    config = update.peft_config or {}
    # replicas reserve room for the rank that the settings name
    return subjects, {"model.lora.rank": config.get("r", 0), "model.lora.alpha": config.get("lora_alpha", 1)}


def _changed(config: RunConfig, changes: dict[str, Any]) -> RunConfig:
    values = config.model_dump()
    for name, value in changes.items():
        *groups, last = name.split(".")
        here = values
        for group in groups:
            here = here[group]
        here[last] = value
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{'.'.join(map(str, first['loc']))} is {first['input']!r}: {first['msg']}") from None
