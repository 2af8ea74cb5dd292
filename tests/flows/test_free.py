"""Without deterministic mode: what still agrees, and other ways through the chain."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.flows import small
from tests.flows.conftest import Ran
from verl_omni_core.train import train

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

FREE = {"run__steps": 2, "run__deterministic": "false", "run__images_every": 0, "run__validate_before": "false"}


@pytest.fixture(scope="module")
def batched(store: Path) -> Iterator[Ran]:
    """One replica with batches of 8; old log-probs recomputed, a divergence from the reference in the loss."""
    settings = small.settings(
        "batched", store, **FREE, algorithm__recompute_old_log_probs="true", algorithm__kl_coef=0.01
    )
    ran = Ran(settings, "")
    try:
        ran.summary = train(settings)
        ran.end()
        yield ran
    finally:
        ran.end()


@pytest.fixture(scope="module")
def single(store: Path) -> Iterator[Ran]:
    """Two replicas that draw one sample at a time; all parameters train, and every sync is probed."""
    settings = small.settings(
        "single",
        store,
        **FREE,
        rollout__replicas=2,
        rollout__max_batch=1,
        model__lora__rank=0,
        training__learning_rate=1e-5,
        weights__probe="true",
    )
    ran = Ran(settings, "")
    try:
        ran.summary = train(settings)
        ran.end()
        yield ran
    finally:
        ran.end()


def test_all_seeds_of_a_step_are_distinct_and_equal_between_runs(batched: Ran, single: Ran) -> None:
    for step in (1, 2):
        seeds = batched.recorded.seeds(step)
        assert len(set(seeds)) == len(seeds) == small.SAMPLES
        assert seeds == single.recorded.seeds(step)


def test_first_latents_agree_to_1e_5_for_1_and_2_replicas_and_batch_limits_8_and_1(batched: Ran, single: Ran) -> None:
    one, other = batched.recorded.latents(1), single.recorded.latents(1)
    assert (one - other).abs().max() <= 1e-5
    limits = [engine["max_batch"] for engine in single.recorded.manifest(1, "rollout").producer["engines"]]
    assert limits == [1, 1]


def test_recomputed_log_probs_give_a_ratio_of_1_and_agree_with_the_engines(batched: Ran) -> None:
    for step in (1, 2):
        metrics = batched.recorded.metrics(step)
        assert metrics["actor/first_ratio_deviation"] <= 1e-5
        old = np.stack(batched.recorded.table(step, "old_log_probs", "logprobs")["old_log_probs"].to_pylist())
        drawn = batched.recorded.table(step, "rollout", "trajectories")["rollout_log_probs"].to_pylist()
        assert abs(old - np.stack(drawn)).max() <= 1e-5


def test_divergence_from_the_reference_starts_at_0_and_grows(batched: Ran) -> None:
    first, second = (batched.recorded.metrics(step)["actor/kl_loss"] for step in (1, 2))
    assert abs(first) <= 1e-9 < second
    assert batched.recorded.ref(2, "reference").rows == small.SAMPLES


def test_full_fine_tuning_reaches_the_replicas(single: Ran) -> None:
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
