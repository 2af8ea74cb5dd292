"""A run that breaks off at the same place again and again is not started once more.

Each start records how far the run was, and each end but a killed one how it came. Both only inform: what is done is
decided by commits.
"""

import json
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from verl_omni_core.errors import NoProgressError
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages.session import Session
from verl_omni_core.store import runs
from verl_omni_core.store.attempt import SHARDS
from verl_omni_core.store.durable_files import replace_whole
from verl_omni_core.store.lease import owners
from verl_omni_core.store.places import COMMIT, REJECTED

ENDINGS = "endings"
"""Folder of how each start ended, one file each, named by its fence epoch; a killed one leaves none."""
STARTED_AT = "started_at"
"""In the record of an owner: what :func:`mark` returned then."""
OPENING = "open"
FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"


def mark(root: Path) -> dict[str, Any]:
    """Return how far a run is: equal marks mean that nothing was committed and no shard finished in between.

    Returns: ``step``, the last one that is trained; ``stages``, what is committed of it and of the one under way; and
        ``shards``, the finished shards of their stages that are not committed.
    """
    done = runs.steps_done(root)
    stages, shards = [], []
    for step in (done, done + 1):
        folder = root / "steps" / f"{step:06d}"
        for stage in sorted(folder.iterdir()) if folder.is_dir() else ():
            name = f"{step}/{stage.name}"
            if (stage / COMMIT).exists():
                stages.append(name)
            else:
                shards += sorted({f"{name}/{number}" for number in _finished_shards(stage)})
    return {"step": done, "stages": stages, "shards": shards}


def record_ending(
    root: Path, epoch: int, status: str, *, error: BaseException | None = None, session: Session | None = None
) -> None:
    """Keep how a start ended.

    Args:
        epoch: its fence epoch.
        status: ``finished``, ``stopped`` by its user, or ``failed``.
        error: what broke it off.
        session: of the process, which knows the stage that was under way; none while the run is opened.
    """
    step, stage = _under_way(session)
    entry: dict[str, Any] = {"epoch": epoch, "status": status, "step": step, "stage": stage}
    if error is not None:
        entry["error"] = "".join(traceback.format_exception_only(error)).strip()
    entry["ended"] = datetime.now(UTC).isoformat(timespec="seconds")
    (root / ENDINGS).mkdir(exist_ok=True)
    replace_whole(root / ENDINGS / f"{epoch:06d}.json", json.dumps(entry, indent=1).encode())


def refuse_without_progress(folder: runs.RunFolder, config: RunConfig) -> None:
    """Refuse to start a run whose last starts all broke off where it stands now. Changes nothing.

    A start counts if it ended by an error or was killed; one that its user stopped does not, and any new commit or
    shard begins the count anew.

    Raises:
        NoProgressError: ``durability.no_progress_budget`` starts did; says where, with the last error that is known.
    """
    now = mark(folder.root)
    broken: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = []
    for owner in reversed(owners(folder.root)):
        ending = _ending(folder.root, owner["epoch"])
        if owner.get(STARTED_AT) != now or ending.get("status") in (FINISHED, STOPPED):
            break
        broken.append((owner, ending))
    budget = config.durability.no_progress_budget
    if len(broken) < budget:
        return
    told = next((ending for _, ending in broken if ending), None)
    store = config.run.store
    raise NoProgressError(
        f"run {folder.run_id!r} was started {len(broken)} times in a row without a new committed stage or finished "
        f"shard, durability.no_progress_budget allows {budget}. It breaks off {_where(now, told)}. {_why(broken, told)}"
        f" Remove the cause, then go on: verl-omni train --run-id {folder.run_id} --set run.store={store} "
        f"--set durability.no_progress_budget={len(broken) + budget}"
    )


def _finished_shards(stage: Path) -> list[str]:
    attempts = [path for path in (stage / "attempts").glob("[0-9]*-*") if not (path / REJECTED).exists()]
    return [record.stem for attempt in attempts for record in (attempt / SHARDS).glob("*.json")]


def _under_way(session: Session | None) -> tuple[int | None, str | None]:
    """Return step and stage that began last and did not end."""
    if session is None:
        return None, OPENING
    begun = [
        (began, step, stage)
        for step, stages in session.begins.items()
        for stage, began in stages.items()
        if stage not in session.spans.get(step, {})
    ]
    return max(begun)[1:] if begun else (None, None)


def _ending(root: Path, epoch: int) -> dict[str, Any]:
    try:
        value = json.loads((root / ENDINGS / f"{epoch:06d}.json").read_bytes())
    except (FileNotFoundError, ValueError):
        return {}  # it was killed, or the power went while it said why
    return value if isinstance(value, dict) else {}


def _where(now: Mapping[str, Any], told: Mapping[str, Any] | None) -> str:
    if told is not None and told.get("stage") == OPENING:
        return "while it is opened"
    if told is not None and told.get("stage") is not None:
        return f"in {told['stage']} of step {told['step']}"
    if told is not None:
        return f"between stages, after step {now['step']}"
    committed = [name.partition("/")[2] for name in now["stages"] if name.startswith(f"{now['step'] + 1}/")]
    return f"in step {now['step'] + 1}, after {', '.join(committed)}" if committed else f"after step {now['step']}"


def _why(broken: list[tuple[Mapping[str, Any], Mapping[str, Any]]], told: Mapping[str, Any] | None) -> str:
    killed = sum(not ending for _, ending in broken)
    owner = broken[0][0]
    how = f"{killed} of these starts were killed or lost their machine (the last on {owner['host']})." if killed else ""
    if told is None:
        return "Each time it was killed or lost its machine, so no error is known."
    return f"The last error: {told.get('error', 'none was recorded')}. {how}".strip()
