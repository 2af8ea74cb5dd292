"""Teardown: end a run's actors."""

from prefect import flow

from tasks.run import end_run


@flow(name="teardown", flow_run_name="{run_id}", log_prints=False)
def teardown(run_id: str, store: str = "runs") -> int:
    """End the actors of a run; what it committed stays, and the run can be resumed.

    Args:
        run_id: Name of the run.
        store: Folder that holds the runs.

    Returns:
        How many actors were ended.
    """
    return end_run(run_id, store)
