"""Everything that can be wrong with a run and can be known before any process starts.

:func:`check` starts nothing and writes nothing. It looks at components, options, sizes, files and prompts, and reports
all that it finds in one message.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_omni_core import registry
from verl_omni_core.errors import ConfigError, DataError, StoreError
from verl_omni_core.settings import resolve
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.store import places
from verl_omni_core.store.durable_files import why_unwritable
from verl_omni_core.store.remote import Remote

_ROUNDING = 2**-8
"""Relative rounding of bfloat16; float16 is finer, and float32 far finer than any clip range."""
_STORE_S = 10.0
"""How long an object store may take to answer."""

SPLITS: tuple[resolve.Split, ...] = ("train", "validation")


@dataclass
class CheckedRun:
    """A run that can start, and what was learned on the way."""

    config: RunConfig
    splits: tuple[resolve.Split, ...] = SPLITS
    """Sets of prompts that the run reads."""
    model_path: Path = Path()
    engine_version: str | None = None
    """Version of the engine's package; none for an engine without one."""
    rows: dict[str, int] = field(default_factory=dict)
    """Split to its number of prompts."""
    truncated: dict[str, int] = field(default_factory=dict)
    """Split to how many of its prompts an encoder will cut; only with ``data.overlong = 'truncate'``."""

    notes: list[str] = field(default_factory=list)
    """What the user should know although nothing is wrong, one sentence each."""


def check(config: RunConfig, *, splits: tuple[resolve.Split, ...] = SPLITS) -> CheckedRun:
    """Return what the run will use.

    Args:
        splits: sets of prompts that it reads; an evaluation reads ``validation`` only.
    Raises:
        ConfigError: settings that cannot work. DataError: only the data is at fault. Both say what was seen, what is
            allowed and what to write instead, for every fault found.
    """
    found = CheckedRun(config, splits)
    problems: dict[str, ConfigError | DataError] = {}
    sampling = (_components, _noise, _precision, _groups, _window)
    for part in (_store, *sampling, _scorers, _engine, _model, _adapters, _data):
        try:
            part(found)
        except (ConfigError, DataError) as problem:
            problems.setdefault(str(problem), problem)  # several parts may meet the same fault
    if len(problems) == 1:
        raise next(iter(problems.values()))
    if problems:
        is_data = all(isinstance(problem, DataError) for problem in problems.values())
        raise (DataError if is_data else ConfigError)("\n".join(problems))
    return found


def _store(found: CheckedRun) -> None:
    check_store(found.config)


def check_store(config: RunConfig) -> None:
    """Raise ConfigError if runs cannot be written where the settings say; tries nothing on a local file system."""
    if places.is_remote(config.run.store):
        try:
            Remote.parse(config.run.store).impatient(_STORE_S).check()
        except StoreError as error:
            raise ConfigError(f"run.store: {error}") from error
        return
    store = Path(config.run.store).absolute()
    there = next(path for path in (store, *store.parents) if path.exists())
    if not there.is_dir():
        raise ConfigError(f"run.store is {str(store)!r}, but {there} is a file; give a folder or a new name")
    own = store / (config.run.id or "")
    for folder in (there, *(own / name for name in ("", "steps", "ledger", "epoch"))):
        why = why_unwritable(folder) if folder.is_dir() else None
        if why is not None:
            raise ConfigError(
                f"run.store is {str(store)!r}, but {folder} cannot be written ({why}); choose a run.store that this "
                "user may write, or make that one writable"
            )


def _components(found: CheckedRun) -> None:
    config = found.config
    resolve.component("agent_loop", config.rollout.agent_loop)
    resolve.algorithm_options(config)
    resolve.sampler_options(config)
    for scorer in config.reward.scorers:
        resolve.scorer_options(scorer)


def _noise(found: CheckedRun) -> None:
    config = found.config
    rule = resolve.component("sampler", config.sampler.name)
    most = getattr(rule, "MAX_NOISE_LEVEL", math.inf)
    if config.sampler.noise_level > most:
        raise ConfigError(
            f"sampler.noise_level is {config.sampler.noise_level:g}, but sampler {config.sampler.name!r} takes 0 to "
            f"{most:g}; use at most {most:g}"
        )
    algorithm = resolve.component("algorithm", config.algorithm.name)
    if getattr(algorithm, "EVALUATION", None) != "replay":
        return
    if not rule.IS_STOCHASTIC:
        raise ConfigError(
            f"sampler.name is {config.sampler.name!r}, whose steps are deterministic, but algorithm "
            f"{config.algorithm.name!r} compares probabilities of steps; use a stochastic one of "
            f"{', '.join(_stochastic_rules())}"
        )
    if config.sampler.noise_level == 0:
        raise ConfigError(
            f"sampler.noise_level is 0, but algorithm {config.algorithm.name!r} compares probabilities of steps, and a "
            "step without noise has none; use a number more than 0, for example 0.7"
        )


def _stochastic_rules() -> Iterator[str]:
    for name in registry.names("sampler"):
        if registry.component("sampler", name).IS_STOCHASTIC:
            yield name


def _precision(found: CheckedRun) -> None:
    config = found.config
    if "train" not in found.splits:
        return
    dtypes = {config.rollout.dtype, config.model.dtype}
    if len(dtypes) > 1:
        found.notes.append(
            f"rollout.dtype is {config.rollout.dtype!r} and model.dtype {config.model.dtype!r}: engine and trainer "
            "round differently, so ratios leave 1 before any update"
        )
    clip_range = getattr(resolve.algorithm_options(config), "clip_range", math.inf)
    if dtypes != {"float32"} and clip_range < _ROUNDING and not config.algorithm.recompute_old_log_probs:
        found.notes.append(
            f"algorithm.clip_range is {clip_range:g}, and engine or trainer compute in low precision, whose rounding "
            "alone may leave that range; set algorithm.recompute_old_log_probs to true"
        )


def _groups(found: CheckedRun) -> None:
    config = found.config
    algorithm = resolve.component("algorithm", config.algorithm.name)
    if config.rollout.group_size < 2 and getattr(algorithm, "COMPARES_GROUP", True):
        raise ConfigError(
            f"rollout.group_size is {config.rollout.group_size}, but algorithm {config.algorithm.name!r} compares the "
            "samples of a prompt with each other; use at least 2"
        )


def _window(found: CheckedRun) -> None:
    from verl_omni_core.samplers._window import window_envelope

    sampler = found.config.sampler
    window_envelope(
        num_inference_steps=sampler.num_inference_steps, size=sampler.sde_window_size, range=sampler.sde_window_range
    )


def _scorers(found: CheckedRun) -> None:
    from verl_omni_core.rewards._combine import check_scorers

    check_scorers(found.config.reward.scorers)


def _engine(found: CheckedRun) -> None:
    from verl_omni_core.rollout._options import engine_options

    engine = resolve.component("engine", found.config.rollout.name)
    if hasattr(engine, "installed_version"):
        version = found.engine_version = engine.installed_version()
        known = getattr(engine, "KNOWN_TO_WORK", (version,))
        if version.split("+")[0] not in known:
            found.notes.append(
                f"rollout.name: version {version} of the engine is admitted, but the tests run with {', '.join(known)}"
            )
    if hasattr(engine, "check"):
        engine.check(engine_options(found.config))


def _model(found: CheckedRun) -> None:
    sampler = found.config.sampler
    adapter = resolve.adapter(found.config)
    path = resolve.model_path(found.config)
    index = resolve.pipeline_index(path)
    if index.get("_class_name") != adapter.facts.pipeline_class:
        raise ConfigError(
            f"model.path {found.config.model.path!r} holds a {index.get('_class_name')}, but model.name "
            f"{found.config.model.name!r} is for {adapter.facts.pipeline_class}; choose another folder, or that "
            f"pipeline's model from {', '.join(registry.names('model'))}"
        )
    parts = list(resolve.parts(index))
    absent = [str(path / name) for name in parts if not (path / name).is_dir()]
    if absent:
        raise ConfigError(
            f"model.path is {found.config.model.path!r}, whose model_index.json names parts that do not exist: "
            f"{', '.join(absent)}; give the folder of a whole pipeline in diffusers format"
        )
    found.model_path = path
    adapter.geometry(sampler.height, sampler.width, adapter.decoder_config(str(path)))


def _adapters(found: CheckedRun) -> None:
    """Put the adapters into a network without weights: patterns, and an adapter to start from, fit or not."""
    settings = found.config.model.lora
    if "train" not in found.splits or found.model_path == Path():
        return  # no trainer, or the model's own fault is reported
    if settings.rank == 0:
        if settings.adapter_path is not None:
            raise ConfigError(
                f"model.lora.adapter_path is {settings.adapter_path!r}, but model.lora.rank is 0, which trains all "
                "parameters; give the adapter's rank, or remove the path"
            )
        return
    from verl_omni_core.training.lora import add_adapters

    adapter = resolve.adapter(found.config)
    network = adapter.outline_denoiser(str(found.model_path))
    add_adapters(network, settings, adapter.facts.lora_targets, seed=found.config.run.seed)


def _data(found: CheckedRun) -> None:
    problems = []
    for split in found.splits:
        try:
            _split(found, split)
        except DataError as problem:
            problems.append(str(problem))
    if problems:
        raise DataError("\n".join(problems))


def _split(found: CheckedRun, split: resolve.Split) -> None:
    from verl_omni_core.data.prompts import AGENT_NAME, check_lengths, prompts_of

    prompts = prompts_of(found.config, split)
    found.rows[split] = prompts.num_rows
    for loop in sorted({*prompts[AGENT_NAME].to_pylist()} - {""} if AGENT_NAME in prompts.column_names else ()):
        try:
            registry.component("agent_loop", loop)
        except ConfigError as error:
            raise DataError(f"data.{split}, column {AGENT_NAME!r}: {error}") from error
    if found.model_path == Path():
        return  # the model's own fault is reported; lengths cannot be told without its tokenizers
    adapter, tokenizers = resolve.adapter(found.config), _tokenizers(found.model_path)
    longest = found.config.sampler.max_sequence_length
    try:
        cut = check_lengths(
            prompts, lambda text: adapter.token_counts(tokenizers, text, longest), found.config.data.overlong
        )
    except DataError as error:
        raise DataError(f"data.{split}, {error} (sampler.max_sequence_length is {longest})") from None
    found.truncated[split] = cut
    if cut:
        found.notes.append(
            f"data.{split}: {cut} of {prompts.num_rows} prompts are longer than a text encoder takes and are cut"
        )


def _tokenizers(folder: Path) -> dict[str, Any]:
    import transformers

    loaded = {}
    for name, class_name in resolve.parts(resolve.pipeline_index(folder)).items():
        if name.startswith("tokenizer"):
            try:
                loaded[name] = getattr(transformers, class_name).from_pretrained(str(folder), subfolder=name)
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConfigError(
                    f"model.path: {str(folder / name)!r} holds no {class_name} that can be read ({error}); give the "
                    "folder of a whole pipeline in diffusers format"
                ) from error
    return loaded
