"""Scorers that hang, raise, or return what is no number."""

from collections.abc import Callable

import pytest

from tests.faults.cases import SCORERS
from tests.faults.injected.planned import Fault
from tests.faults.page import Outcome
from tests.faults.proof import assert_nothing_lost_or_doubled
from tests.faults.subject import Subject

pytestmark = [pytest.mark.engine, pytest.mark.faults, pytest.mark.full, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def run(subject_of: Callable[..., Subject]) -> Subject:
    return subject_of("scorers", reward__timeout_s=8)


@pytest.fixture(scope="module")
def outcomes(run: Subject, outcome_of: Callable[..., Outcome]) -> dict[str, Outcome]:
    run.finish(
        Fault("scorer", "hang", {"step": 1}),
        Fault("scorer", "raise", {"step": 2}),
        Fault("scorer", "nan", {"step": 3}),
        Fault("scorer", "text", {"step": 3}),
    )
    struck = {case: run.struck(number) for number, case in enumerate(SCORERS)}
    assert_nothing_lost_or_doubled(run.recorded, run.config)
    retried, again = (
        "the worker asked it once more",
        "a missing score with its reason; the stage `reward` asked once more",
    )
    happened = {"scorer-raises": retried, "scorer-text": retried}
    return {case: outcome_of(run, case, at, happened.get(case, again)) for case, at in struck.items()}


@pytest.mark.parametrize("case", SCORERS)
def test_a_score_that_came_late_is_the_one_that_was_due(outcomes: dict[str, Outcome], case: str) -> None:
    assert outcomes[case].equal


def test_a_failed_score_is_written_down_and_never_a_number(outcomes: dict[str, Outcome], run: Subject) -> None:
    rows = [row for step in (1, 3) for row in run.recorded.table(step, "rollout", "scores").to_pylist()]
    failed = [row for row in rows if row["status"] != "ok"]
    assert sorted(row["status"] for row in failed) == ["failed", "timeout"]
    assert all(row["score"] is None and row["error"] for row in failed)
    final = [row for step in (1, 2, 3) for row in run.recorded.table(step, "reward", "rewards").to_pylist()]
    assert {row["status"] for row in final} == {"ok"} and max(row["attempts"] for row in final) == 2
