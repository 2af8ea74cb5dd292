import asyncio
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from verl_omni_core.errors import ConfigError, ContractError, ScorerError
from verl_omni_core.rewards._contract import Score, ScoringItem
from verl_omni_core.settings.reward import RewardSettings
from verl_omni_core.workers.reward_worker import MOST_ABANDONED, RewardWorker

ITEMS = [ScoringItem(f"s{i}", np.full((3, 8, 8), i, np.uint8), "p") for i in range(4)]
Scoring = Callable[[ScoringItem], Score]


class FunctionScorer:
    RANGE = (0.0, 1.0)
    VERSION = "1"

    def __init__(self, function: Scoring, concurrency: int) -> None:
        self._function = function
        self.CONCURRENCY = concurrency

    def score(self, items: list[ScoringItem]) -> list[Score]:
        return [self._function(item) for item in items]


@pytest.fixture
def worker_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RewardWorker]]:
    """Make a worker whose scorers are given functions, found by the registry outside the tree."""

    def make(
        *, concurrency: int = 32, timeout_s: float = 5, max_attempts: int = 2, **functions: Scoring
    ) -> RewardWorker:
        scorers = []
        for name, function in functions.items():
            module = types.ModuleType(f"outside_scorers.{name}")
            module.build = lambda _, f=function: FunctionScorer(f, concurrency)
            monkeypatch.setitem(sys.modules, module.__name__, module)
            scorers.append({"name": module.__name__})
        package = types.ModuleType("outside_scorers")
        package.__path__ = []
        monkeypatch.setitem(sys.modules, "outside_scorers", package)
        return RewardWorker(RewardSettings(scorers=scorers, timeout_s=timeout_s, max_attempts=max_attempts))

    return make


def scores_by_name(worker: RewardWorker, items: list[ScoringItem] = ITEMS) -> list[dict[str, Score]]:
    scored = asyncio.run(worker.score(items))
    return [{name.removeprefix("outside_scorers."): score for name, score in row.items()} for row in scored]


def test_scores_come_back_in_order_with_every_scorer(worker_of: Callable[..., RewardWorker]) -> None:
    worker = worker_of(
        first=lambda item: Score(float(item.image[0, 0, 0])), second=lambda item: Score(None, f"no {item.sample_id}")
    )
    rows = scores_by_name(worker)
    assert [row["first"] for row in rows] == [Score(0.0), Score(1.0), Score(2.0), Score(3.0)]
    assert [row["second"].error for row in rows] == ["no s0", "no s1", "no s2", "no s3"]


def test_scorers_of_all_samples_run_side_by_side(worker_of: Callable[..., RewardWorker]) -> None:
    def slow(item: ScoringItem) -> Score:
        time.sleep(0.2)
        return Score(1.0)

    worker = worker_of(concurrency=256, a=slow, b=slow, c=slow)
    items = [ScoringItem(f"s{i}", ITEMS[0].image, "p") for i in range(64)]
    started = time.monotonic()
    rows = scores_by_name(worker, items)
    assert len(rows) == 64
    assert all(score == Score(1.0) for row in rows for score in row.values())
    assert time.monotonic() - started < 3  # one after the other: 38 s


def test_a_scorer_never_runs_more_often_at_once_than_it_says(worker_of: Callable[..., RewardWorker]) -> None:
    lock, running, most = threading.Lock(), 0, 0

    def counted(item: ScoringItem) -> Score:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1
        return Score(1.0)

    scores_by_name(worker_of(concurrency=2, a=counted), ITEMS * 4)
    assert most == 2


def test_a_transient_failure_is_tried_again(worker_of: Callable[..., RewardWorker]) -> None:
    calls = []

    def flaky(item: ScoringItem) -> Score:
        calls.append(item.sample_id)
        if len(calls) == 1:
            raise ScorerError("service is busy")
        return Score(0.5)

    (row,) = scores_by_name(worker_of(a=flaky), ITEMS[:1])
    assert row["a"] == Score(0.5)
    assert row["a"].attempts == 2
    assert calls == ["s0", "s0"]


def test_failing_for_good_is_a_missing_score_with_its_reason(worker_of: Callable[..., RewardWorker]) -> None:
    def broken(item: ScoringItem) -> Score:
        raise RuntimeError("weights are corrupt")

    worker = worker_of(a=broken, b=lambda _: Score(1.0), max_attempts=3)
    (row,) = scores_by_name(worker, ITEMS[:1])
    assert row["a"].value is None
    assert row["a"].error == "RuntimeError: weights are corrupt"
    assert row["a"].attempts == 3
    assert row["a"].status == "failed"
    assert row["b"] == Score(1.0)


def test_an_error_that_cannot_pass_is_not_tried_again(worker_of: Callable[..., RewardWorker]) -> None:
    def refuse(item: ScoringItem) -> Score:
        raise ContractError("wrong layout")

    (row,) = scores_by_name(worker_of(a=refuse), ITEMS[:1])
    assert row["a"].attempts == 1
    assert "wrong layout" in str(row["a"].error)


def test_a_hanging_scorer_times_out_and_holds_up_nobody(worker_of: Callable[..., RewardWorker]) -> None:
    release = threading.Event()

    def hangs_on_first(item: ScoringItem) -> Score:
        if item.sample_id == "s0":
            release.wait(20)
        return Score(1.0)

    worker = worker_of(concurrency=1, timeout_s=0.2, a=hangs_on_first)
    started = time.monotonic()
    rows = scores_by_name(worker)
    release.set()
    assert time.monotonic() - started < 5
    assert rows[0]["a"].status == "timeout"
    assert "reward.timeout_s" in str(rows[0]["a"].error)
    assert [row["a"] for row in rows[1:]] == [Score(1.0)] * 3


def test_a_scorer_that_always_hangs_is_given_up(worker_of: Callable[..., RewardWorker]) -> None:
    release = threading.Event()

    def hangs(item: ScoringItem) -> Score:
        release.wait(20)
        return Score(1.0)

    worker = worker_of(timeout_s=0.05, concurrency=1, a=hangs)
    rows = scores_by_name(worker, ITEMS * 3)
    release.set()
    assert sum("still hang" in str(row["a"].error) for row in rows) == len(rows) - MOST_ABANDONED
    assert all(row["a"].status == "timeout" for row in rows)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_score_that_is_not_finite_is_missing(worker_of: Callable[..., RewardWorker], value: float) -> None:
    (row,) = scores_by_name(worker_of(a=lambda _: Score(value)), ITEMS[:1])
    assert row["a"].value is None
    assert "not a finite number" in str(row["a"].error)


def test_a_scorers_own_timeout_is_a_failure_and_tried_again(worker_of: Callable[..., RewardWorker]) -> None:
    def slow_service(item: ScoringItem) -> Score:
        raise TimeoutError("service did not answer")

    (row,) = scores_by_name(worker_of(a=slow_service), ITEMS[:1])
    assert row["a"].attempts == 2
    assert row["a"].status == "failed"
    assert "did not answer" in str(row["a"].error)


def test_one_worker_serves_several_event_loops(worker_of: Callable[..., RewardWorker]) -> None:
    worker = worker_of(concurrency=1, a=lambda _: Score(1.0))
    assert scores_by_name(worker) == scores_by_name(worker)


def test_the_default_settings_score_text() -> None:
    worker = RewardWorker(RewardSettings())
    blank = ScoringItem("s", np.zeros((3, 32, 96), np.uint8), 'the word "AB"')
    (row,) = asyncio.run(worker.score([blank]))
    assert row["ocr"].value == 0.0
    assert asyncio.run(worker.versions())["ocr"].startswith("1+rapidocr")


def test_two_scorers_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="more than once"):
        RewardWorker(RewardSettings(scorers=[{"name": "ocr"}, {"name": "ocr"}]))


def test_weights_without_a_positive_sum_are_refused() -> None:
    with pytest.raises(ConfigError, match="positive"):
        RewardWorker(RewardSettings(scorers=[{"name": "ocr", "weight": 0}]))
