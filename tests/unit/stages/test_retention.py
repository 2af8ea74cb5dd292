"""What goes of old steps and what stays: nothing goes that replay may need, whatever happens in between."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from benchmarks.long_run import unsynced
from verl_omni_core.errors import FencedError, StoreError
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages.retention import Policy, remove, retain, wanted
from verl_omni_core.store import durable_files, trusted, verified
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.lease import Ownership, take_ownership
from verl_omni_core.store.manifest import ArtifactRef
from verl_omni_core.store.verified import is_verified

TABLES = {
    "plan": ("prompts", "requests"),
    "rollout": ("trajectories", "embeddings", "media", "scores", "metrics"),
    "reward": ("rewards", "reward_summary"),
    "old_log_probs": ("logprobs",),
    "reference": ("reference",),
    "advantage": ("advantages", "metrics"),
    "update": ("metrics",),
    "checkpoint": ("state",),
    "sync": ("weights",),
    "sync-average": ("weights",),
    "validate-samples": ("trajectories", "embeddings", "media", "scores", "prompts"),
    "validate": ("rewards", "reward_summary", "metrics"),
    "preview": ("trajectories", "embeddings", "media", "prompts"),
    "log": ("metrics",),
}
MAY_GO = {
    "rollout": ("trajectories", "embeddings", "media"),
    "old_log_probs": ("logprobs",),
    "reference": ("reference",),
    "validate-samples": ("embeddings",),
    "preview": ("embeddings",),
    "checkpoint": ("state",),
    "sync": ("weights",),
    "sync-average": ("weights",),
}
FEW = {
    "plan": ("prompts",),
    "rollout": ("trajectories", "media"),
    "reference": ("reference",),
    "checkpoint": ("state",),
    "sync": ("weights",),
    "validate": ("metrics",),
    "log": ("metrics",),
}
"""Stages enough for a machine that does many steps."""
SHARDS = 4
UUID = "0123456789abcdef"
Stages = Mapping[str, Sequence[str]]


def config(checkpoint_every: int = 0, sync_interval: int = 1, **limits: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"checkpoint_every": checkpoint_every},
            "weights": {"sync_interval": sync_interval},
            "durability": {"retention": limits},
        }
    )


def commit(store: RunStore, step: int, stage: str, names: Sequence[str] = (), shards: int = SHARDS) -> ArtifactRef:
    """Commit a stage with its tables, those of the rollout in shards."""
    attempt = store.attempt(step, stage, "key")
    shards = range(shards if stage == "rollout" else 1)
    table = pa.table({"sample_index": np.arange(2), "step": np.full(2, step)})
    names = names or TABLES[stage]
    files = [attempt.write_table(name, shard, table) for name in names for shard in shards]
    return attempt.commit(files, rows=2, parents=[], producer={})


def do_step(store: RunStore, step: int, *, snapshot: bool = True, validated: bool = False, without=()) -> None:
    skipped = {*without, *(() if snapshot else ("checkpoint",))}
    skipped |= set() if validated else {"validate-samples", "validate", "sync-average", "preview"}
    for stage in TABLES:
        if stage not in skipped:
            commit(store, step, stage)


def session_of(store: RunStore, run: RunConfig) -> Any:
    return SimpleNamespace(store=store, config=run, settled={}, folder=lambda: SimpleNamespace(uuid=UUID))


def readable(store: RunStore, step: int, stage: str, tables: Stages = TABLES) -> dict[str, bool]:
    """Say of each table of a committed stage whether it can be read; of one that went, check what readers are told."""
    ref = store.find(step, stage)
    assert ref is not None and store.committed(step, stage, "key") == ref
    found = {}
    for table in tables[stage]:
        try:
            store.table(ref, table)
            found[table] = True
        except StoreError as error:
            if "has sha256" in str(error):
                found[table] = True  # it is there, and damaged
            elif "was deleted by retention" in str(error) and "durability.retention." in str(error):
                found[table] = False
            else:
                raise
    return found


def went(store: RunStore, step: int, tables: Stages = TABLES) -> set[str]:
    """Return the tables of a step that cannot be read any more, each as ``stage/table``."""
    return {
        f"{stage}/{table}"
        for stage in tables
        if store.find(step, stage) is not None
        for table, is_there in readable(store, step, stage, tables).items()
        if not is_there
    }


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    with cheap_disk(), take_ownership(tmp_path, "me") as own:
        yield RunStore(tmp_path, epoch=own.epoch)


@contextmanager
def cheap_disk() -> Iterator[None]:
    """Wait for no disk, and begin as a process that has verified nothing yet."""
    verified.reads_back.cache_clear()
    with unsynced(), mock.patch("os.fsync"), mock.patch.object(trusted, "_trusted", {}):
        yield


def test_by_default_only_snapshots_go_and_the_newest_two_and_the_multiples_stay(store):
    session = session_of(store, config(checkpoint_every=4))
    for step in range(1, 11):
        do_step(store, step)
        retain(session, step)
        kept = [s for s in range(1, step + 1) if readable(store, s, "checkpoint")["state"]]
        assert kept == [s for s in range(1, step + 1) if s > step - 2 or s % 4 == 0]
    assert set().union(*(went(store, step) for step in range(1, 11))) == {"checkpoint/state"}


def test_trajectories_of_the_last_k_steps_stay_and_those_before_go_with_all_that_replay_reads(store):
    session = session_of(store, config(trajectory_steps=3, checkpoints=None))
    for step in range(1, 8):
        do_step(store, step)
        retain(session, step)
    gone = {"rollout/trajectories", "rollout/embeddings", "old_log_probs/logprobs", "reference/reference"}
    assert [went(store, step) for step in range(1, 8)] == [gone] * 4 + [set()] * 3


def test_trajectories_stay_until_a_later_snapshot_reads_back(store):
    session = session_of(store, config(trajectory_steps=1, checkpoints=None))
    for step in range(1, 6):
        do_step(store, step, snapshot=step == 3)
        retain(session, step)
        assert [s for s in range(1, step + 1) if went(store, s)] == ([] if step < 3 else list(range(1, min(step, 4))))
    ref = store.find(3, "checkpoint")
    assert is_verified(store, ref)


def test_a_snapshot_that_does_not_read_back_lets_nothing_go(store, caplog):
    session = session_of(store, config(trajectory_steps=0, checkpoints=1))
    do_step(store, 1)
    do_step(store, 2, snapshot=False)
    do_step(store, 3)
    damage(store, 3)
    retain(session, 3)
    assert [bool(went(store, step)) for step in (1, 2, 3)] == [True, False, False]
    assert readable(store, 1, "checkpoint")["state"]  # the only whole one, though one is to stay
    assert "snapshot of step 3 does not read back" in caplog.text
    assert not is_verified(store, store.find(3, "checkpoint"))


def damage(store: RunStore, step: int) -> None:
    """Flip a bit of a step's snapshot, on the disk."""
    ref = store.find(step, "checkpoint")
    [path] = (Path(store.root) / "steps" / f"{step:06d}" / "checkpoint" / "attempts" / ref.attempt).glob("*.arrow")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def test_a_snapshot_that_lost_its_files_after_it_was_verified_counts_no_more(store):
    do_step(store, 1)
    policy = Policy(store, config(trajectory_steps=0), UUID, 1)
    assert policy.verified_step == 1
    ref = store.find(1, "checkpoint")
    store.path_of(ref, store.manifest(ref).files[0].name).unlink()
    verified.reads_back.cache_clear()
    assert Policy(store, config(trajectory_steps=0), UUID, 1).verified_step == 0


@pytest.mark.parametrize(("share", "stay"), [(0.0, 0), (0.5, None), (1.0, 160)])
def test_a_share_of_the_media_shards_stays_by_a_hash_of_run_step_and_shard(store, share, stay):
    for step in range(1, 41):
        commit(store, step, "rollout")
    commit(store, 40, "checkpoint")
    policy = Policy(store, config(trajectory_steps=0, media_share=share), UUID, 40)
    remove(policy, wanted(policy))
    kept = {
        (step, file.shard)
        for step in range(1, 41)
        for file in store.manifest(store.find(step, "rollout")).files
        if file.table == "media" and next(Path(store.root).glob(f"steps/{step:06d}/rollout/attempts/*/{file.name}"), 0)
    }
    assert len(kept) == stay if stay is not None else 56 < len(kept) < 104  # 160 shards, four spreads to either side
    other = Policy(store, config(trajectory_steps=0, media_share=0.5), "another run", 40)
    assert (not list(wanted(policy))) and (share == 0 or {r.ref.step for r in wanted(other)})


@pytest.mark.parametrize(("checkpoint_every", "left"), [(0, [0, 2, 8, 10]), (3, [0, 2, 6, 8, 10])])
def test_weights_of_validated_and_of_kept_steps_of_the_newest_and_of_the_first_stay(store, checkpoint_every, left):
    commit(store, 0, "sync")
    for step in range(1, 11):
        do_step(store, step, validated=step in (2, 5), without=("sync",) if step % 2 else ())
    policy = Policy(store, config(checkpoint_every, sync_interval=2, weight_steps=1), UUID, 9)
    remove(policy, wanted(policy))
    assert [step for step in range(0, 11, 2) if readable(store, step, "sync")["weights"]] == left


def test_weights_that_a_trainer_restored_from_the_newest_snapshot_needs_stay(store):
    commit(store, 0, "sync")
    for step in range(1, 10):
        do_step(store, step, without=() if step in (2, 4) else ("checkpoint",))
    policy = Policy(store, config(checkpoints=None, weight_steps=1), UUID, 9)
    remove(policy, wanted(policy))
    assert [step for step in range(10) if readable(store, step, "sync")["weights"]] == [0, 4, 5, 6, 7, 8, 9]


def test_held_out_samples_keep_pictures_and_seeds_and_lose_embeddings(store):
    for step in (0, 1):
        do_step(store, step, validated=True)
    policy = Policy(store, config(trajectory_steps=0, media_share=0.0, checkpoints=None), UUID, 1)
    remove(policy, wanted(policy))
    for step in (0, 1):
        assert {name for name in went(store, step) if name.startswith(("validate", "preview"))} == {
            "validate-samples/embeddings",
            "preview/embeddings",
        }


def test_other_settings_at_a_resume_apply_to_all_steps(store):
    run = session_of(store, config(trajectory_steps=None, checkpoints=None))
    for step in range(1, 6):
        do_step(store, step)
        retain(run, step)
    assert not any(went(store, step) for step in range(1, 6))
    do_step(store, 6)
    retain(session_of(store, config(trajectory_steps=2, checkpoints=None)), 6)
    assert [bool(went(store, step)) for step in range(1, 7)] == [True] * 4 + [False] * 2


def test_a_later_pass_that_takes_more_adds_a_note_and_keeps_the_first(store):
    do_step(store, 1)
    for share in (1.0, 0.0):
        policy = Policy(store, config(trajectory_steps=0, media_share=share), UUID, 1)
        remove(policy, wanted(policy))
    [attempt] = Path(store.root).glob("steps/000001/rollout/attempts/*")
    assert sorted(path.name for path in attempt.glob("collected*")) == ["collected.2.json", "collected.json"]
    assert went(store, 1) >= {"rollout/trajectories", "rollout/media"}


def test_only_the_owner_deletes(tmp_path):
    with cheap_disk():
        with take_ownership(tmp_path, "first") as own:
            old = RunStore(tmp_path, epoch=own.epoch)
            do_step(old, 1)
        with take_ownership(tmp_path, "second"):
            policy = Policy(old, config(trajectory_steps=0), UUID, 1)
            with pytest.raises(FencedError):
                remove(policy, wanted(policy))
        assert not went(old, 1)


def test_a_damaged_note_is_told_and_nothing_more_goes(store):
    do_step(store, 1)
    policy = Policy(store, config(trajectory_steps=0), UUID, 1)
    remove(policy, wanted(policy))
    [note] = Path(store.root).glob("steps/000001/rollout/attempts/*/collected.json")
    note.write_text("{")
    with pytest.raises(StoreError, match=r"collected\.json is damaged .* restore it from a copy"):
        store.table(store.find(1, "rollout"), "trajectories")
    with pytest.raises(StoreError, match=r"collected\.json is damaged"):
        list(wanted(policy))


class _PowerCut(BaseException):
    pass


class Retention(RuleBasedStateMachine):
    """Steps with and without whole snapshots, changed settings, other owners, and power cuts in between."""

    @initialize()
    def make(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.context = cheap_disk()
        self.context.__enter__()
        self.root, self.done, self.own = Path(self.folder.name), 0, None
        self.snapshots: set[int] = set()
        self.damaged: set[int] = set()
        self.validated: set[int] = set()
        self.fewest_kept: int | None = None
        self.run = config(checkpoints=2)
        self.open()

    def teardown(self) -> None:
        self.context.__exit__(None, None, None)
        self.own.release()
        self.folder.cleanup()

    @rule()
    def open(self) -> None:
        if self.own is not None:
            self.own.release()
        verified.reads_back.cache_clear()
        trusted._trusted.clear()
        self.own: Ownership = take_ownership(self.root, "me")
        self.store = RunStore(self.root, epoch=self.own.epoch)
        self.session = session_of(self.store, self.run)

    @rule(
        keep=st.none() | st.integers(0, 4),
        share=st.sampled_from([0.0, 0.5, 1.0]),
        checkpoints=st.none() | st.integers(1, 3),
        weights=st.none() | st.integers(1, 3),
        every=st.integers(0, 3),
    )
    def change_settings(self, keep, share, checkpoints, weights, every) -> None:
        limits = dict(trajectory_steps=keep, media_share=share, checkpoints=checkpoints, weight_steps=weights)
        self.run = config(every, **limits)
        self.open()

    @rule(snapshot=st.booleans(), is_damaged=st.booleans(), validated=st.booleans(), cut=st.none() | st.integers(0, 6))
    def step(self, snapshot: bool, is_damaged: bool, validated: bool, cut: int | None) -> None:
        self.done += 1
        left_out = {"checkpoint": not snapshot, "validate": not validated}
        for stage, names in FEW.items():
            if not left_out.get(stage):
                commit(self.store, self.done, stage, names, shards=2)
        self.snapshots |= {self.done} if snapshot else set()
        self.validated |= {self.done} if validated else set()
        if snapshot and is_damaged:
            damage(self.store, self.done)
            self.damaged.add(self.done)
        self.note_limit()
        if self.cut_off(cut, lambda: retain(self.session, self.done)):
            self.open()

    @rule(cut=st.none() | st.integers(0, 6))
    def collect(self, cut: int | None) -> None:
        self.note_limit()
        policy = Policy(self.store, self.run, UUID, self.done)
        if self.cut_off(cut, lambda: remove(policy, wanted(policy))):
            self.open()
            return
        again = Policy(self.store, self.run, UUID, self.done)
        assert list(wanted(again)) == []

    def note_limit(self) -> None:
        keep = self.run.durability.retention.trajectory_steps
        if keep is not None:
            limit = self.done - keep
            self.fewest_kept = limit if self.fewest_kept is None else max(self.fewest_kept, limit)

    def cut_off(self, after: int | None, act) -> bool:
        """Do it, and cut the power after so many changes of the disk."""
        left = [after]

        def change(do):
            def changed(*arguments, **options):
                if left[0] is not None:
                    if left[0] == 0:
                        raise _PowerCut
                    left[0] -= 1
                return do(*arguments, **options)

            return changed

        with (
            mock.patch.object(durable_files, "publish", change(durable_files.publish)),
            mock.patch.object(Path, "unlink", change(Path.unlink)),
            mock.patch.object(verified, "replace_whole", change(verified.replace_whole)),
        ):
            try:
                act()
            except _PowerCut:
                return True
        return False

    @invariant()
    def what_replay_needs_can_be_read(self) -> None:
        whole = self.snapshots - self.damaged
        newest = max(whole, default=0)
        assert newest == 0 or readable(self.store, newest, "checkpoint")["state"]
        for step in range(newest + 1, self.done + 1):
            assert not went(self.store, step, FEW) & {"rollout/trajectories", "reference/reference"}

    @invariant()
    def what_never_goes_can_be_read(self) -> None:
        for step in range(1, self.done + 1):
            allowed = {f"{stage}/{table}" for stage, tables in MAY_GO.items() for table in tables}
            if step in self.validated:
                allowed -= {"sync/weights", "sync-average/weights"}
            if self.fewest_kept is None or step > self.fewest_kept:
                allowed = {name for name in allowed if name.startswith(("sync", "checkpoint"))}
            if step == self.done:
                allowed -= {"sync/weights"}
            seen = went(self.store, step, FEW)
            assert seen <= allowed, seen - allowed

    @invariant()
    def what_is_left_is_whole(self) -> None:
        for step in range(1, self.done + 1):
            for stage in FEW:
                ref = self.store.find(step, stage)
                if ref is not None and not (stage == "checkpoint" and step in self.damaged):
                    self.store.verify(ref)


TestRetention = Retention.TestCase
TestRetention.settings = settings(
    max_examples=20, stateful_step_count=10, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_a_session_settles_each_step_once(store, monkeypatch):
    session = session_of(store, config(trajectory_steps=1, checkpoints=None, weight_steps=1))
    looked_at: list[int] = []
    samples = Policy.samples
    monkeypatch.setattr(Policy, "samples", lambda self, step: looked_at.append(step) or samples(self, step))
    for step in range(1, 7):
        do_step(store, step)
        retain(session, step)
    assert sorted(looked_at) == list(range(6))  # step 0 and those that fell out, each once
    looked_at.clear()
    retain(session_of(store, session.config), 6)
    assert looked_at == [5]  # a new process finds that it is settled, and so is all before it


def test_settings_bounds():
    with pytest.raises(ValueError, match="checkpoints"):
        config(checkpoints=0)
    with pytest.raises(ValueError, match="media_share"):
        config(media_share=1.5)
