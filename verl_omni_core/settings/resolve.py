"""From settings to the things they name: validated options of components, and paths of what a run reads."""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from verl_omni_core import registry
from verl_omni_core.errors import ConfigError, DataError
from verl_omni_core.given_files import json_object
from verl_omni_core.settings.algorithm import AlgorithmSettings
from verl_omni_core.settings.reward import ScorerSettings
from verl_omni_core.settings.run import RunConfig

GLYPH = "glyph"
"""Name under which the embedded model and its prompts are known."""

Split = Literal["train", "validation"]

_OF_THE_RUN = {"name", "recompute_old_log_probs", "max_ratio_deviation", "options"}
SHARED = tuple(name for name in AlgorithmSettings.model_fields if name not in _OF_THE_RUN)
"""Settings that several algorithms have; each takes part only where the algorithm's ``Options`` has its name."""


_KEYS = {
    "agent_loop": "rollout.agent_loop",
    "algorithm": "algorithm.name",
    "engine": "rollout.name",
    "model": "model.name",
    "reward": "reward.scorers",
    "sampler": "sampler.name",
}


def component(kind: str, name: str) -> Any:
    """Return a component as :func:`registry.component` does; its error names the setting."""
    with _naming(_KEYS[kind]):
        return registry.component(kind, name)


def algorithm_options(config: RunConfig) -> Any:
    """Return the algorithm's validated ``Options``: its defaults, the shared settings that are set, its own options.

    Raises:
        ConfigError: a shared setting that this algorithm does not have, one given twice, or an option that it refuses.
    """
    settings = config.algorithm
    given = {name: value for name in SHARED if (value := getattr(settings, name)) is not None}
    cls = getattr(component("algorithm", settings.name), "Options", None)
    known = [field.name for field in dataclasses.fields(cls)] if cls else []
    for name, value in given.items():
        if name not in known:
            raise ConfigError(
                f"algorithm.{name} is {value!r}, but algorithm {settings.name!r} has no {name}; remove it. "
                f"It has: {', '.join(known) or 'no options'}"
            )
        if name in settings.options:
            raise ConfigError(f"algorithm.{name} and algorithm.options.{name} are both given; keep algorithm.{name}")
    with _naming("algorithm.options" if settings.options else "algorithm"):
        return registry.options("algorithm", settings.name, {**given, **settings.options})


def sampler_options(config: RunConfig) -> Any:
    """Return the transition rule's validated ``Options``. Raises ConfigError as :func:`registry.options` does."""
    component("sampler", config.sampler.name)
    with _naming("sampler.options"):
        return registry.options("sampler", config.sampler.name, config.sampler.options)


def scorer_options(settings: ScorerSettings) -> Any:
    """Return a scorer's validated ``Options``. Raises ConfigError as :func:`registry.options` does."""
    component("reward", settings.name)
    with _naming("reward.scorers"):
        return registry.options("reward", settings.name, settings.options)


def adapter(config: RunConfig) -> Any:
    """Return the model adapter, built; loads no weights.

    Raises:
        ConfigError: no such model, or options that it refuses.
    """
    model = component("model", config.model.name)
    with _naming("model.options"):
        return model.build(registry.options("model", config.model.name, config.model.options))


def model_path(config: RunConfig) -> Path:
    """Return the pipeline folder: the embedded one, a folder, or a model that lies in the local hub cache.

    Raises:
        ConfigError: there is none; nothing is downloaded.
    """
    given = config.model.path
    folder = _packaged("pipeline") if given == GLYPH else Path(given).expanduser()
    is_hub_id = given.count("/") == 1 and not given.startswith((".", "~", "/"))
    if not folder.is_dir() and is_hub_id:
        folder = _cached(given) or folder
    if not folder.is_dir():
        hub = f", or download that model first (hf download {given})" if is_hub_id else ""
        raise ConfigError(
            f"model.path is {given!r}, but {str(folder)!r} does not exist; give a pipeline folder in diffusers "
            f"format or '{GLYPH}' for the embedded model{hub}"
        )
    if not (folder / "model_index.json").is_file():
        raise ConfigError(
            f"model.path is {given!r}, but {str(folder)!r} has no model_index.json; give the folder of a whole "
            "pipeline in diffusers format, not of one of its parts"
        )
    return folder


def pipeline_index(folder: Path) -> dict[str, Any]:
    """Return ``model_index.json`` of a pipeline folder.

    Raises:
        ConfigError: it cannot be read.
    """
    with _naming("model.path"):
        return json_object(folder / "model_index.json")


def parts(index: Mapping[str, Any]) -> dict[str, str]:
    """Return the parts that a pipeline's index names, each with its class; parts that it says to lack are left out."""
    named = {name: entry for name, entry in index.items() if isinstance(entry, list) and len(entry) == 2}
    return {name: str(entry[1]) for name, entry in named.items() if entry[1] is not None}


def data_path(config: RunConfig, split: Split) -> Path:
    """Return the file of prompts of a split.

    Raises:
        DataError: it does not exist.
    """
    given = str(getattr(config.data, split))
    path = _packaged(f"prompts/{split}.parquet") if given == GLYPH else Path(given).expanduser()
    if not path.is_file():
        seen = "is a folder" if path.is_dir() else "does not exist"
        raise DataError(
            f"data.{split} is {given!r}, but {str(path)!r} {seen}; give a parquet, JSON or JSON lines file, or "
            f"'{GLYPH}' for the embedded prompts"
        )
    return path


@contextmanager
def _naming(key: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise type(error)(f"{key}: {error}") from error


def _packaged(name: str) -> Path:
    return Path(str(resources.files("verl_omni_core"))) / "glyph" / name


def _cached(hub_id: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None  # the caller says what to do
