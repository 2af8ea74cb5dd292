"""The ``verl-omni`` command: one module of this folder a subcommand, found because it is there.

A subcommand module holds a function of its own name, with typer's annotations, and delays heavy imports into it. A
hyphen in a command's name is an underscore in the module's.
"""

import importlib
import pkgutil
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import verl_omni_core
from verl_omni_core import cli
from verl_omni_core.errors import VerlOmniError


class _ReportingGroup(TyperGroup):
    """Ends with one message and an exit code instead of a traceback, for errors that this package raises on purpose."""

    def invoke(self, context: Any) -> Any:
        try:
            return super().invoke(context)
        except VerlOmniError as error:
            if context.params.get("debug"):
                traceback.print_exc()
            print(f"Error: {error}", file=sys.stderr)
            raise typer.Exit(error.exit_code) from error


app = typer.Typer(
    cls=_ReportingGroup,
    help="RL post-training for image, video, audio and omni generators.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(value: bool) -> None:
    if value:
        print(verl_omni_core.__version__)
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option(help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _add_commands() -> None:
    for info in pkgutil.iter_modules(cli.__path__):
        if info.name != "main" and not info.name.startswith("_"):
            module = importlib.import_module(f"{cli.__name__}.{info.name}")
            app.command(info.name.replace("_", "-"))(getattr(module, info.name))


_add_commands()
