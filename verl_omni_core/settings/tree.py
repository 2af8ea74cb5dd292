"""The settings tree as data: dotted names, what each accepts, and which known name is nearest to a wrong one."""

import difflib
from collections.abc import Iterator, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import AwareDatetime
from pydantic.fields import FieldInfo

from verl_omni_core.settings import names
from verl_omni_core.settings.base import Settings
from verl_omni_core.settings.run import RunConfig

_BOUNDS = ((annotated_types.Ge, "at least {0.ge}"), (annotated_types.Gt, "more than {0.gt}"))
_BOUNDS_ABOVE = ((annotated_types.Le, "at most {0.le}"), (annotated_types.Lt, "less than {0.lt}"))
_UNITS = {"_s": "seconds", "_ms": "milliseconds", "_gb": "GB", "_mb": "MB"}
_UNITS_BY_NAME = {
    "height": "pixels",
    "width": "pixels",
    "max_sequence_length": "tokens",
    "batch_wait_ms": "milliseconds",
}


@cache
def fields() -> Mapping[str, FieldInfo]:
    """Return every setting that holds a value, by dotted name, in the tree's order."""
    return dict(_leaves(RunConfig, ""))


def group_of(annotation: Any) -> type[Settings] | None:
    """Return the settings group that ``annotation`` names, if it names one."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, Settings) else None


def members(annotation: Any) -> tuple[Any, ...]:
    """Return the alternatives of a union, or the annotation alone."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def item_group(annotation: Any) -> type[Settings] | None:
    """Return the settings group that ``annotation`` is a list of, if it is one."""
    for member in members(annotation):
        if get_origin(member) is list:
            return group_of(get_args(member)[0])
    return None


def allowed(field: FieldInfo) -> str:
    """Return a phrase for what a setting accepts: ``a number of at least 0, or none``."""
    kinds = [_kind(member) for member in members(field.annotation) if member is not NoneType]
    phrase = " or ".join(kinds)
    bounds = [
        text.format(m) for m in field.metadata for kind, text in (*_BOUNDS, *_BOUNDS_ABOVE) if isinstance(m, kind)
    ]
    if bounds:
        phrase += " of " + " and ".join(bounds)
    for constraint in field.metadata:
        if isinstance(constraint, annotated_types.MinLen):
            phrase += f" with at least {constraint.min_length} item"
        elif getattr(constraint, "pattern", None):
            phrase += f" that matches {constraint.pattern}"
    return phrase + (", or none" if NoneType in members(field.annotation) else "")


def unit(name: str) -> str:
    """Return the unit of a setting, or a dash: from its last word, which ends in one where it is not obvious."""
    word = name.rpartition(".")[2]
    if word in _UNITS_BY_NAME:
        return _UNITS_BY_NAME[word]
    return next((text for suffix, text in _UNITS.items() if word.endswith(suffix)), "–")


def advice(key: str) -> str:
    """Return what to write instead of the unknown ``key``: our word for VeRL-Omni's, or the nearest known names."""
    known = list(fields())
    theirs = names.ours(key)
    if theirs:
        note = names.NOTES.get(theirs[0]) if len(theirs) == 1 else None
        return f"VeRL-Omni's {key} is {_either(theirs)} here" + (f" ({note})" if note else "")
    word = key.rpartition(".")[2]
    same_word = [name for name in known if name.rpartition(".")[2] == word]
    if same_word:
        return f"did you mean {_either(same_word[:3])}?"
    close = difflib.get_close_matches(key, known, n=2, cutoff=0.7)
    if not close:
        last_words = {name.rpartition(".")[2]: name for name in known}
        close = [last_words[match] for match in difflib.get_close_matches(word, list(last_words), n=2, cutoff=0.7)]
    if close:
        return f"did you mean {_either(close)}?"
    group = key.partition(".")[0]
    siblings = [name for name in known if name.startswith(group + ".")] if group in RunConfig.model_fields else []
    return f"known: {', '.join(siblings or RunConfig.model_fields)}"


def _leaves(group: type[Settings], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in group.model_fields.items():
        inner = group_of(field.annotation)
        if inner is None:
            yield prefix + name, field
        else:
            yield from _leaves(inner, f"{prefix}{name}.")


def _kind(member: Any) -> str:
    origin = get_origin(member)
    if member is AwareDatetime:
        return "a date and time with its offset from UTC"
    if origin is Annotated:
        inner, *constraints = get_args(member)
        bounds = [c for constraint in constraints for c in getattr(constraint, "metadata", ())]
        return " of ".join([_kind(inner), *(t.format(b) for b in bounds for k, t in _BOUNDS if isinstance(b, k))])
    if origin is Literal:
        return ("one of " if len(get_args(member)) > 1 else "only ") + ", ".join(map(repr, get_args(member)))
    if origin is tuple:
        return f"a list of {len(get_args(member))} numbers"
    if origin is list:
        inner = group_of(get_args(member)[0])
        return f"a list of tables with {', '.join(inner.model_fields)}" if inner else "a list of text"
    plain = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return plain.get(member, "a table")


def _either(choices: list[str]) -> str:
    return " or ".join(repr(choice) for choice in choices)
