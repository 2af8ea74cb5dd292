"""``verl-omni teardown``: end a run's actors."""

from typing import Annotated

import typer


def teardown(
    run_id: Annotated[str, typer.Argument(help="Name of the run.")],
    store: Annotated[str, typer.Option(help="Folder that holds the runs.")] = "runs",
) -> None:
    """End the actors of a run; what it committed stays, and the run can be resumed."""
    from verl_omni_core.settings.run import RunConfig
    from verl_omni_core.store.runs import open_run
    from verl_omni_core.workers.actors import end_actors

    config = RunConfig.model_validate(open_run(store, run_id).config)
    print(f"ended {end_actors(config, run_id)} actors of {run_id}")
