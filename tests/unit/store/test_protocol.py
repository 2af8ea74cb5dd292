"""Two writers commit, append, crash, take over and come back in any order, and the store keeps its promises."""

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.object_store import machine
from verl_omni_core.errors import FencedError
from verl_omni_core.store import lease, remote_lease, runs
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.attempt import Attempt
from verl_omni_core.store.lease import Ownership, take_ownership
from verl_omni_core.store.ledger import Ledger
from verl_omni_core.store.manifest import ArtifactRef, FileRecord
from verl_omni_core.store.places import remote_of

STAGES = tuple((step, stage) for step in (1, 2, 3) for stage in ("rollout", "reward"))
STAGE = st.sampled_from(STAGES)
SHARDS = st.sets(st.integers(0, 2))


@dataclass
class Try:
    """An attempt of a writer, and the files it will commit."""

    attempt: Attempt
    files: list[FileRecord] = field(default_factory=list)


@dataclass
class Writer:
    """A process with its own handles; they stay usable after it lost the run, as those of a zombie are."""

    root: Path
    own: Ownership | None = None
    store: RunStore | None = None
    ledger: Ledger | None = None
    tries: list[Try] = field(default_factory=list)

    @property
    def epoch(self) -> int:
        return self.store.epoch if self.store else 0


class Protocol(RuleBasedStateMachine):
    """What two writers may do, beside a model of what must come of it."""

    roots: Callable[[], tuple[Path, Path]]
    """Makes a run and returns its folder as each of the writers has it."""

    def __init__(self) -> None:
        super().__init__()
        self.writers = [Writer(root) for root in type(self).roots()]
        self.is_remote = remote_of(self.writers[0].root) is not None
        self.epoch = 0
        self.holder: Writer | None = None  # of the newest epoch, unless it was released
        self.crashed = False
        self.committed: dict[tuple[int, str], ArtifactRef] = {}
        self.shards: dict[tuple[int, str], set[int]] = {stage: set() for stage in STAGES}
        self.ledger: list[int] = []  # epoch of each record
        self.take(0, expired=False)

    def teardown(self) -> None:
        for writer in self.writers:
            if writer.own is not None:
                writer.own.release()
        for writer in self.writers:
            store = RunStore(writer.root)
            for ref in self.committed.values():
                store.verify(ref)
            self.check_shards(store)

    def check_shards(self, store: RunStore) -> None:
        for stage in self.shards.keys() - self.committed.keys():
            assert self.shards[stage] <= store.finished_shards(*stage, "k").keys()

    @property
    def newest(self) -> Writer:
        """The writer that took the run last, whether it lives or not."""
        return max(self.writers, key=lambda writer: writer.epoch)

    @property
    def zombie(self) -> Writer:
        return min(self.writers, key=lambda writer: writer.epoch)

    def refuses(self, writer: Writer, expired: bool) -> bool:
        if self.holder is None or (self.holder is writer and writer.own is None):
            return False
        return not expired if self.is_remote else not self.crashed

    @rule(number=st.integers(0, 1), expired=st.booleans())
    def take(self, number: int, expired: bool) -> None:
        writer = self.writers[number]
        if writer.own is not None:
            return
        margin = mock.patch.object(remote_lease, "MARGIN_S", -1e6 if expired else 1e6)
        with margin, mock.patch.object(lease, "_LOCK_RETRY_S", 0.0):  # nobody glances at the lock here
            if self.refuses(writer, expired):
                with pytest.raises(FencedError, match=r"is owned by writer"):
                    take_ownership(writer.root, f"writer {number}")
                return
            writer.own = take_ownership(writer.root, f"writer {number}")
        self.epoch += 1
        assert writer.own.epoch == self.epoch
        self.holder, self.crashed = writer, False
        writer.store = RunStore(writer.root, epoch=self.epoch)
        writer.ledger = Ledger(writer.root, epoch=self.epoch)
        assert len(writer.ledger.records()) == len(self.ledger)

    @rule(by_crash=st.booleans())
    def let_go(self, by_crash: bool) -> None:
        writer = self.newest
        if writer.own is None:
            return
        if by_crash:
            crash(writer.own)
        else:
            writer.own.release()
        writer.own = None
        self.holder, self.crashed = (writer if by_crash else None), by_crash

    @rule(stage=STAGE, shards=SHARDS, commits=st.booleans())
    def work(self, stage: tuple[int, str], shards: set[int], commits: bool) -> None:
        current = Try(self.newest.store.attempt(*stage, "k"))
        for shard in sorted(shards):
            file = current.attempt.write_file(f"{shard}.bin", b"%d" % shard)
            assert current.attempt.finish_shard(shard, [file]).files == (file,)
            current.files.append(file)
        self.shards[stage] |= shards
        self.newest.tries.append(current)
        if commits:
            self.commit(self.newest)

    @rule(stage=STAGE)
    def work_on_what_is_there(self, stage: tuple[int, str]) -> None:
        current = Try(self.newest.store.attempt(*stage, "k"))
        found = self.newest.store.finished_shards(*stage, "k")
        if stage not in self.committed:
            assert self.shards[stage] <= found.keys()
        current.files = [file for record in found.values() for file in current.attempt.adopt(record).files]
        self.newest.tries.append(current)
        self.commit(self.newest)

    @rule(by_zombie=st.booleans())
    def commit_late(self, by_zombie: bool) -> None:
        writer = self.zombie if by_zombie else self.newest
        if writer.tries:
            self.commit(writer)

    def commit(self, writer: Writer) -> None:
        each = writer.tries.pop()
        stage = (each.attempt.step, each.attempt.stage)

        def act() -> ArtifactRef:
            return each.attempt.commit(each.files, rows=len(each.files), parents=[], producer={})

        if each.attempt.epoch < self.epoch:
            with pytest.raises(FencedError):
                act()
            return
        ref = act()
        assert ref == self.committed.setdefault(stage, ref)
        assert act() == ref if ref.attempt == each.attempt.name else not each.attempt.folder.exists()

    @rule()
    def append(self) -> None:
        self.ledger.append(self.epoch)
        assert self.newest.ledger.append({"epoch": self.epoch}) == len(self.ledger)

    @rule()
    def append_from_a_ledger_that_was_opened_before_the_last_record(self) -> None:
        late = Ledger(self.newest.root, epoch=self.epoch)
        late.records()
        self.append()
        with pytest.raises(FencedError, match=r"somebody else wrote to the ledger"):
            late.append({"epoch": self.epoch})

    @rule()
    def sweep(self) -> None:
        self.newest.store.sweep()
        self.check_shards(self.newest.store)

    @rule(stage=STAGE)
    def the_older_writer_is_refused(self, stage: tuple[int, str]) -> None:
        zombie = self.zombie
        if zombie.store is None:
            return
        for act in (
            lambda: zombie.store.attempt(*stage, "k"),
            lambda: zombie.ledger.append({"epoch": zombie.epoch}),
            zombie.store.sweep,
        ):
            with pytest.raises(FencedError):
                act()

    @invariant()
    def every_stage_has_its_first_commit_and_the_ledger_every_record(self) -> None:
        self.writers.reverse()  # what one has written the other must see
        # a zombie that does not know yet that it is one looks into its own folder alone
        root = next(each.root for each in self.writers if each.own is None or each.epoch == self.epoch)
        assert [RunStore(root).find(*stage) for stage in STAGES] == [self.committed.get(stage) for stage in STAGES]
        records = Ledger(root).records()
        assert [record["sequence"] for record in records] == list(range(1, len(self.ledger) + 1))
        assert [record["fence_epoch"] for record in records] == self.ledger == sorted(self.ledger)


def crash(own: Ownership) -> None:
    """Leave a run as a killed process does: its lock is gone, its lease is not renewed and not given back."""
    if own._heartbeat is not None:
        own._heartbeat._stop.set()
        own._heartbeat = None
    own._close()


def in_a_folder(base: Path) -> tuple[Path, Path]:
    root = runs.create_run(base / uuid.uuid4().hex, {}, code_version="1", run_id="r").root
    return root, root


def in_an_object_store(base: Path, uri: str) -> tuple[Path, Path]:
    name = uuid.uuid4().hex
    address = uri.replace("?", f"/{name}?")
    root = runs.create_run(machine(base / "a", address), {}, code_version="1", run_id="r").root
    return root, runs.open_run(machine(base / "b", address), "r").root


def in_any_order(roots: Callable[[], tuple[Path, Path]], *, examples: int, steps: int) -> None:
    kind = type("Protocol", (Protocol,), {"roots": staticmethod(roots)})
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        phases=[Phase.generate],  # to shorten a failure takes many times as long as to find it
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(kind, settings=chosen)


def test_two_writers_in_any_order_keep_the_protocol_in_a_folder(tmp_path):
    in_any_order(lambda: in_a_folder(tmp_path), examples=30, steps=30)


def test_two_writers_in_any_order_keep_the_protocol_in_an_object_store(tmp_path, uri):
    in_any_order(lambda: in_an_object_store(tmp_path, uri), examples=5, steps=20)
