"""Delete what a run's settings let go, and what tries left that nothing came of, without starting the run."""

import os
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from verl_omni_core.errors import ConfigError
from verl_omni_core.settings.loader import apply_overrides
from verl_omni_core.stages.opening import this_process
from verl_omni_core.stages.retention import Policy, Removal, remove, wanted
from verl_omni_core.stages.rewind import finish_rewind
from verl_omni_core.stages.trained import config_of
from verl_omni_core.store import index
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.lease import Ownership, is_owned, newest_epoch, take_ownership
from verl_omni_core.store.ledger import Ledger
from verl_omni_core.store.runs import RunFolder, open_run

_GROUP = "durability.retention."


@dataclass(frozen=True)
class Line:
    """What goes of one kind, for one reason."""

    what: str
    """Tables, or a stage whose files are no tables."""
    why: str
    first: int
    last: int
    """Steps, from the oldest to the newest that is concerned."""
    files: int
    bytes: int


@dataclass(frozen=True)
class Collection:
    """What went, or what would go."""

    lines: list[Line]
    done: int
    """Steps that are finished."""
    verified_step: int
    """Step of the newest snapshot that reads back; 0 if none does."""

    @property
    def bytes(self) -> int:
        return sum(line.bytes for line in self.lines)


def gc(run_id: str, store: str | Path, *, overrides: Sequence[str] = (), dry_run: bool = False) -> Collection:
    """Delete what retention lets go of a run, whatever of it went before, and stale attempts of all steps.

    Args:
        store: folder that holds the runs.
        overrides: changes to settings of retention for this time, each ``durability.retention.name=value``.
        dry_run: only look; also at a run that a live process owns.
    Raises:
        ConfigError: an override names another setting, or a value that cannot be. FencedError: a live process owns the
            run; says which. StoreError: there is no such run, or it is damaged.
    """
    foreign = [text for text in overrides if not text.strip().startswith(_GROUP)]
    if foreign:
        raise ConfigError(f"--set {foreign[0]!r}: gc takes settings of {_GROUP.rstrip('.')} only")
    folder = open_run(store, run_id)
    config = apply_overrides(config_of(folder), list(overrides))
    with nullcontext() if dry_run else take_ownership(folder.root, this_process()) as ownership:
        artifacts = RunStore(folder.root, epoch=_epoch(folder, ownership))
        if not dry_run:  # what a run is going back from must not count as what it keeps
            finish_rewind(artifacts, Ledger(folder.root, epoch=artifacts.epoch))
        policy = Policy(artifacts, config, folder.uuid, index.finished_steps(artifacts), record=not dry_run)
        removals, lines = list(wanted(policy)), []
        stale = [(attempt, _own_bytes(attempt)) for attempt in artifacts.stale_attempts()]
        if not dry_run:
            remove(policy, removals)
            artifacts.sweep()
        lines = _lines(removals)
        if stale:
            lines.append(_stale_line(stale))
        return Collection(lines, policy.done, policy.verified_step)


def _epoch(folder: RunFolder, ownership: Ownership | None) -> int:
    if ownership is not None:
        return ownership.epoch
    # what an owner that came now would find: the attempts of one who lives are none of its business
    return newest_epoch(folder.root) + (0 if is_owned(folder.root) else 1)


def _lines(removals: Iterable[Removal]) -> list[Line]:
    grouped: dict[tuple[str, str], list[Removal]] = {}
    for removal in removals:
        grouped.setdefault((removal.what, f"{removal.setting} = {removal.value}"), []).append(removal)
    return [
        Line(
            what,
            why,
            min(removal.ref.step for removal in group),
            max(removal.ref.step for removal in group),
            sum(len(removal.files) for removal in group),
            sum(removal.bytes for removal in group),
        )
        for (what, why), group in sorted(grouped.items())
    ]


def _stale_line(stale: Sequence[tuple[Path, int]]) -> Line:
    steps = [int(attempt.parents[2].name) for attempt, _ in stale]
    return Line("attempts", "not committed", min(steps), max(steps), len(stale), sum(size for _, size in stale))


def _own_bytes(folder: Path) -> int:
    """Return the bytes of a folder's files, without those that another attempt holds as well."""
    found = (os.lstat(Path(at) / name) for at, _, names in os.walk(folder) for name in names)
    return sum(status.st_size for status in found if status.st_nlink == 1)
