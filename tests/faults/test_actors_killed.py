"""SIGKILL of replicas, workers and trainer ranks in the middle of their work, and of a flow in the middle of a sync."""

from collections.abc import Callable

import pytest

from tests.faults.cases import HALF_SYNC, POOLS, RANKS
from tests.faults.injected.planned import Fault
from tests.faults.page import Outcome
from tests.faults.proof import assert_nothing_lost_or_doubled
from tests.faults.size import PACKS
from tests.faults.subject import Subject

pytestmark = [pytest.mark.engine, pytest.mark.faults, pytest.mark.full, pytest.mark.timeout(1200)]

KILLED_RANKS = [case for case in RANKS if case != "rank-before-step"]
"""The other one is among the short cases."""


@pytest.fixture(scope="module")
def pools(subject_of: Callable[..., Subject], outcome_of: Callable[..., Outcome]) -> dict[str, Outcome]:
    run = subject_of("pools", rollout__replicas=2)
    half_sync = run.killed_at(
        Fault("sync.half", where={"command": "loading version 1"}),
        Fault("replica.load_weights", "hang", {"version": 1, "replica": "replica-1"}),
        Fault("reward_worker.score", where={"step": 1}),
    )
    reward_worker = run.struck(2)
    run.finish(
        Fault("replica.generate", where={"step": 2}),
        Fault("pack", where={"step": 3, "stage": "rollout", "shard": PACKS - 1}),
        Fault("replica.load_weights", where={"version": 3, "replica": "replica-1"}),
    )
    replica, rollout_worker, in_sync = (run.struck(number) for number in range(3))
    assert_nothing_lost_or_doubled(run.recorded, run.config)
    rebuilt = "the stage was done again with a new one"
    made = (
        outcome_of(run, HALF_SYNC, half_sync, "the next flow loaded the same weights into both"),
        outcome_of(
            run,
            "reward-worker-killed",
            reward_worker,
            "the packs were finished without their scores; a new one made them",
        ),
        outcome_of(run, "replica-killed", replica, "the other one drew its samples, and a new one was built"),
        outcome_of(run, "rollout-worker-killed", rollout_worker, f"{rebuilt}, for the packs that were missing"),
        outcome_of(run, "replica-killed-in-sync", in_sync, rebuilt),
    )
    return {outcome.case: outcome for outcome in made}


@pytest.fixture(scope="module")
def ranks(subject_of: Callable[..., Subject], outcome_of: Callable[..., Outcome]) -> dict[str, Outcome]:
    run = subject_of("ranks")
    run.finish(
        Fault("rank.before_vote", where={"step": 2, "rank": 1}),
        Fault("rank.after_step", where={"step": 3, "rank": 0}),
        retries=2,
    )
    struck = {case: run.struck(number) for number, case in enumerate(KILLED_RANKS)}
    assert_nothing_lost_or_doubled(run.recorded, run.config)
    happened = (
        "Prefect's retry of the flow run built all ranks anew, which repeated the committed updates and then this one"
    )
    return {case: outcome_of(run, case, at, happened) for case, at in struck.items()}


@pytest.mark.parametrize("case", [HALF_SYNC, *POOLS])
def test_the_final_weights_are_those_of_a_run_that_met_no_fault(pools: dict[str, Outcome], case: str) -> None:
    assert pools[case].equal


@pytest.mark.parametrize("case", KILLED_RANKS)
def test_no_update_is_lost_or_made_twice_where_a_rank_is_killed(ranks: dict[str, Outcome], case: str) -> None:
    assert ranks[case].equal


def test_a_stage_that_lost_an_actor_draws_no_more_than_its_own_packs_again(pools: dict[str, Outcome]) -> None:
    packs = {case: outcome.packs for case, outcome in pools.items()}
    assert packs[HALF_SYNC] == packs["replica-killed-in-sync"] == packs["reward-worker-killed"] == 0
    assert max(packs["rollout-worker-killed"], packs["replica-killed"]) <= PACKS
