"""The faults that matter most, in one run; `make test` has these."""

from collections.abc import Callable

import pytest

from tests.faults.cases import HALF_LEDGER, MID_ROLLOUT
from tests.faults.injected.planned import Fault
from tests.faults.page import Outcome
from tests.faults.proof import assert_nothing_lost_or_doubled
from tests.faults.size import PACKS
from tests.faults.subject import Subject, flip_bit

pytestmark = [pytest.mark.engine, pytest.mark.faults, pytest.mark.timeout(900)]

REATTACHED_S = 30.0
"""A bound that a loaded machine keeps; the page has what it took."""
CASES = (MID_ROLLOUT, "finished-shard-flipped", HALF_LEDGER, "rank-before-step")


@pytest.fixture(scope="module")
def outcomes(subject_of: Callable[..., Subject], outcome_of: Callable[..., Outcome]) -> dict[str, Outcome]:
    run, rollout = subject_of("short"), {"step": 2, "stage": "rollout"}
    # the last two packs never begin
    late = [Fault("pack", "hang", {**rollout, "shard": shard}) for shard in (PACKS - 2, PACKS - 1)]
    mid_rollout = run.killed_at(Fault("packs.finished", where={**rollout, "finished": PACKS - 2}), *late)
    damaged = run.killed_at(Fault("commit.ready", where=rollout))
    for path in run.shard_files(2, "rollout", "trajectories-00000.arrow"):
        flip_bit(path)
    half_ledger = run.killed_at(Fault("ledger.done", where={"update_id": "000002/0000"}))
    run.finish(Fault("rank.before_step", where={"step": 3, "rank": 1}), retries=1)
    rank = run.struck(0)
    assert_nothing_lost_or_doubled(run.recorded, run.config)
    again = "the next flow took over the finished packs and drew the others"
    made = (
        outcome_of(run, MID_ROLLOUT, mid_rollout, again),
        outcome_of(
            run, "finished-shard-flipped", damaged, "the next flow drew that pack again and took over the others"
        ),
        outcome_of(run, HALF_LEDGER, half_ledger, "the ranks answered from their record; the second one was written"),
        outcome_of(
            run,
            "rank-before-step",
            rank,
            "no rank's step counted; Prefect's retry built the ranks anew from a checkpoint",
        ),
    )
    return {outcome.case: outcome for outcome in made}


@pytest.mark.parametrize("case", CASES)
def test_the_final_weights_are_those_of_a_run_that_met_no_fault(outcomes: dict[str, Outcome], case: str) -> None:
    assert outcomes[case].equal


def test_a_flow_killed_in_mid_rollout_draws_the_unfinished_packs_alone(outcomes: dict[str, Outcome]) -> None:
    assert outcomes[MID_ROLLOUT].packs == 2


def test_a_finished_pack_with_a_flipped_bit_is_drawn_again_and_no_other(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["finished-shard-flipped"].packs == 1


def test_a_new_flow_reaches_its_first_command_soon_after_the_old_one_was_killed(outcomes: dict[str, Outcome]) -> None:
    assert max(outcomes[case].seconds for case in (MID_ROLLOUT, HALF_LEDGER)) <= REATTACHED_S
