"""From what was typed to one resolved :class:`RunConfig`, with the origin of every value.

Precedence: explicit argument, ``--set a.b=c``, environment (``VERL_OMNI_A__B``), profile, default. Used where a command
is typed; a flow takes the resolved tree and reads no environment.
"""

import itertools
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from types import NoneType
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from verl_omni_core.errors import ConfigError, UnknownNameError
from verl_omni_core.registry import nearest
from verl_omni_core.settings import tree
from verl_omni_core.settings.base import Settings
from verl_omni_core.settings.run import RunConfig

PREFIX = "VERL_OMNI_"
DEFAULT = "default"
JOB_END = "SLURM_JOB_END_TIME"
"""Variable in which Slurm tells a job when its time ends, in seconds since 1970."""


@dataclass(frozen=True)
class Resolved:
    """A resolved run."""

    config: RunConfig
    origins: Mapping[str, str]
    """Dotted name of every setting, and of every entry of a free table, to where its value comes from."""
    profile: str | None
    """Name or path of the profile, as given."""

    def record(self) -> dict[str, str]:
        """Return what is saved with a run: the origins, and under ``profile`` the profile."""
        return {"profile": self.profile or "none", **self.origins}


@dataclass(frozen=True)
class Layer:
    """Values of one source, nested as the tree is, and the origin of each by dotted name."""

    values: dict[str, Any]
    origins: dict[str, str]


def load(
    profile: str | Path | None = None,
    *,
    overrides: Sequence[str] = (),
    explicit: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Resolved:
    """Resolve a run.

    Args:
        profile: name of a profile that ships with the package, or path of a TOML file; none: defaults.
        overrides: ``a.b=c`` texts as ``--set`` takes them.
        explicit: dotted names to values; wins over everything.
        environ: the environment; none: this process's.
    Raises:
        ConfigError: an unknown name, a wrong type or a value out of range; lists all of them, with their origin.
    """
    environ = os.environ if environ is None else environ
    layers = [
        _explicit_layer(explicit or {}),
        _overrides_layer(overrides),
        _environment_layer(environ),
        _profile_layer(profile),
        _scheduler_layer(environ),
    ]
    config = _merge(layers)
    return Resolved(config, _origins(config, layers), None if profile is None else str(profile))


def apply_overrides(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Return ``config`` with ``a.b=c`` texts applied, as ``--set`` applies them; reads no environment.

    Raises:
        ConfigError: as :func:`load`.
    """
    if not overrides:
        return config
    return _merge([_overrides_layer(overrides), Layer(config.model_dump(), {})])


def of_a_new_start(config: RunConfig) -> RunConfig:
    """Return a run's settings without those that concern only the start that had them."""
    return config.model_copy(update={"run": config.run.model_copy(update={"resume": "auto", "end_by": None})})


def override_names(overrides: Sequence[str]) -> list[str]:
    """Return the dotted names that ``a.b=c`` texts set."""
    return [text.partition("=")[0].strip() for text in overrides]


def profile_names() -> list[str]:
    """Return the names of the profiles that ship with the package."""
    return sorted(entry.name.removesuffix(".toml") for entry in _shipped().iterdir() if entry.name.endswith(".toml"))


def read_profile(profile: str | Path) -> dict[str, Any]:
    """Return a profile's table, unchecked.

    Raises:
        UnknownNameError: there is neither a file nor a shipped profile of that name. ConfigError: it is no TOML.
    """
    path = Path(profile)
    if path.suffix == ".toml" or path.is_file():
        if not path.is_file():
            raise UnknownNameError(
                f"profile {str(profile)!r} does not exist; give an existing TOML file or a shipped profile: "
                f"{', '.join(profile_names())}"
            )
        text = _text_of(path)
    elif str(profile) in profile_names():
        text = (_shipped() / f"{profile}.toml").read_text(encoding="utf-8")
    else:
        raise UnknownNameError(f"profile {str(profile)!r} does not exist; {nearest(str(profile), profile_names())}")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"profile {str(profile)!r} is no valid TOML: {error}; correct that line") from None


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"profile {str(path)!r} is not UTF-8 text ({error}); save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"profile {str(path)!r} cannot be read ({error.strerror}); make it readable") from error


def parse_value(text: str, field: FieldInfo | None) -> Any:
    """Return the value that ``text`` of a command line or environment variable means for ``field``.

    A setting that takes text takes it as it stands; ``none`` means none where that is allowed; everything else is read
    as a TOML value, and as text if it is none.
    """
    kinds = tree.members(field.annotation) if field is not None else ()
    if text.lower() in ("none", "null") and (NoneType in kinds or field is None):
        return None
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        return text
    return text if str in kinds and not isinstance(value, str) else value


def _explicit_layer(explicit: Mapping[str, Any]) -> Layer:
    values: dict[str, Any] = {}
    for name, value in explicit.items():
        _place(values, name, value, "argument")
    return Layer(values, dict.fromkeys(_flat(values), "argument"))


def _overrides_layer(overrides: Sequence[str]) -> Layer:
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for text in overrides:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or not name:
            raise ConfigError(f"--set {text!r}: expected name=value, for example run.steps=30")
        _place(values, name, parse_value(value.strip(), tree.fields().get(name)), f"--set {text}")
        origins |= dict.fromkeys(_flat(_nested(name, None)), f"--set {text}")
    return Layer(values, origins)


def _environment_layer(environ: Mapping[str, str]) -> Layer:
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    flattened = {name.replace(".", "_"): name for name in tree.fields()}
    for variable in sorted(environ):
        rest = variable.removeprefix(PREFIX).lower()
        if not variable.startswith(PREFIX):
            continue
        if "__" not in rest:
            if rest in flattened:
                right = PREFIX + flattened[rest].replace(".", "__").upper()
                raise ConfigError(f"environment {variable}: two underscores separate groups; use {right}")
            continue  # not a setting: the same prefix serves other variables, such as the folder of local services
        name = rest.replace("__", ".")
        _place(values, name, parse_value(environ[variable], tree.fields().get(name)), f"environment {variable}")
        origins[name] = f"environment {variable}"
    return Layer(values, origins)


def _scheduler_layer(environ: Mapping[str, str]) -> Layer:
    """Return what the machine's scheduler says of the job; whatever the user says counts for more."""
    seconds = environ.get(JOB_END)
    if not seconds:
        return Layer({}, {})
    try:
        end_by = datetime.fromtimestamp(int(seconds), UTC)
    except (ValueError, OverflowError, OSError):
        raise ConfigError(
            f"environment {JOB_END} is {seconds!r}, expected seconds since 1970; unset it, or set run.end_by"
        ) from None
    return Layer({"run": {"end_by": end_by}}, {"run.end_by": f"environment {JOB_END}"})


def _profile_layer(profile: str | Path | None) -> Layer:
    if profile is None:
        return Layer({}, {})
    values = read_profile(profile)
    return Layer(values, dict.fromkeys(_flat(values), f"profile {profile}"))


def _merge(layers: list[Layer]) -> RunConfig:
    unknown = [problem for layer in layers for problem in _unknown(layer.values, RunConfig, "", layer)]
    if unknown:
        raise UnknownNameError("\n".join(unknown))

    class Sources(BaseSettings, RunConfig):  # type: ignore[misc]  # both only add keys to the model's configuration
        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], *_: Any, **__: Any
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return tuple(_Source(settings_cls, layer) for layer in layers)

    try:
        merged = Sources()
    except ValidationError as error:
        raise ConfigError(_explain(error, layers)) from None
    return RunConfig(**{name: getattr(merged, name) for name in RunConfig.model_fields})


class _Source(PydanticBaseSettingsSource):
    def __init__(self, settings_cls: type[BaseSettings], layer: Layer) -> None:
        super().__init__(settings_cls)
        self.layer = layer

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self.layer.values.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return self.layer.values


def _unknown(values: Mapping[str, Any], group: type[Settings], prefix: str, layer: Layer) -> list[str]:
    problems = []
    for key, value in values.items():
        field = group.model_fields.get(key)
        name = prefix + key
        if field is None:
            inner = _flat(
                {key: value}, prefix
            )  # a foreign table is named by its keys, which may have a counterpart here
            problems += [f"unknown setting {path!r} ({_origin(path, layer)}): {tree.advice(path)}" for path in inner]
            continue
        inner_group = tree.group_of(field.annotation)
        if inner_group is not None and isinstance(value, Mapping):
            problems += _unknown(value, inner_group, name + ".", layer)
        item = tree.item_group(field.annotation)
        if item is not None and isinstance(value, list):
            for index, entry in enumerate(value):
                known = list(item.model_fields)
                for entry_key in entry if isinstance(entry, Mapping) else ():
                    if entry_key not in known:
                        where = f"{name}.{index}.{entry_key}"
                        problems.append(
                            f"unknown setting {where!r} ({_origin(name, layer)}): {nearest(entry_key, known)}"
                        )
    return problems


def _explain(error: ValidationError, layers: list[Layer]) -> str:
    lines = []
    for problem in error.errors():
        message = problem["msg"].removeprefix("Value error, ")
        field = _field_at(problem["loc"])
        if field is None and problem["type"] == "value_error":  # what a group says of its settings together
            lines.append(message)
            continue
        # a union's members have names of pydantic's own, which no setting has
        own = itertools.takewhile(lambda part: isinstance(part, int) or part.isidentifier(), problem["loc"])
        name = ".".join(map(str, own))
        setting = next((known for known in tree.fields() if name == known or name.startswith(known + ".")), name)
        origin = next((_origin(setting, layer) for layer in layers if _has(layer.values, setting)), DEFAULT)
        if problem["type"] == "missing":
            lines.append(f"{name} is missing ({origin}): give it a value")
        elif field is None:
            lines.append(f"{name} is {problem['input']!r} ({origin}): expected a table of settings")
        else:
            lines.append(f"{name} is {problem['input']!r} ({origin}): expected {tree.allowed(field)}")
    return "\n".join(dict.fromkeys(lines))


def _field_at(location: Sequence[Any]) -> FieldInfo | None:
    group: type[Settings] | None = RunConfig
    field = None
    for part in location:
        if isinstance(part, int) or group is None:
            continue
        if part not in group.model_fields:
            break
        field = group.model_fields[part]
        group = tree.group_of(field.annotation) or tree.item_group(field.annotation)
    return None if field is not None and tree.group_of(field.annotation) is not None else field


def _origins(config: RunConfig, layers: list[Layer]) -> dict[str, str]:
    origins = {}
    for name in tree.fields():
        origins[name] = next((_origin(name, layer) for layer in layers if _has(layer.values, name)), DEFAULT)
        value = _at(config.model_dump(), name)
        for key in value if isinstance(value, dict) else ():
            entry = f"{name}.{key}"
            origins[entry] = next((_origin(entry, layer) for layer in layers if _has(layer.values, entry)), DEFAULT)
    return origins


def _origin(name: str, layer: Layer) -> str:
    path = name
    while path:
        if path in layer.origins:
            return layer.origins[path]
        path = path.rpartition(".")[0]
    inner = [origin for key, origin in layer.origins.items() if key.startswith(name + ".")]
    return inner[0] if inner else "given settings"


def _place(values: dict[str, Any], name: str, value: Any, origin: str) -> None:
    *groups, last = name.split(".")
    here = values
    for group in groups:
        here = here.setdefault(group, {})
        if not isinstance(here, dict):
            raise ConfigError(f"{origin}: {name!r} is inside {group!r}, which has a value of its own; give only one")
    if not last or any(not group for group in groups):
        raise ConfigError(f"{origin}: {name!r} is no name of a setting; names are words joined by dots, as run.steps")
    here[last] = value


def _nested(name: str, value: Any) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    _place(nested, name, value, name)
    return nested


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    paths = []
    for key, value in values.items():
        inner = isinstance(value, Mapping) and bool(value)
        paths += _flat(value, f"{prefix}{key}.") if inner else [prefix + key]
    return paths


def _has(values: Any, name: str) -> bool:
    for part in name.split("."):
        if not isinstance(values, Mapping) or part not in values:
            return False
        values = values[part]
    return True


def _at(values: Any, name: str) -> Any:
    for part in name.split("."):
        values = values[part]
    return values


def _shipped() -> Any:
    return resources.files("profiles")
