"""A long run opens through its index, and with or without it in the same state."""

import json
import logging
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from benchmarks.long_run import make_long_run, unsynced
from verl_omni_core.errors import FencedError, StoreError
from verl_omni_core.store import index
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.index_files import block_path, block_steps
from verl_omni_core.store.lease import Ownership, take_ownership
from verl_omni_core.store.ledger import BEGINNING, Ledger
from verl_omni_core.store.rejection import reject
from verl_omni_core.store.runs import steps_done

STEPS = index.STEPS


@pytest.fixture(scope="module", autouse=True)
def short_blocks() -> Iterator[None]:
    """Blocks of ten steps instead of a hundred."""
    with mock.patch.object(index, "STEPS", 10):
        yield


@pytest.fixture(scope="module")
def made(short_blocks: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 22 steps; tests that change it work on a copy."""
    return make_long_run(tmp_path_factory.mktemp("long"), 22)


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "long"))


def records_read(ledger: Ledger) -> list[int]:
    """Return the numbers of the records that the ledger has parsed."""
    return [record["sequence"] for record in ledger._records]


def test_a_block_holds_what_its_steps_committed_and_where_the_ledger_stood(made):
    store = RunStore(made)
    assert block_steps(made) == [10, 20]
    for last in (10, 20):
        block = index.read_block(store, last)
        assert sorted(block.stages) == list(range(last - 9, last + 1))
        for step, refs in block.stages.items():
            assert list(refs) == [store.find(step, stage) for stage in store.stages(step)] and len(refs) == 11
        assert Ledger(made).records()[block.ledger.sequence - 1]["step"] == last


def test_opening_looks_only_at_what_comes_after_the_newest_block(made, monkeypatch):
    looked_at: set[int] = set()
    find = RunStore.find

    def watched(self, step, stage):
        looked_at.add(step)
        return find(self, step, stage)

    monkeypatch.setattr(RunStore, "find", watched)
    store = RunStore(made)
    assert index.finished_steps(store) == 22
    assert looked_at == set(range(20, 24))
    assert index.unsettled_steps(store) == list(range(11, 23))
    ledger = index.open_ledger(store)
    assert [record["step"] for record in ledger.records_since(21)] == [21, 22]
    assert records_read(ledger) == [21, 22]


def test_a_ledger_opened_at_a_place_appends_and_still_gives_all_records(root):
    with take_ownership(root, "me") as own:
        ledger = index.open_ledger(RunStore(root, epoch=own.epoch))
        assert ledger.append({"step": 23}) == 23
        assert records_read(ledger) == [21, 22, 23]
        assert ledger.records() == Ledger(root).records()
        assert [record["step"] for record in ledger.records_since(5)] == list(range(5, 24))


def test_a_ledger_whose_place_is_another_record_is_read_from_its_beginning(root, caplog):
    with caplog.at_level(logging.WARNING):
        stale = Ledger(root, start=index.Position(20, 20, "0" * 64))
        assert [record["sequence"] for record in stale.records_since(21)] == [21, 22]
    assert "record 20 is not the one that the index knows" in caplog.text
    assert stale.records() == Ledger(root).records()


def test_a_record_that_is_missing_before_the_place_is_told(root):
    ledger = index.open_ledger(RunStore(root))
    (root / "ledger" / f"{7:012d}.json").unlink()
    with pytest.raises(StoreError, match=r"lacks record 7 of 22"):
        ledger.records_since(21)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:100], lambda data: b"", lambda data: data.replace(b"k", b"j", 1)]
)
def test_a_damaged_block_is_passed_over_and_written_anew_by_the_owner(root, damage, caplog):
    path = block_path(root, 20)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    with caplog.at_level(logging.WARNING):
        assert index.newest_block(RunStore(root)).last == 10
        assert index.finished_steps(RunStore(root)) == 22
    assert "is missing or damaged" in caplog.text
    assert path.read_bytes() != whole  # a reader changes nothing
    with take_ownership(root, "me") as own:
        store = RunStore(root, epoch=own.epoch)
        assert index.repair(store, index.open_ledger(store)) == [20]
    assert path.read_bytes() == whole


def test_a_lost_index_is_rebuilt_from_the_commits_as_it_was(root):
    before = {last: block_path(root, last).read_bytes() for last in block_steps(root)}
    shutil.rmtree(root / "index")
    assert index.finished_steps(RunStore(root)) == 22 and not (root / "index").exists()
    with take_ownership(root, "me") as own:
        store = RunStore(root, epoch=own.epoch)
        assert index.repair(store, Ledger(root, epoch=own.epoch)) == [10, 20]
        assert index.repair(store, Ledger(root, epoch=own.epoch)) == []
    assert {last: block_path(root, last).read_bytes() for last in block_steps(root)} == before


def test_only_the_owner_writes_the_index(root):
    shutil.rmtree(root / "index")
    with take_ownership(root, "me") as own, pytest.raises(FencedError):
        index.repair(RunStore(root, epoch=own.epoch - 1), Ledger(root))
    assert not (root / "index").exists()


def test_a_block_whose_last_step_was_done_again_does_not_count(root):
    commit = root / "steps" / "000020" / "log" / "COMMIT"
    value = json.loads(commit.read_text())
    commit.write_text(json.dumps({**value, "attempt": "000009-other"}))
    assert index.newest_block(RunStore(root)).last == 10


def test_a_step_that_is_taken_back_takes_the_blocks_with_it_that_call_it_finished(root):
    with take_ownership(root, "me") as own:
        store = RunStore(root, epoch=own.epoch)
        reject(store, store.find(15, "rollout"), "wrong")
        assert block_steps(root) == [10]
        assert index.finished_steps(store) == 14


def test_what_nothing_came_of_is_swept_a_block_later_so_that_late_snapshots_can_end(tmp_path):
    with unsynced(), mock.patch.object(index, "STEPS", 2), take_ownership(tmp_path, "me") as own:
        store, ledger = RunStore(tmp_path, epoch=own.epoch), Ledger(tmp_path, epoch=own.epoch)
        beaten, late = store.attempt(1, "log", "k"), store.attempt(2, "checkpoint", "k")
        for step in (1, 2, 3, 4):
            won = store.attempt(step, "log", "k").commit([], rows=0, parents=[], producer={})
            index.extend(store, ledger, step)
            assert [beaten.folder.exists(), late.folder.exists()] == [step < 4] * 2
        assert block_steps(tmp_path) == [2, 4]
        assert store.find(4, "log") == won


class Opening(RuleBasedStateMachine):
    """Steps that finish, are cut off, are taken back; owners that come and go; an index that is lost and damaged."""

    @initialize()
    def make(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.root = Path(self.folder.name)
        self.patches = [unsynced(), mock.patch.object(index, "STEPS", 3)]
        for patch in self.patches:
            patch.__enter__()
        self.own: Ownership | None = None
        self.open()

    def teardown(self) -> None:
        for patch in self.patches:
            patch.__exit__(None, None, None)
        self.own.release()
        self.folder.cleanup()

    @rule()
    def open(self) -> None:
        """Another process takes the run, as opening it does."""
        if self.own is not None:
            self.own.release()
        self.own = take_ownership(self.root, "me")
        self.store = RunStore(self.root, epoch=self.own.epoch)
        index.repair(self.store, index.open_ledger(self.store))
        index.sweep(self.store)
        self.ledger = index.open_ledger(self.store)

    @rule(keys=st.lists(st.sampled_from(["rollout", "update", "log", "checkpoint"]), unique=True))
    def cut_off(self, keys: list[str]) -> None:
        """Attempts that nothing comes of, at the step that is next and, late, at the one before."""
        for stage in keys:
            step = index.finished_steps(self.store) + (0 if stage == "checkpoint" else 1)
            self.store.attempt(step, stage, "k")

    @rule(times=st.integers(1, 4))
    def finish(self, times: int) -> None:
        for _ in range(times):
            step = index.finished_steps(self.store) + 1
            parents = []
            for stage in ("rollout", "update", "log"):
                if self.store.find(step, stage) is None:
                    attempt = self.store.attempt(step, stage, "k", parents=parents)
                    parents = [attempt.commit([], rows=0, parents=parents, producer={})]
            self.ledger.append({"step": step})
            index.extend(self.store, self.ledger, step)

    @precondition(lambda self: index.finished_steps(self.store) > 0)
    @rule(back=st.integers(0, 5))
    def take_back(self, back: int) -> None:
        step = max(index.finished_steps(self.store) - back, 1)
        reject(self.store, self.store.find(step, "rollout"), "wrong")

    @rule(back=st.integers(0, 2), data=st.binary(max_size=5))
    def damage(self, back: int, data: bytes) -> None:
        blocks = block_steps(self.root)
        if len(blocks) > back:
            block_path(self.root, blocks[-1 - back]).write_bytes(data)

    @rule(back=st.integers(0, 2))
    def lose(self, back: int) -> None:
        blocks = block_steps(self.root)
        if len(blocks) > back:
            block_path(self.root, blocks[-1 - back]).unlink()

    @invariant()
    def opens_the_same_without_the_index(self) -> None:
        seen = self.answers()
        folder = self.root / "index"
        if folder.exists():
            folder.rename(self.root / "away")
        assert self.answers() == seen
        if (self.root / "away").exists():
            (self.root / "away").rename(folder)

    def answers(self) -> dict[str, object]:
        done = index.finished_steps(self.store)
        next_owner = RunStore(self.root, epoch=self.own.epoch + 1)
        return {
            "finished": done,
            "updated": steps_done(self.root),
            "records": [index.open_ledger(self.store).records_since(step) for step in (0, done - 1, done + 1)],
            "stale": sorted(next_owner.stale_attempts(index.unsettled_steps(next_owner))),
        }


TestOpening = Opening.TestCase
TestOpening.settings = settings(
    max_examples=25, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_a_position_before_all_records_reads_them_all(made):
    assert Ledger(made, start=BEGINNING).records() == Ledger(made).records()
    assert Ledger(made).position(0) == BEGINNING


OPEN_LIMIT_S = 2.0


def opens_in_time(folder: Path, steps: int) -> None:
    from benchmarks.overhead import open_long_run

    with mock.patch.object(index, "STEPS", STEPS):
        root = make_long_run(folder, steps)
        begun = time.perf_counter()
        opened = open_long_run(root)
        seconds = time.perf_counter() - begun
    assert (opened.finished, opened.last_steps, opened.artifacts, opened.ledger_records) == (steps, 20, 220, 20)
    assert seconds < OPEN_LIMIT_S


def test_a_run_of_1000_steps_opens_in_under_2_s(tmp_path):
    opens_in_time(tmp_path, 1000)


@pytest.mark.full
def test_a_run_of_10000_steps_opens_in_under_2_s(tmp_path):
    opens_in_time(tmp_path, 10_000)
