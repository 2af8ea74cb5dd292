import pytest

from verl_omni_core import registry
from verl_omni_core.agent_loop.loops.diffusion_single_turn_agent import prompt_text
from verl_omni_core.errors import DataError


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
