"""The page of results is what the suite recorded, and has every fault."""

from pathlib import Path

import pytest

from tests.faults import page
from tests.faults.cases import all_cases
from tests.faults.injected import planned
from tests.faults.injected.planned import Fault


def test_the_page_is_what_the_recorded_results_render_to() -> None:
    assert page.PAGE.read_text() == page.render(page.read())


def test_every_fault_on_the_page_left_the_weights_of_a_run_that_met_none() -> None:
    outcomes = page.read()
    names = [outcome.case for outcome in outcomes]
    assert names == [case for case in all_cases() if case in names]
    assert all(outcome.equal for outcome in outcomes)


@pytest.mark.full
def test_the_page_has_every_fault() -> None:
    assert [outcome.case for outcome in page.read()] == all_cases()


def test_a_new_result_takes_the_place_of_the_old_one(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(page, "RESULTS", tmp_path / "results.jsonl")
    monkeypatch.setattr(page, "PAGE", tmp_path / "faults.md")
    first, second = all_cases()[:2]
    page.record([page.Outcome(second, "went on", 4.0, 0, True), page.Outcome(first, "went on", 5.0, 1, True)])
    page.record([page.Outcome(second, "stopped", 6.25, 2, False)])
    assert [(outcome.case, outcome.packs) for outcome in page.read()] == [(first, 1), (second, 2)]
    assert "| stopped | 6.2 | 2 | **no** |" in (tmp_path / "faults.md").read_text()


def test_a_fault_strikes_once_where_its_facts_hold(tmp_path: Path, monkeypatch) -> None:
    plan = tmp_path / "plan.json"
    monkeypatch.setenv(planned.VARIABLE, str(plan))
    assert planned.due("scorer", step=1) is None  # no plan yet
    planned.write(plan, [Fault("scorer", "raise", {"step": [2, 3]}), Fault("scorer", "nan", {"step": 2})])
    assert planned.due("scorer", step=1) is None and planned.struck(plan) is None
    assert planned.due("pack", step=2) is None and planned.is_planned("scorer")
    assert [planned.due("scorer", step=2) for _ in range(3)] == ["raise", "nan", None]
    assert planned.struck(plan, 0) and planned.struck(plan, 1) and not planned.is_planned("scorer")
    planned.write(plan, [Fault("scorer", "nan")])
    assert planned.struck(plan) is None and planned.due("scorer", step=9) == "nan"
