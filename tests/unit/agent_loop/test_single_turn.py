import asyncio

import pytest
import torch

from tests.unit.agent_loop.fake_client import WINDOW, Client, config, draw
from verl_omni_core import registry
from verl_omni_core.agent_loop.loops._contract import LoopContext
from verl_omni_core.agent_loop.loops.diffusion_single_turn_agent import DiffusionSingleTurnAgentLoop, prompt_text
from verl_omni_core.agent_loop.sampling import training_sampling
from verl_omni_core.errors import DataError
from verl_omni_core.rollout._contract import PackPosition


@pytest.mark.parametrize(
    "prompt",
    [
        "a cat",
        [{"role": "user", "content": "a cat"}],
        [{"role": "user", "content": [{"type": "text", "text": "a cat"}]}],
    ],
)
def test_a_text_or_one_user_message_is_the_prompt(prompt: object) -> None:
    assert prompt_text(prompt) == "a cat"


@pytest.mark.parametrize(
    "prompt",
    [
        [],
        [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "u"}]}],
    ],
)
def test_prompts_that_would_lose_something_are_refused(prompt: object) -> None:
    with pytest.raises(DataError, match="expected one"):
        prompt_text(prompt)


def test_the_loop_is_found_by_name() -> None:
    assert "diffusion_single_turn_agent" in registry.names("agent_loop")


def test_one_prompt_is_one_generation() -> None:
    client, settings = Client(), config()
    loop = DiffusionSingleTurnAgentLoop(LoopContext(settings, client, tokenizer=lambda text: [len(text)]))
    sampling = training_sampling(settings, 3)
    message = [{"role": "user", "content": "a cat"}]
    output = asyncio.run(
        loop.run(
            sampling,
            raw_prompt=message,
            raw_negative_prompt="blurry",
            request_id="r7",
            route_key="pack",
            seed=11,
            attempt=1,
            pack=PackPosition(2, 4),
        )
    )
    (request,) = client.requests
    assert (request.request_id, request.prompt, request.negative_prompt, request.seed) == ("r7", "a cat", "blurry", 11)
    assert (request.sampling, request.pack) == (sampling, PackPosition(2, 4))
    assert (client.route_keys, client.attempts) == (["pack"], [1])
    drawn = draw(request)
    assert torch.equal(output.response_diffusion_output, drawn.diffusion_output)
    assert output.response_logprobs is not None and output.response_logprobs.shape == (WINDOW,)
    assert torch.equal(output.extra_fields["all_latents"], drawn.extra_fields["all_latents"])
    assert (output.prompt_ids, output.num_turns, output.reward_score) == ([5], 2, None)
    assert (output.extra_fields["raw_prompt"], output.extra_fields["stop_reason"]) == (message, "completed")
