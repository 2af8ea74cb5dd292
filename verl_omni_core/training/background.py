"""Writing snapshots beside training: the copy is made at once, the files come from a thread."""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from verl_omni_core.errors import ContractError, DeadlineError, StoreError, VerlOmniError
from verl_omni_core.training import checkpoint
from verl_omni_core.training.checkpoint import WrittenFile
from verl_omni_core.training.ranks import Ranks
from verl_omni_core.training.snapshot import Snapshot, take

if TYPE_CHECKING:
    from verl_omni_core.training.engine import DiffusersFSDPEngine

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Written:
    """A snapshot that is on the disk and has been read back."""

    files: list[Any]
    """What :meth:`SnapshotWriter.begin` was to record of each file."""
    seconds: float
    """From the moment of the copy."""


class SnapshotWriter:
    """Writes one snapshot at a time, in a thread of its own and over a group of its own.

    All ranks make theirs together and begin the same snapshots in the same order.
    """

    def __init__(self, ranks: Ranks, timeout_s: float) -> None:
        """Make a writer; see :meth:`verl_omni_core.training.ranks.Ranks.beside`."""
        self._ranks = ranks.beside(timeout_s)
        self._timeout_s = timeout_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._folder: Path | None = None
        self._future: Future[Written] | None = None

    def begin(
        self,
        engine: "DiffusersFSDPEngine",
        folder: Path,
        extra: Mapping[str, Any],
        record: Callable[[WrittenFile], Any] | None = None,
    ) -> None:
        """Copy the state and begin to write it into ``folder``; returns once the copy is made. Twice is once.

        One that is still being written, for an owner that never asked for it, is waited for first.

        Args:
            extra: JSON values to keep along.
            record: called in the thread with each file once all are read back; what it returns is answered.
        Raises:
            DeadlineError: that one does not end.
        """
        if folder == self._folder:
            return
        if self._future is not None:
            self._drop(self._future)
        started = monotonic()
        snapshot = take(engine, extra, self._ranks)
        self._folder = folder
        self._future = self._thread.submit(self._write, snapshot, folder, record or _as_it_is, started)

    def finish(self, folder: Path, timeout_s: float) -> Written:
        """Wait until what was begun is on the disk; repeated it answers the same.

        Raises:
            ContractError: nothing was begun for ``folder``. DeadlineError: it takes longer. StoreError: it could not be
                written, or reads back differently.
        """
        if self._future is None or folder != self._folder:
            raise ContractError(f"no snapshot was begun in {str(folder)!r}; begin it first")
        try:
            return self._future.result(timeout_s)
        except FutureTimeoutError:
            if self._future.done():
                raise
            raise DeadlineError(
                f"writing the snapshot in {str(folder)!r} takes longer than {timeout_s:.0f} s; raise "
                "durability.snapshot_timeout_s, or see what holds up the disk"
            ) from None

    def close(self) -> None:
        """End the thread once it has written what was begun."""
        self._thread.shutdown(wait=True)

    def _write(self, snapshot: Snapshot, folder: Path, record: Callable[[WrittenFile], Any], started: float) -> Written:
        try:
            files = [record(file) for file in checkpoint.write(snapshot, folder, self._ranks)]
            return Written(files, monotonic() - started)
        except VerlOmniError:
            raise
        except Exception as error:
            raise StoreError(
                f"the snapshot in {str(folder)!r} could not be written: {type(error).__name__}: {error}; start the run "
                "again, it goes on from the snapshot before and the stored batches"
            ) from error

    def _drop(self, future: "Future[Written]") -> None:
        if wait_for([future], self._timeout_s).not_done:
            raise DeadlineError(
                f"the snapshot in {str(self._folder)!r} is still being written after {self._timeout_s:.0f} s; start "
                "the run again, or see what holds up the disk"
            )
        error = future.exception()
        if error is not None:
            logger.warning("a snapshot that no owner asked for any more failed: %s", error)
        self._folder = self._future = None


def _as_it_is(file: WrittenFile) -> WrittenFile:
    return file
