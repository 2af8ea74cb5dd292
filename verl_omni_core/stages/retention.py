"""Which files of old steps go: by the settings, by how far the run is, and never what replay may still need.

A step's trajectories go only once a snapshot of that step or of a later one was read back after its commit: until then
a trainer that is lost repeats the step from them. Only files go; what was committed stays committed.
"""

import logging
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from verl_omni_core.identity import digest
from verl_omni_core.settings.retention import RetentionSettings
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages.checkpoint import STAGE as CHECKPOINT
from verl_omni_core.stages.preview import STAGE as PREVIEW
from verl_omni_core.stages.rollout import STAGE as ROLLOUT
from verl_omni_core.stages.schedule import is_kept, policy_version
from verl_omni_core.stages.session import Session
from verl_omni_core.stages.trained import STAGES as WEIGHTS
from verl_omni_core.stages.validate import SAMPLES
from verl_omni_core.stages.validate import STAGE as VALIDATE
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.attempt import attempt_folder
from verl_omni_core.store.collected import collect, collected_files, present_files
from verl_omni_core.store.lease import check_epoch
from verl_omni_core.store.manifest import ArtifactRef, FileRecord
from verl_omni_core.store.verified import is_verified, reads_back

logger = logging.getLogger(__name__)

_REPLAYED = {
    ROLLOUT: ("trajectories", "embeddings"),
    "old_log_probs": ("logprobs",),
    "reference": ("reference",),
    SAMPLES: ("embeddings",),
    PREVIEW: ("embeddings",),
}
"""Stage to the tables that go with ``trajectory_steps``. Of held-out samples the report needs seeds and pictures."""
_MEDIA = "media"
_GROUP = "durability.retention"
_LATE_STEPS = 100
"""Steps within which a snapshot that is written beside the next steps is committed."""


@dataclass(frozen=True)
class Removal:
    """Files of one artifact that go for one reason."""

    ref: ArtifactRef
    files: tuple[FileRecord, ...]
    setting: str
    """Dotted name of the setting that wants it."""
    value: Any

    @property
    def what(self) -> str:
        """Name of the tables, or of the stage whose files are no tables."""
        return ", ".join(sorted({file.table or self.ref.stage for file in self.files}))

    @property
    def bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True)
class Found:
    """What retention wants of one step."""

    removals: tuple[Removal, ...] = ()
    was_here: bool = False
    """Whether something of the step went before."""


@dataclass(frozen=True)
class Policy:
    """The settings of retention applied to a run of which ``done`` steps are finished."""

    store: RunStore
    config: RunConfig
    run_uuid: str
    done: int
    record: bool = True
    """Whether a snapshot that reads back is written down as verified; not by whoever only looks."""

    @property
    def settings(self) -> RetentionSettings:
        return self.config.durability.retention

    @cached_property
    def verified_step(self) -> int:
        """Step of the newest snapshot that was read back after its commit, or reads back now; 0 if none does."""
        for step in range(self.done, 0, -1):
            ref = self.store.find(step, CHECKPOINT)
            if ref is None or collected_files(attempt_folder(Path(self.store.root), ref)):
                continue
            trouble = "" if is_verified(self.store, ref) else reads_back(self.store, ref, self.record)
            if not trouble:
                return step
            logger.warning(
                "the snapshot of step %d does not read back, so nothing goes that an older one needs for replay: %s",
                *(step, trouble),
            )
        return 0

    @property
    def last_sampled(self) -> int:
        """Last step whose trajectories may go; -1 if none may."""
        kept = self.settings.trajectory_steps
        if kept is None or self.done - kept < 0:
            return -1
        return min(self.done - kept, self.verified_step)

    @property
    def last_weighed(self) -> int:
        """Last step whose weights may go; at most 0 if none may: those of step 0 are what training began with."""
        kept = self.settings.weight_steps
        if kept is None:
            return 0
        # whoever resumes from the newest verified snapshot loads the weights that draw the step after it
        resumed = min(self.verified_step, self.done)
        return min(self.done - kept, policy_version(resumed + 1, self.config.weights.sync_interval) - 1)

    def samples(self, step: int) -> Found:
        """Return what goes of a step's samples once its trajectories may."""
        found = Found()
        for stage, tables in _REPLAYED.items():
            found = self._add(found, step, stage, "trajectory_steps", partial(_is_of, tables))
        return self._add(
            found, step, ROLLOUT, "media_share", lambda file: file.table == _MEDIA and self._goes(file, step)
        )

    def weights(self, step: int) -> Found:
        """Return what goes of a step's weights once they may."""
        found = Found()
        if is_kept(self.config, step) or self.store.find(step, VALIDATE) is not None:
            return found
        for stage in WEIGHTS.values():
            found = self._add(found, step, stage, "weight_steps", lambda file: True)
        return found

    def snapshots(self, steps: Iterable[int]) -> tuple[list[Removal], int]:
        """Return what goes of snapshots, and the last step up to which nothing of them is open any more.

        Args:
            steps: those to look at, newest first.
        """
        keep = self.settings.checkpoints
        if keep is None:
            return [], self.done
        keeps_whole = self.config.durability.checkpoint_contents == "all"
        newest: list[int] = []
        others: list[int] = []
        for step in steps:
            ref = self.store.find(step, CHECKPOINT)
            if ref is None or self._is_gone(ref):
                continue
            if len(newest) < keep:
                newest.append(step)
            elif not (keeps_whole and is_kept(self.config, step)):
                others.append(step)
        going = [step for step in reversed(others) if step < self.verified_step] if others else []
        removals = [r for s in going for r in self._add(Found(), s, CHECKPOINT, "checkpoints", lambda f: True).removals]
        left = [*newest, *(step for step in others if step not in going), self.done - _LATE_STEPS]
        return removals, max(min(left) - 1, 0)

    def _add(self, found: Found, step: int, stage: str, setting: str, goes: Callable[[FileRecord], bool]) -> Found:
        ref = self.store.find(step, stage)
        if ref is None:
            return found
        folder = attempt_folder(Path(self.store.root), ref)
        files = present_files(folder, [file for file in self.store.manifest(ref).files if goes(file)])
        was_here = found.was_here or bool(collected_files(folder))
        if not files:
            return Found(found.removals, was_here)
        value = getattr(self.settings, setting)
        removal = Removal(ref, tuple(files), f"{_GROUP}.{setting}", value)
        return Found((*found.removals, removal), was_here)

    def _is_gone(self, ref: ArtifactRef) -> bool:
        folder = attempt_folder(Path(self.store.root), ref)
        gone = collected_files(folder)
        return bool(gone) and not present_files(folder, self.store.manifest(ref).files)

    def _goes(self, file: FileRecord, step: int) -> bool:
        # a hash rather than a draw: every pass, and every try after a crash, keeps the same shards
        drawn = int(digest([self.run_uuid, step, file.shard])[:13], 16) / 16**13
        return drawn >= self.settings.media_share


def retain(session: Session, step: int) -> int:
    """Delete what ``step``, now finished, pushes out of what the settings keep; return its bytes.

    Looks only at steps that this process has not settled yet.

    Raises:
        FencedError: a newer owner exists. StoreError: a record of what went is damaged, or the disk is full.
    """
    policy = Policy(session.store, session.config, session.folder().uuid, step)
    settled, size = session.settled, 0
    for kind, last, look in (
        ("samples", policy.last_sampled, policy.samples),
        ("weights", policy.last_weighed, policy.weights),
    ):
        floor = settled.get(kind, -1 if kind == "samples" else 0)
        size += remove(policy, _open_removals(range(last, floor, -1), look))
        settled[kind] = max(floor, last)
    removals, settled_now = policy.snapshots(range(step, settled.get("snapshots", 0), -1))
    size += remove(policy, removals)
    settled["snapshots"] = settled_now
    return size


def wanted(policy: Policy) -> Iterator[Removal]:
    """Yield all that retention wants of a run, oldest step first, whatever went before."""
    steps = policy.store.steps()
    for step in steps:
        if step <= policy.last_sampled:
            yield from policy.samples(step).removals
    for step in steps:
        if 0 < step <= policy.last_weighed:
            yield from policy.weights(step).removals
    yield from policy.snapshots(step for step in reversed(steps) if step <= policy.done)[0]


def remove(policy: Policy, removals: Iterable[Removal]) -> int:
    """Delete files as the run's owner; return their bytes.

    Raises:
        FencedError: a newer owner exists.
    """
    root, size = Path(policy.store.root), 0
    for removal in removals:
        check_epoch(root, policy.store.epoch)
        size += collect(
            attempt_folder(root, removal.ref),
            removal.files,
            setting=removal.setting,
            value=removal.value,
            epoch=policy.store.epoch,
        )
    return size


def _is_of(tables: Container[str], file: FileRecord) -> bool:
    return file.table in tables


def _open_removals(steps: Iterable[int], look: Callable[[int], Found]) -> list[Removal]:
    """Return what goes of steps that come newest first, oldest first, up to one that was settled before.

    Older steps are settled first, also where a crash cuts it short, so a settled one has no open ones before it.
    """
    found: list[Found] = []
    for step in steps:
        seen = look(step)
        if seen.was_here and not seen.removals:
            break
        found.append(seen)
    return [removal for seen in reversed(found) for removal in seen.removals]
