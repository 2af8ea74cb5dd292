import asyncio

import numpy as np
import pytest

from verl_omni_core.errors import ConfigError
from verl_omni_core.rewards import _pool
from verl_omni_core.rewards._contract import Score, ScoringItem
from verl_omni_core.rewards._pool import ScorerPool

ITEMS = [ScoringItem(f"s{i}", np.zeros((3, 8, 8), np.uint8), "p") for i in range(12)]


class Worker:
    def __init__(
        self, delay_s: float = 0.01, *, dies: bool = False, answers_ping: bool = True, busy: bool = False
    ) -> None:
        self.delay_s, self.dies, self.answers_ping, self.busy = delay_s, dies, answers_ping, busy
        self.seen: list[str] = []
        self.finished = 0

    async def score(self, items: list[ScoringItem]) -> list[dict[str, Score]]:
        self.seen += [item.sample_id for item in items]
        if self.dies:
            raise ConnectionError("actor died")
        await asyncio.sleep(self.delay_s)
        return [{"a": Score(float(item.sample_id[1:]))} for item in items]

    async def ping(self) -> int:
        if not self.answers_ping:
            await asyncio.sleep(60)
        self.finished += self.busy
        return self.finished


def score_all(*workers: Worker, timeout_s: float = 5) -> list[float | None]:
    pool = ScorerPool(workers, ["a"], timeout_s=timeout_s)
    rows = asyncio.run(pool.score_all(ITEMS))
    assert pool.in_flight == [0] * len(workers)
    return [row["a"].value for row in rows]


def test_results_stand_in_order_whoever_scored() -> None:
    assert score_all(Worker(0.03), Worker(0.0), Worker(0.01)) == [float(i) for i in range(12)]


def test_samples_go_to_the_worker_with_least_in_flight() -> None:
    first, second = Worker(), Worker()
    score_all(first, second)
    assert len(first.seen) == len(second.seen) == 6


def test_a_dead_workers_samples_go_to_another() -> None:
    dead, alive = Worker(dies=True), Worker()
    assert score_all(dead, alive) == [float(i) for i in range(12)]


def test_without_any_worker_left_scores_are_missing_with_the_reason() -> None:
    pool = ScorerPool([Worker(dies=True)], ["a", "b"], timeout_s=5)
    scores = asyncio.run(pool.score(ITEMS[0]))
    assert set(scores) == {"a", "b"}
    assert all(score.value is None and "actor died" in str(score.error) for score in scores.values())


def test_a_worker_that_no_longer_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pool, "_GRACE_S", 0.1)
    monkeypatch.setattr(_pool, "_PING_S", 0.1)
    stuck, alive = Worker(60, answers_ping=False), Worker()
    assert score_all(stuck, alive, timeout_s=0.1) == [float(i) for i in range(12)]


def test_a_worker_busy_with_others_samples_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pool, "_GRACE_S", 0.0)
    assert score_all(Worker(0.5, busy=True), timeout_s=0.05) == [float(i) for i in range(12)]


def test_a_worker_that_finishes_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pool, "_GRACE_S", 0.0)
    assert score_all(Worker(60), Worker(0.001), timeout_s=0.05) == [float(i) for i in range(12)]


def test_a_worker_that_came_back_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pool, "_AGAIN_S", 0.05)
    worker = Worker(dies=True)

    async def lose_and_find() -> list[float | None]:
        pool = ScorerPool([worker], ["a"], timeout_s=5)
        lost = await pool.score(ITEMS[3])
        worker.dies = False
        await asyncio.sleep(0.1)
        found = await pool.score(ITEMS[3])
        return [lost["a"].value, found["a"].value]

    assert asyncio.run(lose_and_find()) == [None, 3.0]


def test_a_pool_of_nobody_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reward\.workers"):
        ScorerPool([], ["a"], timeout_s=1)
