"""One owner of a run at a time, and a number that only grows: the fence epoch.

Locally a lock on the run's folder says who is alive; the epoch, taken by exclusive creation of ``epoch/<n>.json``, goes
into every attempt's name, manifest and ledger record, and whoever carries an older one is refused.
"""

import fcntl
import json
import os
import socket
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from verl_omni_core.errors import FencedError, StoreError
from verl_omni_core.store.durable_files import create_whole, storage_errors, sync_all

_LOCK_RETRY_S = 1.0
_held: "weakref.WeakSet[Ownership]" = weakref.WeakSet()


@dataclass(eq=False)
class Ownership:
    """The right to command a run's actors and to commit; ends with the process, or with :meth:`release`."""

    root: Path
    epoch: int
    owner: str
    _descriptor: int | None = field(repr=False, default=None)

    def check(self) -> None:
        """Raise FencedError if the run has been taken over since."""
        check_epoch(self.root, self.epoch)

    def release(self) -> None:
        """Let others take the run. Doing it twice is harmless."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> "Ownership":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def take_ownership(root: str | Path, owner: str, facts: Mapping[str, Any] | None = None) -> Ownership:
    """Become the owner of the run in ``root`` and start its next epoch.

    Args:
        root: the run's folder.
        owner: who this is, for the message that others get.
        facts: further JSON-like entries of what is recorded about this owner.
    Raises:
        FencedError: a live process owns the run; says which.
        StoreError: the folder does not exist or cannot be written.
    """
    root = Path(root)
    if not root.is_dir():
        raise StoreError(f"{root} is not a folder; create the run before taking it")
    (root / "epoch").mkdir(exist_ok=True)
    with storage_errors(root / ".lock"):
        descriptor = os.open(root / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if not _lock(descriptor):
            raise FencedError(
                f"run {root.name} is owned by {describe_holder(root)}; wait for it, stop it, or start a run "
                "under another id"
            )
        epoch = newest_epoch(root) + 1
        entry = {
            **(facts or {}),
            "epoch": epoch,
            "owner": owner,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        try:
            create_whole(root / "epoch" / f"{epoch}.json", json.dumps(entry).encode())
        except FileExistsError:
            raise FencedError(
                f"run {root.name} was taken by {describe_holder(root)} at this moment, on a file system "
                "whose locks do not reach here; stop one of the two"
            ) from None
        sync_all([root])
    except BaseException:
        os.close(descriptor)
        raise
    ownership = Ownership(root, epoch, owner, descriptor)
    _held.add(ownership)
    return ownership


def newest_epoch(root: Path) -> int:
    """Return the newest epoch of the run in ``root``; 0 if nobody ever owned it."""
    folder = root / "epoch"
    if not folder.is_dir():
        return 0
    names = [path.stem for path in folder.iterdir() if path.suffix == ".json"]
    return max((int(name) for name in names if name.isdigit()), default=0)


def check_epoch(root: Path, epoch: int) -> None:
    """Check that no newer owner than ``epoch`` exists.

    Raises:
        FencedError: one does; says who.
    """
    newest = newest_epoch(root)
    if epoch < newest:
        raise FencedError(
            f"epoch {epoch} of run {root.name} has ended: epoch {newest} belongs to {describe_holder(root)}; "
            "this process must stop"
        )


def holder(root: Path) -> dict[str, Any] | None:
    """Return the newest owner's ``epoch``, ``owner``, ``pid``, ``host`` and ``since``; none if there never was one."""
    newest = newest_epoch(root)
    return _entry(root / "epoch" / f"{newest}.json") if newest else None


def owners(root: Path) -> list[dict[str, Any]]:
    """Return what :func:`holder` does of every owner that the run in ``root`` had, in order."""
    paths = sorted((root / "epoch").glob("[0-9]*.json"), key=lambda path: int(path.stem))
    return [_entry(path) for path in paths]


def _entry(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise StoreError(f"{path} is damaged ({error}); restore it from a copy") from error
    if not isinstance(value, dict) or not {"epoch", "owner", "pid", "host", "since"} <= value.keys():
        raise StoreError(f"{path} is damaged: it does not say who owned the run; restore it from a copy")
    return value


def describe_holder(root: Path) -> str:
    """Return who owns or last owned the run, for a message."""
    entry = holder(root)
    if entry is None:
        return "a process that is just starting"
    return f"{entry['owner']} (process {entry['pid']} on {entry['host']}, since {entry['since']})"


def is_owned(root: Path) -> bool:
    """Say whether a live process owns the run. Leaves no trace."""
    try:
        descriptor = os.open(root / ".lock", os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Try for a moment: :func:`is_owned` in another process holds the lock for microseconds."""
    deadline = time.monotonic() + _LOCK_RETRY_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)


def _forget_in_child() -> None:
    # a forked child shares the open lock: kept open, it would own the run after its parent's death
    for ownership in list(_held):
        ownership.release()


os.register_at_fork(after_in_child=_forget_in_child)
