"""One prompt, one generation."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from verl_omni_core.agent_loop.loops._contract import AgentLoop, LoopContext
from verl_omni_core.agent_loop.outputs import AgentLoopMetrics, DiffusionAgentLoopOutput
from verl_omni_core.errors import DataError
from verl_omni_core.rollout._contract import SampleRequest, SamplingParams

Prompt = str | Sequence[Mapping[str, Any]]


class DiffusionSingleTurnAgentLoop:
    """Asks the engine once for a picture of the prompt."""

    def __init__(self, context: LoopContext) -> None:
        self._client = context.llm_client
        self._tokenizer = context.tokenizer

    async def run(self, sampling_params: SamplingParams, **row: Any) -> DiffusionAgentLoopOutput:
        """Draw one sample.

        Args:
            sampling_params: how.
            row: see :class:`AgentLoop`; ``raw_prompt`` and ``raw_negative_prompt`` are a text or chat messages.
        Returns: the sample; two turns, the prompt and the picture.
        Raises: DataError for messages that are not one text of a user; whatever the engine raises.
        """
        prompt = prompt_text(row["raw_prompt"])
        negative = row.get("raw_negative_prompt")
        request = SampleRequest(
            request_id=row["request_id"],
            prompt=prompt,
            negative_prompt=None if negative is None else prompt_text(negative),
            seed=row["seed"],
            sampling=sampling_params,
            pack=row.get("pack"),
        )
        started = time.perf_counter()
        output = await self._client.generate(request, row["route_key"], attempt=row.get("attempt", 0))
        seconds = time.perf_counter() - started
        return DiffusionAgentLoopOutput(
            prompt_ids=[int(token) for token in self._tokenizer(prompt)] if self._tokenizer else [],
            response_diffusion_output=output.diffusion_output,
            response_logprobs=output.log_probs,
            num_turns=2,
            metrics=AgentLoopMetrics(generate_sequences=seconds, num_preempted=output.num_preempted),
            extra_fields={**output.extra_fields, "stop_reason": output.stop_reason, "raw_prompt": row["raw_prompt"]},
        )


def prompt_text(prompt: Prompt) -> str:
    """Return the text of a prompt.

    Args:
        prompt: a text, or chat messages: exactly one, of the user, whose content is a text or one text part.
    Raises: DataError for anything else. Template text is the model adapter's, and pictures need a loop that takes them.
    """
    if isinstance(prompt, str):
        return prompt
    messages = list(prompt)
    roles = [message.get("role") for message in messages]
    if roles != ["user"]:
        raise DataError(
            f"a prompt of messages with the roles {roles}; expected one of the user: the model adapter adds system "
            "text, and more turns need another agent loop"
        )
    content: Any = messages[0].get("content")
    if not isinstance(content, str):
        kinds = [part.get("type") for part in content or []]
        if kinds != ["text"]:
            raise DataError(f"a prompt with the parts {kinds}; expected one text: media need another agent loop")
        content = content[0]["text"]
    return content


def build(context: LoopContext) -> AgentLoop:
    """Return the loop."""
    return DiffusionSingleTurnAgentLoop(context)
