"""Go back to an earlier step: what was committed after it is set aside, and the ledger says so.

A file in the run's folder says what is under way: where a crash breaks it off, the next start goes on with it first.
"""

import json
import logging
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_omni_core.errors import ConfigError, StoreError
from verl_omni_core.stages.checkpoint import STAGE as CHECKPOINT
from verl_omni_core.stages.session import Session
from verl_omni_core.stages.update import STAGE as UPDATE
from verl_omni_core.store import mirror, runs
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.attempt import attempt_folder
from verl_omni_core.store.collected import is_collected
from verl_omni_core.store.durable_files import safe_name, sync_all
from verl_omni_core.store.ledger import REWIND, Ledger, standing
from verl_omni_core.store.lineage import base_step
from verl_omni_core.store.manifest import ArtifactRef
from verl_omni_core.store.places import REWIND_MARKER
from verl_omni_core.store.rejection import reject_step
from verl_omni_core.training.checkpoint_files import INDEX_FILE

logger = logging.getLogger(__name__)


def go_back(session: Session, step: int, request: str | None) -> bool:
    """Bring the trainer to the newest whole checkpoint up to ``step``, and set aside what came after ``step``.

    The updates between the two are replayed from their stored batches as the run goes on.

    Args:
        request: who asks; one request goes back once. None: anew each time.
    Returns: whether it did; no if this request has gone back before.
    Raises:
        ConfigError: the run is not that far, or the batches that would have to be replayed are gone; nothing on disk
            was changed.
    """
    store = session.store
    if _has_gone_back(session.ledger, request):
        return False
    refuse_step(session.root, step, request)
    found = newest_checkpoint(store, step)
    _refuse_gone(store, 0 if found is None else found.step, step)
    if found is None:
        session.actors.trainer.reset()
    else:
        session.actors.trainer.load_checkpoint(str(store.path_of(found, INDEX_FILE).parent))
    set_aside(session, step, f"the run went back to step {step}", request)
    return True


def set_aside(session: Session, step: int, reason: str, request: str | None = None) -> None:
    """Make everything that was committed after ``step`` undone, and note it in the ledger.

    Args:
        reason: for whoever reads the folders.
        request: see :func:`go_back`.
    """
    records = standing(session.ledger.records())
    last = max([runs.steps_done(session.root), *(int(record["step"]) for record in records)], default=0)
    plan = {"id": uuid.uuid4().hex, "to_version": step, "last": max(last, step), "reason": reason, "request": request}
    mirror.create_copied(session.root, session.root / REWIND_MARKER, json.dumps(plan).encode())
    finish_rewind(session.store, session.ledger)
    session.tracker.gone_back(step)
    session.folder().write_progress(status="running", step=step)


def finish_rewind(store: RunStore, ledger: Ledger) -> None:
    """Do what is left of a rewind that was begun; nothing if none was."""
    root = Path(store.root)
    marker = root / REWIND_MARKER
    if not marker.exists():
        return
    plan = json.loads(marker.read_bytes())
    to_version = int(plan["to_version"])
    for step in reversed(store.steps()):
        if step > to_version:
            reject_step(store, step, plan["reason"])
    if all(record.get("rewind") != plan["id"] for record in ledger.records()):
        ledger.append(_record(plan, store.epoch))
    logger.warning("%s: %s; what it had committed after that is set aside", root.name, plan["reason"])
    mirror.delete(root, marker)
    marker.unlink()
    sync_all([marker.parent])


def refuse_step(root: Path, step: int, request: str | None = None) -> None:
    """Refuse to go back to ``step`` where that cannot work, as far as names and sizes of files tell. Changes nothing.

    Args:
        request: see :func:`go_back`; one that has gone back before is not refused.
    Raises:
        ConfigError: see :func:`go_back`.
    """
    if _has_gone_back(Ledger(root), request):
        return
    done, base = runs.steps_done(root), base_step(root)
    if step < base:
        raise ConfigError(
            f"run.resume is {step}, but run {root.name!r} is a fork that begins after step {base}; give that or a "
            "later step, or fork its parent from an earlier one"
        )
    if step > done:
        raise ConfigError(
            f"run.resume is {step}, but run {root.name!r} has done {done} steps; give a step up to that, or auto to go "
            "on after it"
        )
    store = RunStore(root)
    _refuse_gone(store, max((each for each in _with_checkpoint(store) if each <= step), default=0), step)


def newest_checkpoint(store: RunStore, step: int) -> ArtifactRef | None:
    """Return the newest checkpoint up to ``step`` whose files are whole, or none."""
    for each in reversed([known for known in store.steps() if known <= step]):
        try:
            ref = store.find(each, CHECKPOINT)
            if ref is not None and not is_collected(Path(store.root), ref):
                store.verify(ref)
                return ref
        except StoreError as error:
            logger.warning("the checkpoint of step %d is damaged, and the one before it is taken: %s", each, error)
    return None


def _has_gone_back(ledger: Ledger, request: str | None) -> bool:
    return request is not None and any(record.get("request") == request for record in ledger.records())


def _refuse_gone(store: RunStore, start: int, step: int) -> None:
    """Raise ConfigError if batches of the steps after ``start``, up to ``step``, are gone."""
    gone = [each for each in range(start + 1, step + 1) if not _can_replay(store, each)]
    if gone:
        known = ", ".join(map(str, _with_checkpoint(store)[-20:])) or "none has"
        raise ConfigError(
            f"run {Path(store.root).name!r} cannot go back to step {step}: its newest whole checkpoint up to there is "
            f"of step {start}, and the batches of steps {gone[0]} to {gone[-1]}, which would have to be replayed, are "
            f"not all there any more; go back to a step that has a checkpoint: {known}"
        )


def _can_replay(store: RunStore, step: int) -> bool:
    """Say whether the batches that a step's update was made from are there, as large as they were."""
    try:
        update = store.find(step, UPDATE)
        return update is not None and all(_is_there(store, parent) for parent in store.manifest(update).parents)
    except StoreError:
        return False


def _is_there(store: RunStore, ref: ArtifactRef) -> bool:
    """Say so of the files that an update reads: it looks at no pictures, which retention may have let go."""
    folder = attempt_folder(Path(store.root), ref)
    files = {folder / safe_name(f.name): f.size_bytes for f in store.manifest(ref).files if f.table != "media"}
    mirror.pull_missing(Path(store.root), files)
    return all(path.is_file() and path.stat().st_size == size for path, size in files.items())


def _with_checkpoint(store: RunStore) -> list[int]:
    """Return the steps whose checkpoint has all its files, in order."""
    found = []
    for step in store.steps():
        try:
            ref = store.find(step, CHECKPOINT)
            if ref is not None and _is_there(store, ref):
                found.append(step)
        except StoreError:
            continue  # a damaged one is no place to go back to
    return found


def _record(plan: Mapping[str, Any], epoch: int) -> dict[str, Any]:
    return {
        "update_id": f"{plan['to_version']:06d}/rewind-{epoch}",
        "step": plan["last"],
        "kind": REWIND,
        "to_version": plan["to_version"],
        "version_before": plan["last"],
        "version_after": plan["to_version"],
        "batch_digest": "",
        "weights_digest": None,
        "skipped": False,
        "metrics_json": "{}",
        "reason": plan["reason"],
        "request": plan["request"],
        "rewind": plan["id"],
    }
