"""What a wait for several actors ends with."""

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from verl_omni_core.errors import ContractError, DeadlineError, StageLost
from verl_omni_core.workers.waiting import wait_all


class Actor:
    async def sleep(self, seconds: float) -> float:
        import asyncio

        await asyncio.sleep(seconds)
        return seconds

    async def refuse(self) -> None:
        raise ContractError("no")

    async def die(self) -> None:
        os._exit(1)


@pytest.fixture(scope="module")
def actor() -> Iterator[Any]:
    ray.init(address="local", num_cpus=2, object_store_memory=100 * 2**20, include_dashboard=False, log_to_driver=False)
    made = _new()
    ray.get(made.sleep.remote(0), timeout=60)
    yield made
    ray.shutdown()


def _new() -> Any:
    return ray.remote(Actor).options(num_cpus=0).remote()


def test_independent_calls_are_all_waited_for_and_the_first_own_error_raised(actor: Any) -> None:
    slow = actor.sleep.remote(2)
    with pytest.raises(ContractError, match="no"):
        wait_all([actor.refuse.remote(), slow], 30, "drawing")
    assert ray.wait([slow], timeout=0)[0] == [slow]


def test_calls_that_wait_for_each_other_are_given_up_after_the_grace(actor: Any) -> None:
    started = time.monotonic()
    with pytest.raises(StageLost, match="1 of 2 actors did not answer within 1 s .*no"):
        wait_all([actor.refuse.remote(), actor.sleep.remote(30)], 30, "update", grace_s=1)
    assert time.monotonic() - started < 10


def test_a_dead_actor_is_a_lost_stage_whatever_the_others_say(actor: Any) -> None:
    with pytest.raises(StageLost, match="actor 1 of 2 died"):
        wait_all([actor.refuse.remote(), _new().die.remote()], 30, "drawing")


def test_progress_prolongs_a_wait_and_a_standstill_ends_it_with_the_counts(actor: Any) -> None:
    counts = iter(range(100))
    moving = wait_all([actor.sleep.remote(4)], 1, "drawing", progress=lambda: {"requests": next(counts)})
    assert moving == [4]
    with pytest.raises(DeadlineError, match="drawing stood still for 1 s, after 7 requests, after 0 scores"):
        wait_all([actor.sleep.remote(30)], 1, "drawing", progress=lambda: {"requests": 7, "scores": 0})
    with pytest.raises(DeadlineError, match="loading took longer than 1 s"):
        wait_all([actor.sleep.remote(30)], 1, "loading")


def test_answers_stand_in_the_order_of_the_calls(actor: Any) -> None:
    assert wait_all([actor.sleep.remote(0.3), actor.sleep.remote(0.1)], 30, "x") == [0.3, 0.1]
