"""Write docs/settings.md from the settings tree: every setting with its name, VeRL-Omni's, default, unit, meaning."""

import argparse
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic.dataclasses import dataclass as checked

from verl_omni_core import registry
from verl_omni_core.cli.config import toml_value
from verl_omni_core.settings import names, tree
from verl_omni_core.settings.loader import profile_names
from verl_omni_core.settings.resolve import SHARED
from verl_omni_core.settings.run import RunConfig

PAGE = Path(__file__).resolve().parent.parent / "docs" / "settings.md"

HEAD = """\
# Settings

Written by `scripts/make_settings_doc.py`; `make docs` renews it.

A value comes from the first of these that has it: an explicit argument, `--set a.b=c`, the environment
(`VERL_OMNI_A__B=c`: two underscores between groups), the profile, the default. `verl-omni config PROFILE` prints every
value of a run with its origin. Values are written as in TOML; `none` means none. Unknown names are refused, with the
nearest known one; VeRL-Omni's names are answered with ours.

Profiles that ship with the package: {profiles}.

The columns: our name, what it accepts, its default, its unit, VeRL-Omni's key for it (the `actor_rollout_ref.` in front
left out), and what it means.
"""

OPTIONS = {
    "model": "model.options",
    "sampler": "sampler.options",
    "algorithm": "algorithm.options",
    "reward": "reward.scorers[].options",
}
"""Kind of component to the setting that holds its own options; those of an engine are the engine's business."""

OPTION_ROW = "| `{name}` | {allowed} | {default} | {meaning} |"

ROW = "| {name} | {allowed} | {default} | {unit} | {theirs} | {meaning} |"


def page() -> str:
    """Return the whole page."""
    head = HEAD.format(profiles=", ".join(f"`{name}`" for name in profile_names()))
    return "\n".join([head, *_tables(), *_components(), *_options()])


def _tables() -> Iterator[str]:
    for group, field in RunConfig.model_fields.items():
        yield f"## {group}\n\n{field.description}\n"
        yield from _header()
        for name, setting in tree.fields().items():
            if name.startswith(group + "."):
                yield _row(name, setting)
        yield ""


def _header() -> Iterator[str]:
    yield "| ours | accepts | default | unit | VeRL-Omni's | meaning |"
    yield "|---|---|---|---|---|---|"


def _row(name: str, setting: Any) -> str:
    note = names.NOTES.get(name)
    theirs = "<br>".join(f"`{key.removeprefix('actor_rollout_ref.')}`" for key in names.VERL_OMNI.get(name, ()))
    return ROW.format(
        name=f"`{name}`",
        allowed=tree.allowed(setting).replace("|", "\\|"),
        default=_default(setting),
        unit=tree.unit(name),
        theirs=(theirs or "–") + (f" ({note})" if note else ""),
        meaning=setting.description,
    )


def _default(setting: Any) -> str:
    if setting.is_required():
        return "required"
    if setting.default is None:
        return "none"
    value = setting.default
    if isinstance(value, list):
        value = [entry.model_dump() if hasattr(entry, "model_dump") else entry for entry in value]
    return f"`{toml_value(list(value) if isinstance(value, tuple) else value)}`"


def _components() -> Iterator[str]:
    yield "## Components\n"
    yield "A name may also be `package.module` or `package.module:attribute` of code outside this tree.\n"
    yield "| setting | kind | names |"
    yield "|---|---|---|"
    settings = {
        "model.name": "model",
        "sampler.name": "sampler",
        "algorithm.name": "algorithm",
        "rollout.name": "engine",
        "rollout.agent_loop": "agent_loop",
        "reward.scorers[].name": "reward",
    }
    for setting, kind in settings.items():
        yield f"| `{setting}` | {kind} | {', '.join(f'`{name}`' for name in _names(kind))} |"
    yield ""


def _options() -> Iterator[str]:
    yield "## Options of components\n"
    yield textwrap.fill(
        "A component's own options, which the setting in its heading takes as a table. Components that have none are "
        "left out, and so are engines: `diffusers` takes no `rollout.options`, `vllm_omni` hands them to vLLM-Omni as "
        "they are.",
        120,
    )
    yield ""
    for kind, setting in OPTIONS.items():
        for name in _names(kind):
            fields = option_fields(kind, name)
            if not fields:
                continue
            yield f"### {kind} `{name}`: `{setting}`\n"
            yield "| option | accepts | default | meaning |"
            yield "|---|---|---|---|"
            for option, field in fields.items():
                shared = f" Set it as `algorithm.{option}`." if kind == "algorithm" and option in SHARED else ""
                yield OPTION_ROW.format(
                    name=option,
                    allowed=tree.allowed(field).replace("|", "\\|"),
                    default=_default(field),
                    meaning=(field.description or "") + shared,
                )
            yield ""


def option_fields(kind: str, name: str) -> dict[str, Any]:
    """Return a component's options as pydantic's fields, whether bounds and help stand in annotations or metadata."""
    options = getattr(registry.component(kind, name), "Options", None)
    return {} if options is None else dict(checked(frozen=True)(options).__pydantic_fields__)


def _names(kind: str) -> list[str]:
    try:
        return registry.names(kind)
    except ModuleNotFoundError:
        return []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only tell whether the page is current")
    if parser.parse_args().check:
        return int(PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
