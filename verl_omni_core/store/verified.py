"""Snapshots that were read back after their commit: only they allow deleting what the steps before them left."""

import json
import os
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from verl_omni_core.errors import StoreError
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.attempt import attempt_folder
from verl_omni_core.store.collected import collected_files
from verl_omni_core.store.durable_files import replace_whole, safe_name, sync_all
from verl_omni_core.store.manifest import ArtifactRef

VERIFIED = "verified.json"
"""In the attempt of a committed artifact whose files were read back and found as its manifest says."""


def is_verified(store: RunStore, ref: ArtifactRef) -> bool:
    """Say whether a committed artifact was verified before, and all its files are still there, whole by size."""
    folder = attempt_folder(Path(store.root), ref)
    if _note(folder).get("manifest_sha256") != ref.manifest_sha256 or collected_files(folder):
        return False
    sizes = {file.name: file.size_bytes for file in store.manifest(ref).files}
    paths = {name: folder / safe_name(name) for name in sizes}
    return all(paths[name].is_file() and paths[name].stat().st_size == size for name, size in sizes.items())


def verify_by_reading(store: RunStore, ref: ArtifactRef, *, record: bool = True) -> None:
    """Read a committed artifact's files back from the disk and compare their digests.

    Args:
        record: whether to write down that they agree.
    Raises:
        StoreError: a file is missing, cut or changed, or was deleted by retention.
    """
    folder = attempt_folder(Path(store.root), ref)
    manifest = store.manifest(ref)
    for file in manifest.files:
        _drop_from_cache(folder / safe_name(file.name))
    gone = sorted(collected_files(folder))
    if gone:
        raise StoreError(f"stage {ref.stage!r} of step {ref.step} lost {', '.join(gone)} to retention")
    store.verify(ref)
    if record and _note(folder).get("manifest_sha256") != ref.manifest_sha256:
        note: dict[str, Any] = {
            "manifest_sha256": ref.manifest_sha256,
            "bytes": sum(file.size_bytes for file in manifest.files),
            "verified": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        replace_whole(folder / VERIFIED, json.dumps(note, indent=1).encode())
        sync_all([folder / VERIFIED, folder])


@lru_cache(maxsize=256)
def reads_back(store: RunStore, ref: ArtifactRef, record: bool) -> str:
    """Return why a snapshot does not read back, or nothing if it does; a process asks the disk once."""
    try:
        verify_by_reading(store, ref, record=record)
    except StoreError as error:
        return str(error)
    return ""


def _note(folder: Path) -> dict[str, Any]:
    try:
        value = json.loads((folder / VERIFIED).read_bytes())
    except (FileNotFoundError, ValueError):
        return {}  # a damaged note counts for nothing: the files are read again
    return value if isinstance(value, dict) else {}


def _drop_from_cache(path: Path) -> None:
    """Let the next read come from the disk: what is in memory says nothing about it."""
    if path.is_file():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
