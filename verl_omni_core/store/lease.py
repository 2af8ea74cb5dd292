"""One owner of a run at a time, and a number that only grows: the fence epoch.

Locally a lock on the run's folder says who is alive, between machines a lease (:mod:`.remote_lease`). The epoch, taken
by exclusive creation of ``epoch/<n>.json``, goes into every attempt's name, manifest and ledger record, and whoever
carries an older one is refused.
"""

import fcntl
import json
import os
import socket
import time
import uuid
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from verl_omni_core.errors import FencedError, StoreError
from verl_omni_core.store import mirror, remote_lease
from verl_omni_core.store.durable_files import storage_errors, sync_all
from verl_omni_core.store.places import EPOCHS, remote_of
from verl_omni_core.store.remote import Remote

_LOCK_RETRY_S = 1.0
_held: "weakref.WeakSet[Ownership]" = weakref.WeakSet()


@dataclass(eq=False)
class Ownership:
    """The right to command a run's actors and to commit; ends with the process, or with :meth:`release`."""

    root: Path
    epoch: int
    owner: str
    _descriptor: int | None = field(repr=False, default=None)
    _heartbeat: remote_lease.Heartbeat | None = field(repr=False, default=None)

    def check(self) -> None:
        """Raise FencedError if the run has been taken over since, or may have been."""
        check_epoch(self.root, self.epoch)

    def release(self) -> None:
        """Let others take the run. Doing it twice is harmless."""
        heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is not None:
            heartbeat.stop()
        self._close()

    def _close(self) -> None:
        mirror.let_go(self.root, self.epoch)
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
    with storage_errors(root / ".lock"):
        (root / EPOCHS).mkdir(exist_ok=True)
        descriptor = os.open(root / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    ownership = Ownership(root, 0, owner, descriptor)
    try:
        remote = remote_of(root)
        if not _lock(descriptor) or (
            remote is not None and remote_lease.live_owner(remote, _machine(root, descriptor))
        ):
            raise FencedError(
                f"run {root.name} is owned by {describe_holder(root)}; wait for it, stop it, or start a run "
                "under another id"
            )
        ownership.epoch = newest_epoch(root) + 1
        entry = {
            **(facts or {}),
            "epoch": ownership.epoch,
            "owner": owner,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        if remote is not None:
            entry |= {"machine": _machine(root, descriptor), "lease_s": remote_lease.LEASE_S}
        began = remote_lease.now()
        path = root / EPOCHS / f"{ownership.epoch}.json"
        try:
            mirror.create_copied(root, path, json.dumps(entry).encode())
        except FileExistsError:
            raise FencedError(
                f"run {root.name} was taken by {describe_holder(root)} at this moment, on a file system "
                "whose locks do not reach here; stop one of the two"
            ) from None
        sync_all([root])
        if remote is not None:
            _check_exclusive(remote, mirror.name_in(root, path))
            ownership._heartbeat = remote_lease.Heartbeat(root, remote, entry, began)
            mirror.complete(root, ownership.epoch)
    except BaseException:
        ownership.release()
        raise
    _held.add(ownership)
    return ownership


def newest_epoch(root: Path) -> int:
    """Return the newest epoch of the run in ``root``; 0 if nobody ever owned it."""
    mirror.pull_owners(root)
    return _newest_here(root)


def _newest_here(root: Path) -> int:
    folder = root / EPOCHS
    if not folder.is_dir():
        return 0
    names = [path.stem for path in folder.iterdir() if path.suffix == ".json"]
    return max((int(name) for name in names if name.isdigit()), default=0)


def check_epoch(root: Path, epoch: int) -> None:
    """Check that no newer owner than ``epoch`` exists, and that the lease has not run out if this process is the owner.

    Raises:
        FencedError: one does, which it names; or may exist.
    """
    remote = remote_of(root)
    if remote is not None and remote.read(f"{EPOCHS}/{epoch + 1}.json") is not None:
        mirror.pull_owners(root)
    newest = _newest_here(root)
    if epoch < newest:
        mirror.let_go(root, epoch)
        raise FencedError(
            f"epoch {epoch} of run {root.name} has ended: epoch {newest} belongs to {describe_holder(root)}; "
            "this process must stop"
        )
    for ownership in list(_held) if remote is not None else ():
        if ownership._heartbeat is not None and (ownership.root, ownership.epoch) == (root, epoch):
            ownership._heartbeat.check()


def holder(root: Path) -> dict[str, Any] | None:
    """Return the newest owner's ``epoch``, ``owner``, ``pid``, ``host`` and ``since``; none if there never was one."""
    newest = newest_epoch(root)
    return _entry(root / EPOCHS / f"{newest}.json") if newest else None


def owners(root: Path) -> list[dict[str, Any]]:
    """Return what :func:`holder` does of every owner that the run in ``root`` had, in order."""
    mirror.pull_owners(root)
    paths = sorted((root / EPOCHS).glob("[0-9]*.json"), key=lambda path: int(path.stem))
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
    if _is_locked(root):
        return True
    remote = remote_of(root)
    return remote is not None and remote_lease.live_owner(remote, _machine(root)) is not None


def _is_locked(root: Path) -> bool:
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


def _machine(root: Path, descriptor: int | None = None) -> str | None:
    """Return the name of those who share this folder's lock, drawn by its first owner (``descriptor``)."""
    path = root / ".lock"
    name = path.read_text() if path.exists() else ""
    if descriptor is not None and not name:
        name = uuid.uuid4().hex
        os.pwrite(descriptor, name.encode(), 0)
        os.fsync(descriptor)
    return name or None


def _check_exclusive(remote: Remote, name: str) -> None:
    """Check that the store refuses to create again what exists: one that replaces it would tell two owners yes."""
    if remote.create(name, b"an object that must not be written"):
        raise StoreError(
            f"{remote.uri}: the server replaced an object that was only to be created (If-None-Match: *), so it cannot "
            "tell two owners apart; use a server that honours conditional writes, or a folder as run.store"
        )


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
        ownership._heartbeat = None  # the parent's
        ownership._close()


os.register_at_fork(after_in_child=_forget_in_child)
