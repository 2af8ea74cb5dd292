"""What the engine binding believes about its weights when a load fails; the engine behind it is played."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from verl_omni_core.errors import ContractError, DeadlineError, EngineError
from verl_omni_core.rollout._contract import EngineOptions, SampleRequest, SamplingParams, WeightUpdate
from verl_omni_core.rollout.vllm_omni.engine import VLLMOmniEngine
from verl_omni_core.weights.checksum import checksum

OPTIONS = EngineOptions("sd3", "nowhere", "float32", 4, 0.0, 1, 1, 4, False, 60.0, 0.3)
REQUEST = SampleRequest("r", "a", None, 1, SamplingParams(32, 32, 4, "flow_sde", {}, "uniform", 0.7, None, 1.0, 16))


class Omni:
    """Answers loads with what it was told to; counts them."""

    def __init__(self) -> None:
        self.loads = 0
        self.answer: Callable[[dict[str, torch.Tensor]], Any] = lambda t: {"bound": len(t), "checksum": checksum(t)}

    async def collective_rpc(self, method: str, args: tuple[Any, ...], timeout: float) -> list[Any]:
        self.loads += 1
        answer = self.answer(args[0])
        return [await answer if asyncio.iscoroutine(answer) else answer]


def _update(version: int) -> WeightUpdate:
    return WeightUpdate(version, "full", {"w": torch.full((2,), float(version))})


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (lambda _: {"error": "w does not stand as it was sent", "error_class": "ContractError"}, ContractError),
        (lambda _: {"bound": 1, "checksum": "other"}, ContractError),
        (lambda _: asyncio.sleep(60), DeadlineError),
    ],
)
def test_after_a_load_that_failed_no_version_counts_as_loaded(answer: Any, error: type[Exception]) -> None:
    async def main() -> None:
        omni = Omni()
        engine = VLLMOmniEngine(omni, OPTIONS, "0", 4)
        loaded = await engine.load_weights(_update(1))
        assert await engine.load_weights(_update(1)) == loaded and omni.loads == 1
        good, omni.answer = omni.answer, answer
        with pytest.raises(error):
            await engine.load_weights(_update(2))
        with pytest.raises(EngineError, match="takes no request: loading version 2 did not succeed"):
            await engine.generate(REQUEST)
        omni.answer = good
        assert await engine.load_weights(_update(1)) == loaded
        assert omni.loads == 3  # not answered from memory: half of version 2 may stand in the engine
        async with engine._drawing():  # requests are let in again
            pass

    asyncio.run(asyncio.wait_for(main(), 60))
