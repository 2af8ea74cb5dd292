"""Packs that fail: which errors are tried again, what the others leave behind, and what a second try costs."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.unit.agent_loop.fake_client import Client, config
from tests.workers.test_rollout_worker import GROUP, PROMPTS, planned
from verl_omni_core.errors import ContractError, EngineError, StageLost, StoreError, VerlOmniError
from verl_omni_core.rollout._contract import SampleRequest
from verl_omni_core.stages import observe
from verl_omni_core.stages.drawing import draw
from verl_omni_core.stages.session import RunRef, Session, let_go, register
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.workers.rollout_worker import PackResult, PackTask, RolloutWorker

PACK, COUNT = 4, PROMPTS * GROUP
BAD = 6
"""Sample index of the one that fails: in the second of three packs."""


class Pool:
    """A rollout worker in this process."""

    def __init__(self, client: Client, *, dead: bool = False) -> None:
        self.worker, self.dead, self.repairs = RolloutWorker(SETTINGS, client), dead, 0

    def run_packs(self, packs: list[PackTask]) -> list[PackResult]:
        async def run() -> list[PackResult | BaseException]:
            return await asyncio.gather(*(self.worker.run_pack(pack) for pack in packs), return_exceptions=True)

        results = asyncio.run(asyncio.wait_for(run(), 60))
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            raise errors[0]
        return results  # type: ignore[return-value]

    def repair(self) -> bool:
        self.repairs += 1
        was, self.dead = self.dead, False
        return was


SETTINGS = config(rollout={"max_attempts": 2, "pack_size": PACK}, reward={"streaming": False})


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    (tmp_path / "run").mkdir()
    return RunStore(tmp_path / "run")


def drawn(store: RunStore, pool: Pool) -> list[str]:
    session = SimpleNamespace(config=SETTINGS, store=store, actors=pool)
    attempt = store.attempt(1, "rollout", "key")
    done = draw(session, attempt, *planned(), version=0, validate=False)  # type: ignore[arg-type]
    return [file.name for file in done.files]


def failing(error: VerlOmniError | Callable[[], VerlOmniError | None]) -> Client:
    bad = planned()[1]["seed"][BAD].as_py()

    def fail(request: SampleRequest) -> Exception | None:
        if request.seed != bad:
            return None
        return error if isinstance(error, Exception) else error()

    return Client(fail=fail)


@pytest.mark.parametrize(
    ("error", "calls", "times"),
    [(ContractError("no"), 1, "once"), (StageLost("gone"), 2, "once"), (EngineError("tired"), 4, "2 times")],
)
def test_only_what_may_succeed_again_is_drawn_again_and_errors_keep_their_class(
    store: RunStore, error: VerlOmniError, calls: int, times: str
) -> None:
    client = failing(error)
    with pytest.raises(type(error), match=f"1 of 3 packs of rollout failed {times}; .*{error}"):
        drawn(store, Pool(client))
    bad = planned()[1]["seed"][BAD].as_py()
    assert sum(request.seed == bad for request in client.requests) == calls
    assert sorted(store.finished_shards(1, "rollout", "key")) == [0, 2]


def test_an_error_that_is_not_ours_is_not_tried_again(store: RunStore) -> None:
    client = failing(ZeroDivisionError("oops"))  # type: ignore[arg-type]
    with pytest.raises(VerlOmniError, match="ZeroDivisionError: oops"):
        drawn(store, Pool(client))
    assert len(client.requests) == COUNT


def test_after_a_pack_that_raised_only_its_samples_are_drawn(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = RolloutWorker._write

    def no_room(self: RolloutWorker, pack: PackTask, *rest: object) -> object:
        if pack.shard == 1:
            raise StoreError("the disk is full")
        return whole(self, pack, *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(RolloutWorker, "_write", no_room)
        with pytest.raises(StoreError, match="full"):
            drawn(store, Pool(Client()))
    again = Client()
    files = drawn(store, Pool(again))
    assert len(again.requests) == PACK and len({name for name in files if name.startswith("trajectories")}) == 3


def rollout_stage(store: RunStore, pool: Pool) -> list[str]:
    ref = RunRef(store.root, 1)

    @observe.stage("rollout")
    def rollout(run: RunRef, step: int) -> list[str]:
        return drawn(store, pool)

    register(Session(ref, SETTINGS, store, pool))  # type: ignore[arg-type]
    try:
        return rollout(ref, 1)
    finally:
        let_go(store.root)


def test_a_stage_that_lost_an_actor_is_done_again_for_what_is_missing(store: RunStore) -> None:
    pool: Pool
    client = failing(lambda: StageLost("replica 0 is dead") if pool.dead else None)
    pool = Pool(client, dead=True)
    files = rollout_stage(store, pool)
    assert len([name for name in files if name.startswith("trajectories")]) == 3
    lost = SETTINGS.rollout.max_attempts
    assert pool.repairs == 1 and len(client.requests) == COUNT - 1 + lost + PACK


def test_a_loss_that_nothing_can_repair_is_raised(store: RunStore) -> None:
    pool = Pool(failing(StageLost("gone")))
    with pytest.raises(StageLost, match="gone"):
        rollout_stage(store, pool)
    assert pool.repairs == 1
