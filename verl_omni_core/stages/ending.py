"""End a run's actors from any process."""

from pathlib import Path

from verl_omni_core.cluster import ray_head, services
from verl_omni_core.errors import FencedError, StoreError
from verl_omni_core.settings.run import ClusterSettings
from verl_omni_core.stages.trained import config_of
from verl_omni_core.store.lease import describe_holder, is_owned
from verl_omni_core.store.runs import open_run
from verl_omni_core.workers.actors import end_actors


def end_run(run_id: str, store: str | Path) -> int:
    """End whatever lives of a run's actors; return how many did. What the run committed stays.

    Actors whose run's folder was deleted or moved away are found by the place that it had.

    Raises:
        StoreError: there is no such run, and nothing lives of one. FencedError: a live process runs it; it would only
            start them anew.
    """
    root = Path(store).absolute() / run_id
    try:
        run = open_run(store, run_id)
    except StoreError:
        ended = 0 if root.exists() else _end_orphans(root)
        if ended:
            return ended
        raise
    if is_owned(run.root):
        raise FencedError(f"run {run_id!r} is owned by {describe_holder(run.root)}; stop that process first")
    return end_actors(config_of(run).cluster, run.root)


def _end_orphans(root: Path) -> int:
    settings = ClusterSettings()
    if not ray_head.given(settings) and services.find(ray_head.NAME) is None:
        return 0  # no cluster is up, and none is to be started for this
    return end_actors(settings, root)
