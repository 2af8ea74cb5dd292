"""Samples that cannot be drawn or scored, by policy: what is drawn instead, what is left out, and what is learned from.

Drawing, scoring and advantages are the real ones; the engine draws everything from the seed.
"""

import asyncio
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.agent_loop.fake_client import Client, config
from tests.unit.stages.test_drawing import Pool
from tests.workers.test_rollout_worker import GROUP, PROMPTS, planned
from verl_omni_core import identity
from verl_omni_core.batches.tables import read_tensor
from verl_omni_core.errors import ContractError, EngineError, NumericError, StageLost, VerlOmniError
from verl_omni_core.rewards._contract import Score, ScoringItem
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages.advantage import advantage
from verl_omni_core.stages.drawing import Drawn, draw
from verl_omni_core.stages.incomplete_groups import POLICY, reasons
from verl_omni_core.stages.metric_table import metrics_of
from verl_omni_core.stages.reward import reward
from verl_omni_core.stages.session import RunRef, Session, let_go, register
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.attempt import Attempt
from verl_omni_core.store.manifest import ArtifactRef
from verl_omni_core.workers.rollout_worker import RolloutWorker

COUNT = PROMPTS * GROUP
SEEDS = [identity.sample_seed(1, 1, i) for i in range(COUNT)]
PREFIX = "training/rollout_failure/"


def settings(failure: str, **groups: dict[str, Any]) -> RunConfig:
    rollout = {"max_attempts": 2, "pack_size": 4, "failure": failure, "max_failed_fraction": 1.0}
    values: dict[str, dict[str, Any]] = {
        "run": {"seed": 1},
        "rollout": rollout | groups.pop("rollout", {}),
        "reward": {"streaming": False, "max_invalid_fraction": 1.0} | groups.pop("reward", {}),
    }
    return config(**values, **groups)


class Workers(Pool):
    """A rollout worker and a scorer in this process."""

    def __init__(self, asked: RunConfig, client: Client, scores: Callable[[str], float | None] | None = None) -> None:
        super().__init__(client)
        self.worker, self.scores = RolloutWorker(asked, client), scores

    def scorer_versions(self) -> dict[str, str]:
        return {"ocr": "1"}

    def score(self, items: Sequence[ScoringItem]) -> list[dict[str, Score]]:
        assert self.scores is not None
        values = [self.scores(item.sample_id) for item in items]
        return [{"ocr": Score(value, None if value is not None else "unreadable")} for value in values]


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    (tmp_path / "run").mkdir()
    return RunStore(tmp_path / "run")


def failing(*indices: int, error: Exception | None = None, also: Sequence[int] = ()) -> Client:
    """A client that never draws the planned seeds of some samples, nor further ``also`` seeds."""
    bad = {SEEDS[i] for i in indices} | set(also)
    return Client(fail=lambda request: (error or ValueError("not drawable")) if request.seed in bad else None)


def drawn(store: RunStore, client: Client, asked: RunConfig, *, validate: bool = False) -> tuple[Attempt, Drawn]:
    session = SimpleNamespace(config=asked, store=store, actors=Workers(asked, client))
    attempt = store.attempt(1, "rollout", "key")
    return attempt, draw(session, attempt, *planned(), version=0, validate=validate)  # type: ignore[arg-type]


def committed(store: RunStore, client: Client, asked: RunConfig) -> ArtifactRef:
    attempt, done = drawn(store, client, asked)
    facts = {POLICY: asked.rollout.failure} if done.failed else {}
    return attempt.commit(done.files, rows=COUNT, parents=[], producer=facts, failed=done.failed)


@pytest.mark.parametrize("failure", ["drop", "zero_weight"])
def test_the_others_of_a_pack_stay_and_each_failed_sample_is_a_row_with_its_reason(store, failure):
    ref = committed(store, failing(6, 9), settings(failure))
    assert store.table(ref, "trajectories")["sample_index"].to_pylist() == [i for i in range(COUNT) if i not in (6, 9)]
    rows = store.table(ref, "trajectories_failed").to_pylist()
    assert [(r["sample_index"], r["status"], r["error_class"], r["error_message"], r["attempts"]) for r in rows] == [
        (6, "failed", "ValueError", "not drawable", 1),
        (9, "failed", "ValueError", "not drawable", 1),
    ]
    assert store.manifest(ref).failed_count == 2


@pytest.mark.parametrize("failure", ["drop", "zero_weight", "refill"])
def test_what_may_pass_is_tried_as_often_as_without_a_policy(store, failure):
    client = failing(6, error=EngineError("tired"))
    drawn(store, client, settings(failure))
    tried = [request.seed for request in client.requests].count(SEEDS[6])
    assert tried == 4  # two attempts at the sample in each of two at its pack


@pytest.mark.parametrize("failure", ["drop", "zero_weight", "refill"])
@pytest.mark.parametrize("error", [ContractError("another version"), StageLost("replica 0 is dead")])
def test_what_other_samples_would_meet_as_well_fails_the_stage_whatever_the_policy(store, failure, error):
    with pytest.raises(type(error), match="of 3 packs of rollout failed once"):
        drawn(store, failing(6, error=error), settings(failure))


def test_a_dead_replica_is_told_before_a_sample_that_cannot_be_drawn(store):
    errors = {SEEDS[4]: ValueError("no"), SEEDS[6]: StageLost("dead")}
    with pytest.raises(StageLost):
        drawn(store, Client(fail=lambda request: errors.get(request.seed)), settings("drop"))


@pytest.mark.parametrize("failure", ["drop", "zero_weight", "refill"])
def test_held_out_samples_have_no_policy(store, failure):
    with pytest.raises(VerlOmniError, match="1 of 3 packs of rollout failed once"):
        drawn(store, failing(6), settings(failure), validate=True)


def test_more_failures_than_allowed_fail_the_step(store):
    asked = settings("drop", rollout={"max_failed_fraction": 0.2})
    assert drawn(store, failing(0, 1), asked)[1].failed == 2
    with pytest.raises(VerlOmniError, match=r"3 of 12 samples could not be drawn, rollout\.max_failed_fraction allows"):
        drawn(store, failing(0, 1, 2), asked)


def test_a_step_of_which_nothing_could_be_drawn_fails(store):
    with pytest.raises(VerlOmniError, match=r"12 of 12 samples could not be drawn.*at least one.*not drawable"):
        drawn(store, failing(*range(COUNT)), settings("zero_weight"))


def test_embeddings_of_a_prompt_are_there_although_the_pack_that_owns_them_lost_all_its_samples_of_it(store):
    ref = committed(store, failing(4, 5), settings("zero_weight", rollout={"pack_size": 6}))
    assert set(store.table(ref, "trajectories")["prompt_key"].to_pylist()) <= set(
        store.table(ref, "embeddings")["prompt_key"].to_pylist()
    )


# other seeds


def test_a_refilled_sample_has_a_seed_of_its_place_and_the_others_are_what_they_were(store, tmp_path):
    client = failing(6)
    ref = committed(store, client, settings("refill"))
    table = store.table(ref, "trajectories")
    assert table["sample_index"].to_pylist() == list(range(COUNT)) and set(table["status"].to_pylist()) == {"ok"}
    fresh = identity.refill_seed(1, 1, 6, 1)
    assert table["seed"].to_pylist() == [fresh if i == 6 else seed for i, seed in enumerate(SEEDS)]
    (tmp_path / "whole").mkdir()
    whole = RunStore(tmp_path / "whole")
    undisturbed = committed(whole, Client(), settings("refill"))
    here, there = (
        read_tensor(s.table(r, "trajectories"), "all_latents") for s, r in ((store, ref), (whole, undisturbed))
    )
    same = [bool(torch.equal(a, b)) for a, b in zip(here, there, strict=True)]
    assert same == [i != 6 for i in range(COUNT)]
    (row,) = store.table(ref, "trajectories_failed").to_pylist()
    assert (row["sample_index"], row["seed"], row["error_class"]) == (6, SEEDS[6], "ValueError")
    assert store.manifest(ref).failed_count == 0


def test_refills_end_and_then_the_stage_fails(store):
    client = failing(6, also=[identity.refill_seed(1, 1, 6, n) for n in (1, 2, 3)])
    with pytest.raises(VerlOmniError, match="failed 4 times"):
        drawn(store, client, settings("refill"))
    later = failing(6, also=[identity.refill_seed(1, 1, 6, n) for n in (1, 2)])
    _, done = drawn(store, later, settings("refill"))
    assert (done.failed, done.refilled, done.refill_rounds) == (0, {"u1"}, 3)


def test_a_refilled_pack_is_taken_over_with_what_became_of_its_seeds(store):
    first, _ = drawn(store, failing(6), settings("refill"))
    again = Client()
    ref = committed(store, again, settings("refill"))
    assert again.requests == [] and store.manifest(ref).attempt_id != first.name
    assert store.table(ref, "trajectories_failed")["sample_index"].to_pylist() == [6]
    _, done = drawn(store, Client(), settings("refill"))
    assert (done.refilled, done.refill_rounds) == ({"u1"}, 1)


@given(st.integers(0, 2**63 - 1), st.integers(1, 10**6), st.integers(0, 10**6), st.integers(1, 9))
def test_refill_seeds_follow_from_seed_step_place_and_round_and_are_not_the_planned_ones(seed, step, index, refill):
    fresh = identity.refill_seed(seed, step, index, refill)
    assert fresh == identity.refill_seed(seed, step, index, refill) and 0 <= fresh < 2**63
    others = [(seed, step, index, refill + 1), (seed, step + 1, index, refill), (seed, step, index + 1, refill)]
    assert fresh not in {identity.refill_seed(*other) for other in others} | {identity.sample_seed(seed, step, index)}


# rewards, advantages


@pytest.fixture
def learned(store: RunStore):
    """Run reward and advantage on a rollout; return both tables and the step's failure metrics."""

    def run(
        asked: RunConfig, client: Client, scores: Callable[[int], float | None]
    ) -> tuple[dict[int, dict[str, Any]], dict[int, dict[str, Any]], dict[str, float]]:
        prompts, requests = planned()
        ids = requests["sample_id"].to_pylist()
        workers = Workers(asked, client, lambda sample_id: scores(ids.index(sample_id)))
        session = register(Session(RunRef(store.root, 0), asked, store, workers))  # type: ignore[arg-type]
        attempt = store.attempt(1, "plan", "key")
        plan = attempt.commit([attempt.write_table("prompts", 0, prompts)], rows=PROMPTS, parents=[], producer={})
        try:
            samples = committed(store, client, asked)
            rewards = reward(session.ref, 1, plan, samples)
            advantages = advantage(session.ref, 1, rewards)
        finally:
            let_go(store.root)
        by_index = [
            {row["sample_index"]: row for row in store.table(ref, name).to_pylist()}
            for ref, name in ((rewards, "reward_summary"), (advantages, "advantages"))
        ]
        return *by_index, metrics_of(store.table(rewards, "metrics"))  # type: ignore[return-value]

    return run


def place(index: int) -> float:
    """Rewards 0, 1, 2, 3 in each group."""
    return float(index % GROUP)


def test_zero_weight_compares_the_samples_of_a_group_that_are_left(learned):
    asked = settings("zero_weight", algorithm={"name": "flow_grpo", "normalize_std": False})
    summary, advantages, metrics = learned(asked, failing(4, 5), place)
    assert sorted(summary) == [0, 1, 2, 3, *range(6, 12)] and all(row["valid"] for row in summary.values())
    # of the group 0 1 2 3 are left 2 and 3, whose mean is 2.5
    assert [advantages[i]["advantage"] for i in (6, 7)] == [-0.5, 0.5]
    assert [advantages[i]["advantage"] for i in range(4)] == [-1.5, -0.5, 0.5, 1.5]
    assert metrics == {PREFIX + "evicted_groups": 0, PREFIX + "evicted_trajectories": 2}


def test_a_sample_that_is_left_alone_in_its_group_is_left_out(learned):
    summary, advantages, metrics = learned(settings("zero_weight"), failing(4, 5, 6), place)
    assert (summary[7]["valid"], summary[7]["status"]) == (False, "dropped") and "need 2" in summary[7]["reason"]
    assert (advantages[7]["valid"], advantages[7]["advantage"]) == (False, 0.0)
    assert metrics == {PREFIX + "evicted_groups": 1, PREFIX + "evicted_trajectories": 4}


def test_drop_leaves_the_whole_group_out_of_statistics_and_loss(learned):
    asked = settings("drop", algorithm={"name": "flow_grpo"})
    summary, advantages, metrics = learned(asked, failing(6), lambda i: 100.0 if i in (4, 5, 7) else place(i))
    assert {i for i, row in summary.items() if not row["valid"]} == {4, 5, 7}
    assert {summary[i]["status"] for i in (4, 5, 7)} == {"dropped"}
    assert "1 of 4 samples of the group could not be drawn; u1-g002: ValueError: not drawable" in summary[4]["reason"]
    assert [summary[i]["rm_score"] for i in (4, 5, 7)] == [100.0] * 3  # what they scored stays on record
    assert {advantages[i]["advantage"] for i in (4, 5, 7)} == {0.0}
    spread = np.std([place(i) for i in (0, 1, 2, 3, 8, 9, 10, 11)], ddof=1)
    assert advantages[0]["advantage"] == pytest.approx(-1.5 / (spread + 1e-4), rel=1e-6)
    assert metrics == {PREFIX + "evicted_groups": 1, PREFIX + "evicted_trajectories": 4}


def test_a_group_without_any_sample_is_counted(learned):
    summary, _, metrics = learned(settings("drop"), failing(4, 5, 6, 7), place)
    assert sorted(summary) == [0, 1, 2, 3, *range(8, 12)] and all(row["valid"] for row in summary.values())
    assert metrics == {PREFIX + "evicted_groups": 1, PREFIX + "evicted_trajectories": 4}


@pytest.mark.parametrize(("failure", "left"), [("mask", [4, 5, 7]), ("drop", [])])
def test_a_missing_score_masks_its_sample_or_drops_its_group(learned, failure, left):
    asked = settings("fail", reward={"failure": failure})
    summary, advantages, metrics = learned(asked, Client(), lambda i: None if i == 6 else place(i))
    assert [i for i in (4, 5, 6, 7) if summary[i]["valid"]] == left
    assert summary[6]["status"] == {"mask": "unscored", "drop": "dropped"}[failure]
    assert [advantages[i]["valid"] for i in range(COUNT)] == [summary[i]["valid"] for i in range(COUNT)]
    dropped = 4 if failure == "drop" else 0
    assert metrics == {PREFIX + "evicted_groups": dropped // 4, PREFIX + "evicted_trajectories": dropped}


@pytest.mark.parametrize("failure", ["drop", "zero_weight"])
def test_a_step_without_any_sample_to_train_on_says_so_and_commits_no_reward(learned, store, failure):
    with pytest.raises(NumericError, match="none of the 3 samples of the step can be trained on; the first reason"):
        learned(settings(failure), failing(*(i for i in range(COUNT) if i % GROUP)), place)
    assert store.find(1, "reward") is None


def test_a_step_without_any_score_says_so(learned):
    with pytest.raises(NumericError, match="none of the 12 samples .* no sample has a score"):
        learned(settings("fail"), Client(), lambda i: None)


def test_a_control_run_permutes_no_reward_into_a_group_that_is_left_out(learned):
    asked = settings("drop", reward={"shuffle": True}, algorithm={"name": "flow_grpo"})
    _, advantages, _ = learned(asked, failing(6), float)
    assert [i for i, row in advantages.items() if not row["valid"]] == [4, 5, 7]
    kept = [i for i in range(COUNT) if i not in (4, 5, 6, 7)]
    assert sorted(advantages[i]["score"] for i in kept) == [float(i) for i in kept]


rows = st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), min_size=1, max_size=12)


@given(
    rows,
    st.dictionaries(st.sampled_from("abcd"), st.integers(1, 3)),
    st.sampled_from(["drop", "zero_weight"]),
    st.sampled_from(["mask", "drop"]),
)
def test_a_group_counts_if_and_only_if_its_policies_let_it(samples, lost, rollout, reward_policy):
    uids, scored = [uid for uid, _ in samples], [has for _, has in samples]
    told = {uid: [f"{uid}: error"] * count for uid, count in lost.items()}
    found = reasons(uids, scored, told, rollout=rollout, reward=reward_policy, least=2)
    for uid in set(uids):
        own = [has for name, has in samples if name == uid]
        counts = not (uid in lost and (rollout == "drop" or sum(own) < 2)) and not (
            reward_policy == "drop" and not all(own)
        )
        assert (uid not in found) == counts
    assert set(found) <= set(uids)


def test_failed_packs_travel(store):
    asked = settings("refill")
    worker = RolloutWorker(asked, failing(6))
    from verl_omni_core.workers.rollout_worker import packs_of

    attempt = store.attempt(1, "rollout", "key")
    pack = packs_of(*planned(), attempt, pack_size=12, weights_version=0, score=False)[0]
    result = pickle.loads(pickle.dumps(asyncio.run(worker.run_pack(pack))))
    assert result.failures["sample_index"].to_pylist() == [6] and result.failed == 1


def test_metrics_of_a_step_in_which_nothing_failed_are_zero(learned):
    *_, metrics = learned(settings("drop"), Client(), place)
    assert set(metrics.values()) == {0.0} and len(metrics) == 2
