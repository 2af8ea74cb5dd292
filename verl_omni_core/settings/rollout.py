"""Which engine generates, on how many replicas, in what batches."""

from typing import Any, Literal

from pydantic import Field

from verl_omni_core.settings.base import Settings
from verl_omni_core.settings.model import Dtype


class RolloutSettings(Settings):
    """The generation side."""

    name: str = Field("vllm_omni", description="Engine: a component of verl_omni_core.rollout.")
    group_size: int = Field(8, ge=1, description="Samples a prompt; at least 2 where advantages compare a group.")
    replicas: int = Field(1, ge=1, description="Engines that generate side by side.")
    tensor_parallel: int = Field(1, ge=1, description="Devices an engine spans.")
    max_batch: int = Field(32, ge=1, description="Most requests that an engine runs in one forward pass.")
    batch_wait_ms: float = Field(100, ge=0, description="How long an engine waits for a batch to fill, milliseconds.")
    pack_size: int = Field(32, ge=1, description="Samples of one shard: the unit of commit and of retry.")
    dtype: Dtype = Field("float32", description="Dtype in which the engine computes.")
    threads: int = Field(2, ge=1, description="CPU threads of an engine, where it runs on a CPU.")
    agent_workers: int = Field(1, ge=1, description="Agent-loop workers that feed the engines.")
    agent_loop: str = Field("diffusion_single_turn_agent", description="Agent loop of rows that name none.")
    max_concurrency: int = Field(256, ge=1, description="Samples in flight in an agent-loop worker.")
    prompt_length: int = Field(77, ge=1, description="Tokens to which prompts are padded in a batch.")
    max_prompt_embed_length: int = Field(
        512, ge=1, description="Rows to which prompt embeddings and reference rows are padded in a batch."
    )
    request_timeout_s: float = Field(300, gt=0, description="Deadline of one generation request, seconds.")
    start_timeout_s: float = Field(300, gt=0, description="Deadline of an engine's start, seconds.")
    max_attempts: int = Field(3, ge=1, description="Attempts at a sample, and at a pack that lacks samples.")
    failure: Literal["fail", "drop", "zero_weight", "refill"] = Field(
        "fail",
        description="A group that lacks samples after all attempts: stop the run, leave the group out, train on its "
        "other samples alone, or draw the missing ones with other seeds.",
    )
    refill_rounds: int = Field(3, ge=1, description="Other seeds that are tried for a sample before the run stops.")
    max_failed_fraction: float = Field(
        0.2, ge=0, le=1, description="Share of a step's samples that may be missing with 'drop' or 'zero_weight'."
    )
    options: dict[str, Any] = Field({}, description="Further options of the engine, passed to it as they are.")
