"""Components by name: ``(kind, name)`` to a module, in this tree or outside it.

A kind is a folder of this package, a component a module in it without a leading underscore. There is no table to
edit: a new file is found because it is there. ``package.module`` or ``package.module:attribute`` names a component
outside the tree. A component declares its options in a frozen dataclass ``Options``; unknown keys and wrong types are
refused before anything starts.
"""

import dataclasses
import difflib
import importlib
import json
import pkgutil
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from verl_omni_core.errors import ConfigError, UnknownNameError

KINDS = {
    "algorithm": "verl_omni_core.algorithms",
    "sampler": "verl_omni_core.samplers",
    "model": "verl_omni_core.models",
    "engine": "verl_omni_core.rollout",
    "reward": "verl_omni_core.rewards",
    "agent_loop": "verl_omni_core.agent_loop.loops",
}


def names(kind: str) -> list[str]:
    """Return the names of all components of ``kind`` in this tree, sorted."""
    package = importlib.import_module(_package_of(kind))
    return sorted(info.name for info in pkgutil.iter_modules(package.__path__) if not info.name.startswith("_"))


def nearest(name: str, known: list[str]) -> str:
    """Return a phrase for an error message: the nearest known names, or all of them."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else f"known: {', '.join(known)}"


def component(kind: str, name: str) -> Any:
    """Import and return the component ``name`` of ``kind``: a module, or the attribute of an outside module.

    Raises:
        UnknownNameError: no such component; the message lists the nearest names.
    """
    if ":" in name or "." in name:
        return _outside(kind, name)
    if name not in names(kind):
        raise UnknownNameError(f"{kind} {name!r} does not exist; {nearest(name, names(kind))}")
    return importlib.import_module(f"{_package_of(kind)}.{name}")


def options(kind: str, name: str, values: Mapping[str, Any]) -> Any:
    """Validate ``values`` against the ``Options`` dataclass of a component and return the instance.

    Raises:
        ConfigError: an unknown key, a wrong type or a value out of bounds; names the component and the key.
    """
    found = component(kind, name)
    cls = getattr(found, "Options", None)
    if cls is None:
        if values:
            raise ConfigError(f"{kind} {name!r} takes no options, got {sorted(values)}; remove them")
        return SimpleNamespace()
    known = [field.name for field in dataclasses.fields(cls)]
    for key in values:
        if key not in known:
            raise UnknownNameError(f"{kind} {name!r} has no option {key!r}; {nearest(key, known)}")
    try:
        # as JSON, in which a list may be a tuple and a whole number a float, but text is no number and 1 is not true
        return _adapter(cls).validate_json(json.dumps(dict(values)), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{kind} {name!r}: option {key}: {first['msg']}, got {first['input']!r}") from None


def _adapter(cls: type) -> TypeAdapter:
    # pydantic re-validates a standard dataclass with the strictness that it does not have by itself
    strict = type(cls.__name__, (cls,), {"__pydantic_config__": ConfigDict(extra="forbid")})
    return TypeAdapter(dataclasses.dataclass(frozen=True, kw_only=True)(strict))


def _package_of(kind: str) -> str:
    try:
        return KINDS[kind]
    except KeyError:
        raise UnknownNameError(f"component kind {kind!r} does not exist; {nearest(kind, sorted(KINDS))}") from None


def _outside(kind: str, name: str) -> ModuleType | Any:
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UnknownNameError(
            f"{kind} {name!r}: cannot import {module_name!r} ({error}); install the package that holds it or use one "
            f"of {', '.join(names(kind))}"
        ) from error
    if not attribute:
        return module
    if not hasattr(module, attribute):
        raise UnknownNameError(f"{kind} {name!r}: module {module_name!r} has no attribute {attribute!r}")
    return getattr(module, attribute)
