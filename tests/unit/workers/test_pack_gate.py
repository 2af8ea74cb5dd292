"""Samples of a pack enter the engine together and in order, whatever order they come in."""

import asyncio
import random

from verl_omni_core.rollout._contract import PackPosition, SampleRequest, SamplingParams
from verl_omni_core.rollout._drawing import plan_batches
from verl_omni_core.workers.pack_gate import PackGate

SAMPLING = SamplingParams(32, 32, 4, "flow_sde", {}, "uniform", 0.7, (0, 2), 1.0, 16)
SIZE = 8


def request(pack: str, index: int, count: int = SIZE) -> SampleRequest:
    return SampleRequest(f"{pack}{index}", "a", None, index, SAMPLING, PackPosition(index, SIZE, pack, count))


def entered(requests: list[SampleRequest], *, gap_s: float = 0.05, limit_s: float = 10) -> list[SampleRequest]:
    """Send requests to a gate, a moment apart, and return them as they came out of it."""
    order: list[SampleRequest] = []

    async def one(gate: PackGate, each: SampleRequest) -> None:
        await gate.enter(each)
        order.append(each)

    async def main() -> None:
        gate, calls = PackGate(gap_s), []
        for each in requests:
            calls.append(asyncio.create_task(one(gate, each)))
            await asyncio.sleep(0)
        await asyncio.wait_for(asyncio.gather(*calls), limit_s)

    asyncio.run(main())
    return order


def test_packs_that_arrive_mixed_cost_no_batch_more_than_packs_that_arrive_in_order() -> None:
    requests = [request(pack, index) for pack in "abc" for index in range(SIZE)]
    mixed = random.Random(5).sample(requests, len(requests))
    came_out = entered(mixed)
    assert [each.pack.index for each in came_out if each.pack] == [*range(SIZE)] * 3
    # the engine takes what waits, however many that are
    for first in range(len(came_out) - SIZE + 1):
        assert len(plan_batches(came_out[first : first + SIZE], SIZE)) == 1
    assert max(len(plan_batches(mixed[first : first + SIZE], SIZE)) for first in range(len(mixed) - SIZE + 1)) > 1


def test_a_pack_that_lacks_a_sample_enters_without_it() -> None:
    requests = [request("a", index) for index in (3, 1, 0)]
    assert [each.request_id for each in entered(requests)] == ["a0", "a1", "a3"]


def test_the_last_pack_needs_only_the_samples_it_has() -> None:
    requests = [request("a", index, count=3) for index in (2, 0, 1)]
    assert len(entered(requests, gap_s=60, limit_s=5)) == 3


def test_requests_outside_named_packs_enter_at_once() -> None:
    free = SampleRequest("free", "a", None, 0, SAMPLING)
    unnamed = SampleRequest("unnamed", "a", None, 0, SAMPLING, PackPosition(0, SIZE))
    assert [each.request_id for each in entered([free, unnamed], gap_s=60, limit_s=5)] == ["free", "unnamed"]


def test_a_caller_that_gave_up_holds_nobody_back() -> None:
    async def main() -> str:
        gate = PackGate(0.05)
        lost = asyncio.create_task(gate.enter(request("a", 0, count=2)))
        await asyncio.sleep(0)
        lost.cancel()
        await asyncio.wait_for(gate.enter(request("a", 1, count=2)), 5)
        return "entered"

    assert asyncio.run(main()) == "entered"
