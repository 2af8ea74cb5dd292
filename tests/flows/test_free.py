"""Without deterministic mode: what still agrees, and other ways through the chain."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import ray
import torch

from tests.flows import small
from tests.flows.conftest import Ran
from verl_omni_core.agent_loop.sampling import sampling_from_json
from verl_omni_core.online import train
from verl_omni_core.rollout._contract import SampleRequest
from verl_omni_core.workers.router import ReplicaRouter

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

FREE = {
    "run__steps": 2,
    "run__deterministic": "false",
    "run__images_every": 0,
    "run__validate_before": "false",
    "rollout__replicas": 2,
    "weights__probe": "true",
}
LIMIT_S = 120


@dataclass
class Free(Ran):
    """A run of two replicas, and what its living engines said and drew afterwards."""

    batches: list[dict[int, int]] = field(default_factory=list)
    """Of each replica: size of a batch to how many there were in the run."""
    alone: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """Latents of the first step, drawn again by one replica."""


def _free(settings) -> Iterator[Free]:
    ran = Free(settings, "")
    try:
        ran.summary = train(settings)
        replicas = ran.actors().replicas
        told = ray.get([replica.statistics.remote() for replica in replicas], timeout=LIMIT_S)
        ran.batches = [replica["batches"] for replica in told]
        ran.alone = _first_latents(ran, replicas[0])
        ran.end()
        yield ran
    finally:
        ran.end()


def _first_latents(ran: Ran, replica) -> torch.Tensor:
    """Draw the samples of the first step again, with its weights, on one replica."""
    run = ran.recorded
    folder = run.store.path_of(run.ref(0, "sync"), run.manifest(0, "sync").files[0].name).parent
    ray.get(replica.load_weights.remote(str(folder), 0), timeout=LIMIT_S)
    prompts = {row["uid"]: row for row in run.table(1, "plan", "prompts").to_pylist()}
    requests = [
        SampleRequest(
            row["sample_id"],
            prompts[row["uid"]]["prompt"],
            prompts[row["uid"]].get("negative_prompt"),
            row["seed"],
            sampling_from_json(row["sampling_json"]),
        )
        for row in run.table(1, "plan", "requests").to_pylist()
    ]
    router = ReplicaRouter([replica])

    async def draw() -> list:
        return await asyncio.wait_for(asyncio.gather(*map(router.generate, requests)), LIMIT_S)

    return torch.stack([output.extra_fields["all_latents"] for output in asyncio.run(draw())])


@pytest.fixture(scope="module")
def batched(store: Path) -> Iterator[Free]:
    """Batches of 8; old log-probs recomputed, a divergence from the reference in the loss."""
    yield from _free(
        small.settings("batched", store, **FREE, algorithm__recompute_old_log_probs="true", algorithm__kl_coef=0.01)
    )


@pytest.fixture(scope="module")
def single(store: Path) -> Iterator[Free]:
    """One sample at a time; all parameters train."""
    yield from _free(
        small.settings("single", store, **FREE, rollout__max_batch=1, model__lora__rank=0, training__learning_rate=1e-5)
    )


def test_all_seeds_of_a_step_are_distinct_and_equal_between_runs(batched: Free, single: Free) -> None:
    for step in (1, 2):
        seeds = batched.recorded.seeds(step)
        assert len(set(seeds)) == len(seeds) == small.SAMPLES
        assert seeds == single.recorded.seeds(step)


def test_first_latents_agree_to_1e_5_for_1_and_2_replicas_and_batch_limits_8_and_1(batched: Free, single: Free) -> None:
    drawn = [batched.recorded.latents(1), batched.alone, single.recorded.latents(1), single.alone]
    for latents in drawn[1:]:
        assert latents.shape == drawn[0].shape and latents.shape[0] == small.SAMPLES
        assert (latents - drawn[0]).abs().max() <= 1e-5
    for run, limit in ((batched, 8), (single, 1)):
        engines = run.recorded.manifest(1, "rollout").producer["engines"]
        assert [engine["max_batch"] for engine in engines] == [limit, limit]
        replicas = set(run.recorded.table(1, "rollout", "trajectories")["replica"].to_pylist())
        assert replicas == {"replica-0", "replica-1"}
        assert [max(batches) for batches in run.batches] == [limit, limit]


@pytest.mark.parametrize("name", ["batched", "single"])
def test_after_each_sync_a_sample_of_every_replica_equals_the_trainers_own_to_1e_4(
    name: str, request: pytest.FixtureRequest
) -> None:
    run = request.getfixturevalue(name).recorded
    for step in (0, 1, 2):
        probe = run.manifest(step, "probe")
        assert probe.parents == (run.ref(step, "sync"),) and probe.row_count == 2
        assert 0 <= probe.producer["largest_difference"] <= 1e-4
    modules = run.manifest(2, "sync").producer["bound_modules"]
    tensors = run.weights(2)
    assert modules == (len(tensors) if name == "single" else sum("lora_A" in tensor for tensor in tensors)) > 0


def test_recomputed_log_probs_give_a_ratio_of_1_and_agree_with_the_engines(batched: Free) -> None:
    for step in (1, 2):
        metrics = batched.recorded.metrics(step)
        assert metrics["actor/first_ratio_deviation"] <= 1e-5
        old = np.stack(batched.recorded.table(step, "old_log_probs", "logprobs")["old_log_probs"].to_pylist())
        drawn = batched.recorded.table(step, "rollout", "trajectories")["rollout_log_probs"].to_pylist()
        assert abs(old - np.stack(drawn)).max() <= 1e-5


def test_divergence_from_the_reference_starts_at_0_and_grows(batched: Free) -> None:
    first, second = (batched.recorded.metrics(step)["actor/kl_loss"] for step in (1, 2))
    assert abs(first) <= 1e-9 < second
    assert batched.recorded.ref(2, "reference").rows == small.SAMPLES


def test_full_fine_tuning_reaches_the_replicas(single: Free) -> None:
    run = single.recorded
    assert run.manifest(2, "sync").producer["kind"] == "full"
    moved = small.gap(run.weights(2), run.weights(0))
    assert 0 < moved < 1e-3
    for step in (1, 2):
        assert run.metrics(step)["actor/first_ratio_deviation"] <= 1e-5
    versions = run.table(2, "rollout", "trajectories")["max_version"].to_pylist()
    assert set(versions) == {1}


def test_two_ranks_train_as_one(flow: Ran, store: Path) -> None:
    settings = small.settings("ranks", store, run__steps=2, training__ranks=2, run__images_every=0)
    ran = Ran(settings, "")
    try:
        train(settings)
    finally:
        ran.end()
    one, two = flow.recorded, ran.recorded
    assert np.array_equal(one.rewards(1), two.rewards(1))
    assert one.latents(1).equal(two.latents(1))
    # AdamW's first move is the sign of the gradient: where that is near 0, rounding decides single elements
    moved = small.distance(one.weights(1), one.weights(0))
    assert small.distance(one.weights(1), two.weights(1)) <= 1e-3 * moved
    for step in (1, 2):
        assert two.metrics(step)["actor/first_ratio_deviation"] <= 1e-5
