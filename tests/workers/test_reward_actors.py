"""Reward workers as real Ray actors."""

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
import ray

from verl_omni_core.rewards._contract import Score, ScoringItem
from verl_omni_core.rewards._pool import ScorerPool
from verl_omni_core.settings.reward import RewardSettings
from verl_omni_core.workers.reward_worker import RewardWorker

SETTINGS = RewardSettings(scorers=[{"name": "jpeg_size"}], timeout_s=20)
ITEMS = [
    ScoringItem(f"s{i}", np.random.default_rng(i).integers(0, 256, (3, 16, 16), dtype=np.uint8), "p") for i in range(24)
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, object_store_memory=100 * 2**20, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def start(name: str) -> ray.actor.ActorHandle:
    # detached, as the product's are: their life is not tied to a count of handles
    return ray.remote(RewardWorker).options(num_cpus=0, name=name, lifetime="detached").remote(SETTINGS)


def scores(workers: list[ray.actor.ActorHandle]) -> list[Score]:
    pool = ScorerPool(workers, ["jpeg_size"], timeout_s=20)
    rows = asyncio.run(asyncio.wait_for(pool.score_all(ITEMS), 60))
    return [row["jpeg_size"] for row in rows]


def test_two_actors_score_like_one_object_and_a_dead_one_is_replaced_by_the_other(cluster: None) -> None:
    expected = [row["jpeg_size"] for row in asyncio.run(RewardWorker(SETTINGS).score(ITEMS))]
    first, second = start("first"), start("second")
    assert scores([first, second]) == expected
    ray.kill(first)
    assert scores([first, second]) == expected
    assert ray.get(second.ping.remote(), timeout=20) > len(ITEMS)
