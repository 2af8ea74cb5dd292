"""Arguments that several commands share, with one help text."""

from typing import Annotated, Literal

import typer

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A setting, for example run.steps=30. May be repeated."),
]
Store = Annotated[str, typer.Option(help="Folder that holds the runs, or s3://bucket/prefix.")]
Network = Annotated[
    Literal["policy", "average"] | None,
    typer.Option(help="The policy or its moving average; none: the average where the run keeps one."),
]
Step = Annotated[int | None, typer.Option(min=0, help="Step whose weights are taken; none: the newest that has them.")]
WithPrefect = Annotated[bool, typer.Option("--prefect/--no-prefect", help="Run as a Prefect flow, or as plain Python.")]
