"""``verl-omni runs``: the runs of a store."""

from typing import Annotated

import typer


def runs(store: Annotated[str, typer.Option(help="Folder that holds the runs.")] = "runs") -> None:
    """List the runs of a store, oldest first, whether or not their flows are alive."""
    from rich.console import Console
    from rich.table import Table

    from verl_omni_core.store.runs import list_runs

    found = list_runs(store)
    if not found:
        print(f"{store} has no runs; start one with: verl-omni train PROFILE")
        return
    table = Table("run", "status", "steps", "reward", "started", "updated")
    for run in found:
        steps = str(run.steps_done) if run.steps is None else f"{run.steps_done}/{run.steps}"
        reward = "-" if run.reward is None else f"{run.reward:.4f}"
        table.add_row(run.run_id, run.status, steps, reward, run.started, run.updated)
    Console().print(table)
