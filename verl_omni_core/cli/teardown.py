"""``verl-omni teardown``: end a run's actors."""

from typing import Annotated

import typer

from verl_omni_core.cli._arguments import Store


def teardown(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run.")],
    store: Store = "runs",
) -> None:
    """End the actors of a run; what it committed stays, and the run can be resumed."""
    from verl_omni_core.stages.ending import end_run

    print(f"ended {end_run(run_id, store)} actors of {run_id}")
