"""How a run ends that does not finish: broken off by a fault or by its user, or torn down from any process."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl_omni_core.errors import FencedError, StoreError
from verl_omni_core.settings.run import ClusterSettings
from verl_omni_core.stages.progress_budget import FAILED, STOPPED, record_ending
from verl_omni_core.stages.session import RunRef, known_session, let_go
from verl_omni_core.stages.trained import config_of
from verl_omni_core.store import places
from verl_omni_core.store.lease import check_epoch, describe_holder, is_owned
from verl_omni_core.store.runs import open_run, steps_done
from verl_omni_core.workers.namespaces import end_actors

logger = logging.getLogger(__name__)


@contextmanager
def let_go_on_failure(run: RunRef) -> Iterator[None]:
    """Let others have a run that breaks off here. Its actors live on, so that it resumes at once."""
    try:
        yield
    except BaseException as error:
        root = Path(run.root)
        _try(_say_status, run, error)
        _try(let_go, run.root)
        logger.warning(
            "run %s broke off; started again, it goes on from here. Actors that it started live on: to end them, "
            "verl-omni teardown %s --store %s",
            *(root.name, root.name, places.store_of(root.parent)),
        )
        raise


@contextmanager
def end_on_failure(run: RunRef, settings: ClusterSettings) -> Iterator[None]:
    """End an evaluation that breaks off here, with its actors: nobody would find them again."""
    try:
        yield
    except BaseException as error:
        _try(_say_status, run, error)
        _try(end_actors, settings, Path(run.root))
        _try(let_go, run.root)
        raise


def _say_status(run: RunRef, error: BaseException) -> None:
    root = Path(run.root)
    check_epoch(root, run.epoch)  # a newer owner says itself how the run is
    # whoever interrupts or cancels raises what is no Exception
    status = FAILED if isinstance(error, Exception) else STOPPED
    open_run(root.parent, root.name).write_progress(status=status, step=steps_done(root))
    record_ending(root, run.epoch, status, error=error, session=known_session(run))


def _try(act: Callable[..., Any], *arguments: Any) -> None:
    try:
        act(*arguments)
    except Exception as error:  # noqa: BLE001 - the fault that ended the run is the one to raise
        logger.warning("after the run broke off: %s", error)


def end_run(run_id: str, store: str | Path) -> int:
    """End whatever lives of a run's actors; return how many did. What the run committed stays.

    Actors whose run's folder was deleted or moved away are found by the place that it had.

    Raises:
        StoreError: there is no such run, and nothing lives of one. FencedError: a live process runs it; it would only
            start them anew.
    """
    root = places.folder_of(store).absolute() / run_id
    try:
        run = open_run(store, run_id)
    except StoreError:
        ended = 0 if root.exists() else end_actors(ClusterSettings(), root)
        if ended:
            return ended
        raise
    if is_owned(run.root):
        raise FencedError(f"run {run_id!r} is owned by {describe_holder(run.root)}; stop that process first")
    return end_actors(config_of(run).cluster, run.root)
