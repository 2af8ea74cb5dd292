"""Take back what was committed and turned out wrong: the stage and all of its step that was computed from it.

The files stay in their attempt, beside a note that says why, until the stage is committed again and swept.
"""

import json
from datetime import UTC, datetime
from pathlib import Path

from verl_omni_core.errors import StoreError
from verl_omni_core.store import mirror
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.attempt import stage_folder
from verl_omni_core.store.durable_files import replace_whole, storage_errors, sync_all
from verl_omni_core.store.index_files import forget
from verl_omni_core.store.lease import check_epoch
from verl_omni_core.store.manifest import ArtifactRef
from verl_omni_core.store.places import COMMIT, REJECTED, remote_of


def reject(store: RunStore, ref: ArtifactRef, reason: str) -> list[ArtifactRef]:
    """Make a stage, and those of its step that descend from it, undone.

    What descends goes first: a crash in between leaves nothing that stands on a rejected result.

    Args:
        ref: the result that is wrong.
        reason: what was seen, for whoever reads the folder.
    Returns: what was taken back, in that order.
    Raises:
        FencedError: a newer owner exists.
        StoreError: something else is committed there now.
    """
    check_epoch(Path(store.root), store.epoch)
    current = store.find(ref.step, ref.stage)
    if current != ref:
        raise StoreError(
            f"stage {ref.stage!r} of step {ref.step} is committed as {current.attempt if current else 'nothing'}, "
            f"{ref.attempt} was to be rejected; read the step again"
        )
    forget(Path(store.root), ref.step)
    taken_back = [*reversed(_descendants(store, ref)), ref]
    for each in taken_back:
        _take_back(store, each, reason)
    return taken_back


def reject_step(store: RunStore, step: int, reason: str) -> list[ArtifactRef]:
    """Make every stage of a step undone, the newest first; one whose files are damaged as well. Twice is once.

    Args:
        reason: for whoever reads the folder.
    Returns: what was taken back, in that order.
    Raises:
        FencedError: a newer owner exists. StoreError: a marker is damaged.
    """
    check_epoch(Path(store.root), store.epoch)
    folder = stage_folder(Path(store.root), step, "")
    markers = sorted(folder.glob(f"*/{COMMIT}"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    found = [ref for marker in markers if (ref := store.find(step, marker.parent.name)) is not None]
    if found:
        forget(Path(store.root), step)
    for each in found:
        _take_back(store, each, reason)
    return found


def _take_back(store: RunStore, ref: ArtifactRef, reason: str) -> None:
    root = Path(store.root)
    stage = stage_folder(root, ref.step, ref.stage)
    note = {**ref.to_json(), "reason": reason, "rejected": datetime.now(UTC).isoformat(timespec="milliseconds")}
    attempt = stage / "attempts" / ref.attempt
    if remote_of(root) is not None:
        attempt.mkdir(parents=True, exist_ok=True)  # other machines tell by the note that their copy of COMMIT is stale
    if attempt.is_dir():  # a folder that lost files is taken back too
        replace_whole(attempt / REJECTED, json.dumps(note, indent=1).encode())
        mirror.push(root, attempt / REJECTED)
    mirror.delete(root, stage / COMMIT)
    (stage / COMMIT).unlink()
    with storage_errors(stage):
        sync_all([stage])


def _descendants(store: RunStore, ref: ArtifactRef) -> list[ArtifactRef]:
    """Return the committed stages of the step that were computed from ``ref``, each after its parents."""
    step = Path(store.root) / "steps" / f"{ref.step:06d}"
    others = [found for folder in sorted(step.iterdir()) if (found := store.find(ref.step, folder.name))]
    parents = {other: set(store.manifest(other).parents) for other in others}
    family = [ref]
    while True:
        more = [other for other in others if other not in family and parents[other] & set(family)]
        if not more:
            return family[1:]
        family.extend(more)
