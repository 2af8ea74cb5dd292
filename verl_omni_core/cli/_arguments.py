"""Arguments that several commands share, with one help text."""

from typing import Annotated

import typer

Profile = Annotated[str, typer.Argument(help="A profile's name, or the path of a TOML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A setting, for example run.steps=30. May be repeated."),
]
Store = Annotated[str, typer.Option(help="Folder that holds the runs.")]
