"""The folder of a run and its objects: what one has of the other. Without objects all of this does nothing.

Objects decide. The process that owns a run has copied every ``COMMIT`` when it took the run, and nobody else commits,
so it looks into its folder alone; every other process asks for the objects.
"""

import json
import logging
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from verl_omni_core.errors import StoreError
from verl_omni_core.store.durable_files import create_whole, replace_whole
from verl_omni_core.store.places import COMMIT, EPOCHS, REJECTED, REWIND_MARKER, RUN, SETTINGS, remote_of
from verl_omni_core.store.remote import Remote

logger = logging.getLogger(__name__)

_AT_ONCE = 16
_LARGEST = 2**25
"""Bytes of a file that only informs, beyond which it stays here: its upload would hold up the lease's renewal."""
_CLAIM, _LOCK = ".claim", ".lock"
_SMALL = ("", ".json")
"""Ends of the names of files that one request brings: markers and records."""
_DECIDES = {"steps", "ledger", "lease", EPOCHS, SETTINGS, RUN, REWIND_MARKER}
"""What stands in a run's folder and is not only to inform."""
_complete: dict[str, int] = {}
"""Folders of the runs that this process owns, whose markers are all here, with its epoch."""


def is_complete(root: Path) -> bool:
    """Say whether this process owns the run, and so has every ``COMMIT`` of it in the folder."""
    return str(root) in _complete


def name_in(root: Path, path: Path) -> str:
    """Return the name of the object that ``path`` is the copy of."""
    return path.relative_to(root).as_posix()


def push(root: Path, path: Path) -> None:
    """Write a file of the run's folder as an object."""
    remote = remote_of(root)
    if remote is not None:
        remote.upload(name_in(root, path), path)


def push_missing(root: Path, folder: Path, sizes: Mapping[str, int]) -> None:
    """Write as objects those files of ``folder`` that are none yet, or of another size: before a commit names them."""
    remote = remote_of(root)
    if remote is not None and sizes:
        there = remote.sizes(name_in(root, folder))
        _at_once(lambda name: push(root, folder / name), [name for name in sizes if there.get(name) != sizes[name]])


def create(root: Path, path: Path, data: bytes) -> bool:
    """Create the object of ``path`` exclusively, before the file: false if another one was first."""
    remote = remote_of(root)
    return remote is None or remote.create(name_in(root, path), data)


def pull(root: Path, path: Path) -> bool:
    """Copy the object of ``path`` into the folder, in place of what is there; false if there is none."""
    remote = remote_of(root)
    if remote is None:
        return False
    if path.suffix not in _SMALL:
        return remote.download(name_in(root, path), path)
    data = remote.read(name_in(root, path))
    if data is not None:
        keep(path, data)
    return data is not None


def pull_missing(root: Path, paths: Iterable[Path]) -> None:
    """Copy the objects of those paths that are not in the folder."""
    _at_once(lambda path: pull(root, path), [path for path in paths if not path.exists()])


def read(root: Path, path: Path) -> bytes:
    """Return what a file says that never changes once it is there, copied if the folder lacks it.

    Raises:
        FileNotFoundError: there is neither file nor object.
    """
    if not path.exists():
        pull(root, path)
    return path.read_bytes()


def read_marker(root: Path, path: Path) -> bytes:
    """Return what a ``COMMIT`` says, as the objects have it unless this process owns the run.

    Raises:
        FileNotFoundError: nothing is committed.
    """
    remote = remote_of(root)
    if remote is not None and not is_complete(root):
        data = remote.read(name_in(root, path))
        if data is None:
            raise FileNotFoundError(path)
        keep(path, data)
        return data
    return path.read_bytes()


def keep(path: Path, data: bytes) -> None:
    """Have a copy in the folder, in place of what is there."""
    if not path.exists() or path.read_bytes() != data:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_whole(path, data)


def names(root: Path, folder: Path, *, always: bool = False) -> set[str]:
    """Return the names in ``folder``, of files and of objects.

    Args:
        always: ask for the objects even if this process owns the run, whose markers it has.
    """
    here = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    remote = remote_of(root)
    if remote is None or (is_complete(root) and not always):
        return here
    return here | set(remote.names(name_in(root, folder)))


def present(root: Path, folder: Path, wanted: Iterable[str]) -> set[str]:
    """Return which of these names below ``folder`` have a file there, or an object."""
    wanted = set(wanted)
    here = {name for name in wanted if (folder / name).is_file()}
    remote = remote_of(root)
    if remote is None or here == wanted:
        return here
    return here | (wanted & set(remote.files(name_in(root, folder))))


def steps(root: Path) -> list[int]:
    """Return the steps that have a folder, in order; not all of them need a committed stage."""
    return sorted(int(name) for name in names(root, root / "steps") if name.isdigit())


def publish_run(folder: Path, remote: Remote) -> bool:
    """Write a run that was made aside as objects, what makes it a run last; false if its name is taken.

    A crash in between leaves objects that nobody takes for a run, and the name taken.
    """
    if remote.read(RUN) is not None or not remote.create(_CLAIM, uuid.uuid4().bytes):
        return False
    files = [path for path in folder.rglob("*") if path.is_file() and path != folder / RUN]
    _at_once(lambda path: remote.upload(name_in(folder, path), path), [p for p in files if p.name != _LOCK])
    return remote.create(RUN, (folder / RUN).read_bytes())


def pull_run(root: Path) -> None:
    """Copy what tells of a run, unless its owner is this process: settings, owners, and what only informs.

    Raises:
        StoreError: the folder is a copy of another run of that name.
    """
    remote = remote_of(root)
    if remote is None or is_complete(root):
        return
    data, here = remote.read(RUN), root / RUN
    known = here.read_bytes() if here.exists() else None
    if known is not None and known != data:
        what = "there is none any more" if data is None else "that is another run now"
        raise StoreError(
            f"{root} is a copy of run {root.name!r} in {remote.uri}, and {what}; delete the folder, it is only a cache"
        )
    if data is None:
        return
    keep(here, data)
    pull_missing(root, [root / SETTINGS / name for name in remote.names(SETTINGS)])
    pull_owners(root)
    informing = [name for name in remote.names() if name not in _DECIDES and name.endswith((".json", ".txt", ".html"))]
    _at_once(lambda name: remote.download(name, root / name), informing)


def pull_owners(root: Path) -> None:
    """Copy the records of who owned the run."""
    remote = remote_of(root)
    if remote is not None:
        pull_missing(root, [root / EPOCHS / name for name in remote.names(EPOCHS)])


def complete(root: Path, epoch: int) -> None:
    """Make the folder's markers those of the objects, as this process takes the run; see :func:`let_go`."""
    remote = remote_of(root)
    if remote is None:
        return
    objects = set(remote.files("steps"))
    for marker in root.glob(f"steps/*/*/{COMMIT}"):
        if name_in(root / "steps", marker) not in objects or _is_rejected(root, marker, objects):
            marker.unlink()
    wanted = [name for name in objects if name.count("/") == 2 and name.endswith(f"/{COMMIT}")]
    pull_missing(root, [root / "steps" / name for name in wanted])
    (root / REWIND_MARKER).unlink(missing_ok=True)
    pull(root, root / REWIND_MARKER)
    _complete[str(root)] = epoch


def let_go(root: Path, epoch: int) -> None:
    """Ask for the objects again: another process may own the run once this epoch of it has ended."""
    if _complete.get(str(root)) == epoch:
        del _complete[str(root)]


def pull_attempts(root: Path, folder: Path) -> None:
    """Copy what the attempts below ``folder`` say of themselves and of their finished shards, without the shards."""
    remote = remote_of(root)
    if remote is not None:
        told = [name for name in remote.files(name_in(root, folder)) if name.endswith(".json")]
        pull_missing(root, [folder / name for name in told])


def unfinished_steps(root: Path) -> list[int]:
    """Return the steps in which an owner may have broken off: where a run begins, and the last two."""
    if remote_of(root) is None:
        return []
    numbers = sorted(int(name) for name in names(root, root / "steps", always=True) if name.isdigit())
    return sorted({*numbers[:1], *numbers[-2:]})


def delete(root: Path, path: Path) -> None:
    """Delete the object of ``path``; the file stays."""
    remote = remote_of(root)
    if remote is not None:
        remote.delete(name_in(root, path))


def delete_below(root: Path, folder: Path) -> None:
    """Delete a folder's files, and its objects."""
    shutil.rmtree(folder, ignore_errors=True)
    remote = remote_of(root)
    if remote is not None:
        remote.delete_below(name_in(root, folder))


def create_copied(root: Path, path: Path, data: bytes) -> None:
    """Create the object exclusively and then the file.

    Raises:
        FileExistsError: one of them exists.
    """
    if not create(root, path, data):
        raise FileExistsError(path)
    create_whole(path, data)


class Informing:
    """What only informs, as pictures and curves: pushed where it changed, and never a reason to stop."""

    def __init__(self, root: Path, remote: Remote) -> None:
        self._root, self._remote = root, remote.impatient()
        self._pushed: dict[Path, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def push(self, within_s: float) -> None:
        """Write what changed since the last time as objects; what takes longer waits for the next time."""
        end = time.monotonic() + within_s
        with self._lock:
            for path in self._files():
                if time.monotonic() > end:
                    return
                try:
                    state = path.stat()
                    seen = (state.st_mtime_ns, state.st_size)
                    if state.st_size <= _LARGEST and self._pushed.get(path) != seen:
                        self._remote.upload(name_in(self._root, path), path)
                        self._pushed[path] = seen
                except OSError as error:  # a StoreError too; or the file is gone
                    logger.warning("%s was not copied to %s: %s", path, self._remote.uri, error)
                    return

    def _files(self) -> list[Path]:
        folders = [path for path in self._root.iterdir() if path.name not in _DECIDES and not path.name.startswith(".")]
        files = [file for folder in folders for file in (folder.rglob("*") if folder.is_dir() else (folder,))]
        return sorted(file for file in files if file.is_file() and not file.name.startswith("."))


def _is_rejected(root: Path, marker: Path, objects: set[str]) -> bool:
    try:
        attempt = json.loads(marker.read_bytes())["attempt"]
    except (ValueError, KeyError, TypeError):
        return True  # a damaged copy is copied anew
    return f"{name_in(root / 'steps', marker.parent)}/attempts/{attempt}/{REJECTED}" in objects


def _at_once(act: Callable[..., object], items: list) -> None:
    if items:
        with ThreadPoolExecutor(min(_AT_ONCE, len(items))) as pool:
            list(pool.map(act, items))
