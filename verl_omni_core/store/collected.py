"""Delete files of committed artifacts that nobody needs any more. Manifest and commit stay: what was done stays done.

Before a file goes, a note in the attempt's folder, created exclusively and whole, says which files go and why: from
then on readers are told so, and whoever comes after a crash in between deletes the rest.
"""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from verl_omni_core.errors import StoreError
from verl_omni_core.store import mirror
from verl_omni_core.store.attempt import attempt_folder
from verl_omni_core.store.durable_files import safe_name, sync_all
from verl_omni_core.store.manifest import ArtifactRef, FileRecord

COLLECTED = "collected.json"
"""In an attempt of which files were deleted; later rounds add ``collected.2.json`` and so on."""


def collected_files(attempt: Path) -> dict[str, Mapping[str, Any]]:
    """Return the files of an attempt that were deleted or are about to be, each with the note that says why.

    Raises:
        StoreError: a note is damaged.
    """
    gone: dict[str, Mapping[str, Any]] = {}
    for path in _notes(attempt):
        try:
            note = json.loads(path.read_bytes())
            gone |= dict.fromkeys(note["files"], note)
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(
                f"{path} is damaged ({type(error).__name__}: {error}); restore it from a copy of the run"
            ) from error
    return gone


def refuse_collected(attempt: Path, files: Iterable[FileRecord]) -> None:
    """Refuse to read files that retention deleted.

    Raises:
        StoreError: one of them is; names the setting.
    """
    gone = collected_files(attempt)
    for file in files:
        note = gone.get(file.name)
        if note is not None:
            raise StoreError(
                f"{attempt / file.name} was deleted by retention on {note['collected']} ({note['setting']} = "
                f"{note['value']}); restore it from a copy, and keep more next time with a larger {note['setting']}"
            )


def is_collected(root: Path, ref: ArtifactRef) -> bool:
    """Say whether retention deleted files of a committed artifact."""
    return bool(collected_files(attempt_folder(root, ref)))


def present_files(attempt: Path, files: Iterable[FileRecord]) -> list[FileRecord]:
    """Return those of an attempt's files that are on the disk, or among the run's objects."""
    files = list(files)
    there = mirror.present(_run_of(attempt), attempt, [safe_name(file.name) for file in files])
    return [file for file in files if file.name in there]


def collect(attempt: Path, files: Sequence[FileRecord], *, setting: str, value: Any, epoch: int) -> int:
    """Delete files of a committed attempt, crash-safely; doing it twice is harmless.

    Args:
        attempt: the attempt's folder.
        files: those to delete.
        setting: dotted name of the setting that wants it. value: its value.
        epoch: fence epoch of the owner, checked by the caller.
    Returns: bytes of the files that were there.
    Raises:
        StoreError: a note is damaged, or the disk is full.
    """
    present = present_files(attempt, files)
    gone = collected_files(attempt)
    fresh = [file.name for file in present if file.name not in gone]
    if fresh:
        note = {
            "files": fresh,
            "setting": setting,
            "value": value,
            "fence_epoch": epoch,
            "collected": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        root, path = _run_of(attempt), _next_note(attempt)
        try:
            mirror.create_copied(root, path, json.dumps(note, indent=1).encode())
        except FileExistsError:
            if not mirror.pull(root, path):
                raise
            # an earlier owner noted it on another machine; this one still has copies of what went
            return collect(attempt, files, setting=setting, value=value, epoch=epoch)
    for file in present:
        mirror.delete(_run_of(attempt), attempt / safe_name(file.name))
        (attempt / safe_name(file.name)).unlink(missing_ok=True)
    if present:
        sync_all([attempt])
    return sum(file.size_bytes for file in present)


def _run_of(attempt: Path) -> Path:
    return attempt.parents[4]


def _notes(attempt: Path) -> list[Path]:
    """Return the notes of an attempt, those of other machines copied first."""
    root = _run_of(attempt)
    # an owner asks for what an earlier owner noted on another machine only where the files are not here
    is_here = attempt.is_dir() and any(path.suffix != ".json" for path in attempt.iterdir())
    known = mirror.names(root, attempt, always=not is_here)
    mirror.pull_missing(root, [attempt / name for name in known if name.startswith(Path(COLLECTED).stem + ".")])
    return list(itertools.takewhile(Path.exists, _note_paths(attempt)))


def _next_note(attempt: Path) -> Path:
    return next(path for path in _note_paths(attempt) if not path.exists())


def _note_paths(attempt: Path) -> Iterable[Path]:
    yield attempt / COLLECTED
    yield from (attempt / f"{Path(COLLECTED).stem}.{number}.json" for number in itertools.count(2))
