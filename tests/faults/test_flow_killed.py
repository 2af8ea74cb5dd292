"""SIGKILL of the flow's process at every boundary of a step, and inside each of its stages; one run takes them all."""

import statistics
from collections.abc import Callable

import pytest

from tests.faults.cases import FLOW, STAGES
from tests.faults.injected.planned import Fault
from tests.faults.page import Outcome
from tests.faults.proof import assert_nothing_lost_or_doubled
from tests.faults.subject import Subject

pytestmark = [pytest.mark.engine, pytest.mark.faults, pytest.mark.full, pytest.mark.timeout(1800)]

REATTACHED_S = 10.0
LONGEST_S = 30.0
"""Of a single start on a machine that does other things as well."""


@pytest.fixture(scope="module")
def run(subject_of: Callable[..., Subject]) -> Subject:
    return subject_of("flow")


@pytest.fixture(scope="module")
def outcomes(run: Subject, outcome_of: Callable[..., Outcome]) -> dict[str, Outcome]:
    struck = {}
    for stage in STAGES:
        if stage == "update":
            struck["flow-update-sent"] = run.killed_at(Fault("update.sent"))
            struck["flow-update-answered"] = run.killed_at(Fault("update.answered", where={"step": 2}))
        at = {"step": 1 if stage == "checkpoint" else 2, "stage": stage}
        struck[f"flow-inside-{stage}"] = run.killed_at(Fault("commit.ready", where=at))
        struck[f"flow-after-{stage}"] = run.killed_at(Fault("commit.done", where=at))
    run.finish()
    assert_nothing_lost_or_doubled(run.recorded, run.config)
    return {
        case: outcome_of(run, case, at, f"the next flow found the actors and went on at `{run.next_stage(at)}`")
        for case, at in struck.items()
    }


@pytest.mark.parametrize("case", FLOW)
def test_the_final_weights_are_those_of_a_run_that_met_no_fault(outcomes: dict[str, Outcome], case: str) -> None:
    assert outcomes[case].equal


@pytest.mark.parametrize("case", FLOW)
def test_no_pack_that_was_finished_is_drawn_again(outcomes: dict[str, Outcome], case: str) -> None:
    assert outcomes[case].packs == 0


def test_the_engines_own_count_is_the_number_of_samples_that_are_committed(
    outcomes: dict[str, Outcome], run: Subject
) -> None:
    (replica,) = run.folder_of_run().engines()["replicas"]
    assert replica["requests"] == run.recorded.samples_drawn()


def test_a_new_flow_reaches_its_first_command_within_ten_seconds(outcomes: dict[str, Outcome]) -> None:
    seconds = [outcome.seconds for outcome in outcomes.values()]
    assert statistics.median(seconds) <= REATTACHED_S and max(seconds) <= LONGEST_S, sorted(seconds)
