"""Files that appear whole or not at all, and are on the disk once a call returns."""

import errno
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import pyarrow as pa

from verl_omni_core.errors import StoreError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)
_UNLINKABLE = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP)
"""What a file system answers that has no hard links, has no more of them, or is another one."""


def create_whole(path: Path, data: bytes) -> None:
    """Create ``path`` with ``data``, durably, only if it does not exist.

    A reader sees either no file or all of it, also after a crash; of several creators exactly one succeeds.

    Raises:
        FileExistsError: the path exists; nothing was changed.
        StoreError: the disk is full or refuses the write.
    """
    with staged(path, data) as temporary:
        sync_all([temporary])
        publish(temporary, path)


@contextmanager
def staged(path: Path, data: bytes) -> Iterator[Path]:
    """Write ``data`` next to ``path``, not synced, for :func:`publish`; the staged file is gone afterwards."""
    temporary = _temporary(path)
    with storage_errors(path):
        try:
            temporary.write_bytes(data)
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)


def publish(temporary: Path, path: Path, *, sync: bool = True) -> None:
    """Make a staged file appear as ``path``; raises FileExistsError if somebody else was first."""
    # a link, because a rename would replace the winner's file and an exclusive open would show half a file
    os.link(temporary, path)
    if sync:
        sync_all([path.parent])


def sync_all(paths: Sequence[Path]) -> None:
    """Wait until the disk has the content of all these files and the names in all these folders.

    At once rather than in turn: each wait is a flush of the disk's cache, and flushes that meet are one.
    """
    if len(paths) == 1:
        _sync(paths[0])
        return
    with ThreadPoolExecutor(len(paths)) as pool:
        list(pool.map(_sync, paths))


def replace_whole(path: Path, data: bytes) -> None:
    """Create or replace ``path``; a reader sees the old content or the new, never a mixture. Not synced."""
    with staged(path, data) as temporary:
        temporary.replace(path)


def write_synced(path: Path, data: bytes) -> None:
    """Write ``data`` into a new file and wait until the disk has it."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def link_or_copy(source: Path, target: Path) -> None:
    """Make ``target`` the same file as ``source``, or on another file system a copy of it. Not synced."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _UNLINKABLE:
            raise
        shutil.copyfile(source, target)


def write_arrow(path: Path, table: pa.Table) -> str:
    """Write, sync and hash; the disk and the processor work at the same time."""
    # a column of a shard may hold more than 2^31 values: a few clips do
    options = pa.ipc.IpcWriteOptions(allow_64bit=True)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    with path.open("rb") as file, ThreadPoolExecutor(1) as pool:
        synced = pool.submit(os.fsync, file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        synced.result()
    return digest


def free_bytes(path: Path) -> int:
    """Return the bytes that this user can still write where ``path`` lies, or will lie."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def check_free(path: Path, needed_bytes: int) -> None:
    """Check that ``needed_bytes`` are free.

    Raises:
        StoreError: they are not; says how much is.
    """
    free = free_bytes(path)
    if free < needed_bytes:
        raise StoreError(
            f"{path}: {free / 1e9:.2f} GB are free, {needed_bytes / 1e9:.2f} GB are needed; free some space, "
            "or lower durability.min_free_gb, which a resumed run may"
        )


def why_unwritable(folder: Path) -> str | None:
    """Return why this user can make no file in ``folder``; none if he can. Tries nothing, so it leaves no trace."""
    if os.access(folder, os.W_OK | os.X_OK):
        return None
    is_read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
    return "the file system is mounted read-only" if is_read_only else "permission denied"


def safe_name(name: str) -> str:
    """Return ``name`` if it is a relative path that stays inside its folder.

    Raises:
        StoreError: it is absolute, empty, or leaves the folder.
    """
    parts = PurePosixPath(name).parts
    if not name or name.startswith("/") or "\\" in name or "\0" in name or not parts or ".." in parts:
        raise StoreError(f"file name {name!r} would leave its folder; expected a relative name without '..'")
    return name


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn a full or forbidding disk into a StoreError that says what to do; other errors pass."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StoreError(
                f"cannot write {path}: the disk is full ({free_bytes(path) / 1e9:.2f} GB free); free some "
                "space and start again, finished stages are kept"
            ) from error
        if error.errno in _REFUSED:
            raise StoreError(
                f"cannot write {path}: {error.strerror}; choose a run.store that this user may write"
            ) from error
        raise


def _temporary(path: Path) -> Path:
    return path.with_name(f".tmp-{os.getpid()}-{uuid.uuid4().hex[:8]}-{path.name}"[:200])


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
