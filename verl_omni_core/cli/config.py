"""``verl-omni config``: the resolved settings of a run, each with its origin."""

import json
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from verl_omni_core.cli._arguments import Overrides


def config(
    profile: Annotated[
        str | None, typer.Argument(help="A profile's name, or the path of a TOML file; none: the defaults.")
    ] = None,
    set_: Overrides = None,
    check: Annotated[bool, typer.Option(help="Also check components, files and prompts, as a run would.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the settings alone, as one line of JSON.")] = False,
) -> None:
    """Print the resolved settings of a run and where each value comes from.

    The output is a valid profile, or with --json what a deployment takes as ``config``. Without a profile it shows the
    defaults.
    """
    from verl_omni_core.settings.loader import load

    resolved = load(profile, overrides=set_ or ())
    values = resolved.config.model_dump(mode="json")
    print(json.dumps(values) if as_json else "\n".join(toml_lines(values, resolved.origins)))
    if check:
        from verl_omni_core.settings.check import check as check_run

        found = check_run(resolved.config)
        notes = ["# checked: this run can start", *(f"# {note}" for note in found.notes)]
        print("\n".join(notes), file=sys.stderr if as_json else sys.stdout)


def toml_lines(values: dict[str, Any], origins: dict[str, str] | Any) -> Iterator[str]:
    """Yield the tree as TOML, the origin of each value as a comment; none has no TOML form and is a comment as well."""
    from verl_omni_core.settings import tree

    tables: dict[str, list[str]] = {}
    for name in tree.fields():
        tables.setdefault(name.rpartition(".")[0], []).append(name)
    for table, names in tables.items():
        yield f"[{table}]"
        for name in names:
            value: Any = values
            for part in name.split("."):
                value = value[part]
            key = name.rpartition(".")[2]
            line = f"# {key} = none" if value is None else f"{key} = {toml_value(value)}"
            yield f"{line:<44}  # {origins[name]}"
        yield ""


def toml_value(value: Any) -> str:
    """Return a JSON-like value, without none, as TOML on one line."""
    if isinstance(value, dict):
        inner = ", ".join(f"{_key(key)} = {toml_value(entry)}" for key, entry in value.items() if entry is not None)
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() else json.dumps(key, ensure_ascii=False)
