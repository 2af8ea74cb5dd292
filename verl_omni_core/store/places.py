"""Where a store lies: a folder, or an object store with a folder of copies on this machine.

In an object store the objects decide and the folder is a cache, laid out as a run's folder always is. A small file
beside the runs says which objects it mirrors, so whoever knows a run's folder knows its objects.
"""

import json
from functools import lru_cache
from pathlib import Path

from verl_omni_core.errors import StoreError
from verl_omni_core.home import home
from verl_omni_core.identity import digest
from verl_omni_core.store.durable_files import replace_whole
from verl_omni_core.store.remote import Remote

ADDRESS = "remote.json"
"""Beside the runs of a cache: the address of their objects."""
RUN, SETTINGS, EPOCHS, COMMIT, REJECTED = "run.json", "settings", "epoch", "COMMIT", "rejected.json"
REWIND_MARKER = "rewind.json"
"""Names within a run's folder."""


def is_remote(store: str | Path) -> bool:
    """Say whether ``store`` is an address and not a folder."""
    return "://" in str(store)


def folder_of(store: str | Path) -> Path:
    """Return the folder in which this machine keeps the runs of a store; made if the store is an object store.

    Raises:
        ConfigError: the address is none of a store.
    """
    if not is_remote(store):
        return Path(store)
    remote = Remote.parse(str(store))
    folder = home().absolute() / "stores" / digest(remote.uri)[:16]
    if not (folder / ADDRESS).exists():
        folder.mkdir(parents=True, exist_ok=True)
        replace_whole(folder / ADDRESS, json.dumps({"store": remote.uri}).encode())
        _remote_in.cache_clear()
        remote_of.cache_clear()
    return folder


def store_of(folder: Path) -> str:
    """Return the store whose runs lie in ``folder``: the inverse of :func:`folder_of`."""
    remote = remote_store(folder)
    return str(folder) if remote is None else remote.uri


def remote_store(folder: str | Path) -> Remote | None:
    """Return the object store that ``folder`` mirrors, or none."""
    return _remote_in(str(folder))


@lru_cache(maxsize=1024)
def remote_of(root: str | Path) -> Remote | None:
    """Return the objects of the run in ``root``, or none if the folder is all there is."""
    root = Path(root)
    remote = _remote_in(str(root.parent))
    return None if remote is None else remote.within(root.name)


@lru_cache(maxsize=64)
def _remote_in(folder: str) -> Remote | None:
    path = Path(folder) / ADDRESS
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return Remote.parse(json.loads(data)["store"])
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{path} is damaged ({error}); delete {folder}, a cache of an object store: it is filled again"
        ) from error
