"""End a run's actors from any process."""

from pathlib import Path

from verl_omni_core.errors import FencedError
from verl_omni_core.stages.trained import config_of
from verl_omni_core.store.lease import describe_holder, is_owned
from verl_omni_core.store.runs import open_run
from verl_omni_core.workers.actors import end_actors


def end_run(run_id: str, store: str | Path) -> int:
    """End whatever lives of a run's actors; return how many did. What the run committed stays.

    Raises:
        StoreError: there is no such run. FencedError: a live process runs it; it would only start them anew.
    """
    run = open_run(store, run_id)
    if is_owned(run.root):
        raise FencedError(f"run {run_id!r} is owned by {describe_holder(run.root)}; stop that process first")
    return end_actors(config_of(run), run_id)
