"""What an agent loop offers: one prompt in, one finished sample out, over any number of generate calls.

A component is a module with ``build(context) -> AgentLoop``; outside the tree also ``package.module:Class``, which is
called with the context. A worker builds one object a name and runs many samples through it at once, so ``run`` keeps
no state in it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from verl_omni_core.agent_loop.outputs import DiffusionAgentLoopOutput
from verl_omni_core.rollout._contract import DiffusionOutput, SampleRequest, SamplingParams
from verl_omni_core.settings.run import RunConfig

Tokenizer = Callable[[str], Sequence[int]]
"""Text to token ids, for the batch's ``prompts``; the engine tokenizes by itself."""


class LLMClient(Protocol):
    """Generates on some replica. Equal route keys go to the same replica where that matters; a higher ``attempt``,
    from 0, to another one."""

    async def generate(self, request: SampleRequest, route_key: str, *, attempt: int = 0) -> DiffusionOutput: ...


@dataclass(frozen=True)
class LoopContext:
    """What a loop is built from."""

    config: RunConfig
    llm_client: LLMClient
    tokenizer: Tokenizer | None = None


class AgentLoop(Protocol):
    """One way to turn a prompt into a sample."""

    async def run(self, sampling_params: SamplingParams, **row: Any) -> DiffusionAgentLoopOutput:
        """Draw one sample.

        Args:
            sampling_params: how, validation already taken into account.
            row: the sample's columns; always ``seed`` and ``attempt`` (int), ``request_id`` and ``route_key`` (str),
                ``pack`` (:class:`PackPosition` or none) and ``raw_prompt``; ``raw_negative_prompt`` where there is one.
        Raises: errors with ``retryable`` set are tried again with the same row.
        """
        ...
