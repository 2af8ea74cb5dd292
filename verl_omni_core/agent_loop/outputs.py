"""What agent loops return, and how rows become a batch that concatenates without knowledge of the model.

Axes: ``N`` samples, ``P`` padded prompt tokens, ``M`` padded embedding rows, ``W`` stochastic steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_omni_core.batches.batch import DataProto
from verl_omni_core.batches.embeddings import EMBEDDINGS, pad_condition_rows, pad_embeds
from verl_omni_core.errors import ContractError
from verl_omni_core.rewards._contract import Score


@dataclass
class AgentLoopMetrics:
    """Where a sample's time went, seconds."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1
    """Times that the engine put the sample off; -1 where it does not say."""


@dataclass
class DiffusionAgentLoopOutput:
    """One finished sample."""

    prompt_ids: list[int]
    """Token ids of the prompt; empty without a tokenizer."""
    response_diffusion_output: Tensor
    """uint8 [C, H, W], or [T, C, H, W] for a clip."""
    response_logprobs: Tensor | None = None
    """fp32 [W] mean log-density a latent element; none where the sample is deterministic."""
    reward_score: float | None = None
    """Combined reward; none before scoring, and where a score is missing."""
    num_turns: int = 0
    """Messages of user, assistant and tools."""
    metrics: AgentLoopMetrics = field(default_factory=AgentLoopMetrics)
    extra_fields: dict[str, Any] = field(default_factory=dict)
    """The engine's extra fields, ``raw_prompt``, ``attempts``, and ``reward_extra_info`` where scored."""
    scores: Mapping[str, Score] | None = None
    """By scorer; none before scoring."""


@dataclass(frozen=True)
class SampleFailure:
    """A sample that could not be drawn, and why."""

    sample_id: str
    error: Exception
    attempts: int


def build_batch(
    outputs: Sequence[DiffusionAgentLoopOutput],
    columns: Mapping[str, np.ndarray],
    *,
    prompt_length: int,
    max_prompt_embed_length: int,
) -> DataProto:
    """Stack samples into a batch, in order.

    Args:
        outputs: N samples.
        columns: the rows' own object columns [N], carried along.
        prompt_length: P.
        max_prompt_embed_length: M, for prompt embeddings and reference rows.
    Returns: a batch with ``prompts`` and ``attention_mask`` int64 [N, P], ``responses`` uint8 [N, C, H, W] or
        [N, T, C, H, W], ``rm_scores`` fp32 [N, 1] if every sample has a score, ``rollout_log_probs`` fp32 [N, W] if
        every sample has them, and each tensor among the extra fields, embeddings and reference rows padded to M with
        their masks. Other extra fields, and tensors that some samples lack, become object columns with none in the
        gaps. ``meta_info``: ``metrics``, a list of N dictionaries, and with ``rm_scores`` also ``reward_extra_keys``,
        the sorted names that all samples' reward extras share, which are object columns.
    Raises: ContractError for no samples, a prompt or embedding longer than its limit, or tensors of different shapes.
    """
    if not outputs:
        raise ContractError("got no samples to make a batch of; expected at least one")
    tensors: dict[str, Tensor] = _prompts([output.prompt_ids for output in outputs], prompt_length)
    tensors["responses"] = _stacked("responses", [output.response_diffusion_output for output in outputs])
    objects: dict[str, Any] = {name: list(values) for name, values in columns.items()}
    log_probs = [output.response_logprobs for output in outputs]
    if all(value is not None for value in log_probs):
        tensors["rollout_log_probs"] = _stacked("rollout_log_probs", log_probs)
    rows = [_padded(output, max_prompt_embed_length) for output in outputs]
    for name in sorted({name for row in rows for name in row}):
        values = [row.get(name) for row in rows]
        if all(isinstance(value, Tensor) for value in values):
            tensors[name] = _stacked(name, values)
        else:
            objects[name] = values
    objects["__num_turns__"] = [output.num_turns for output in outputs]
    meta: dict[str, Any] = {"metrics": [vars(output.metrics).copy() for output in outputs]}
    rewards = [output.reward_score for output in outputs]
    if all(value is not None for value in rewards):
        tensors["rm_scores"] = torch.tensor(rewards, dtype=torch.float32)[:, None]
        extras = [output.extra_fields.get("reward_extra_info", {}) for output in outputs]
        meta["reward_extra_keys"] = sorted(set.intersection(*(set(extra) for extra in extras)))
        for key in meta["reward_extra_keys"]:
            objects[key] = [extra[key] for extra in extras]
    return DataProto.from_dict(tensors, objects, meta)


def join_batches(parts: Sequence[DataProto]) -> DataProto:
    """Concatenate the outputs of several workers: the whole of what an agent-loop manager does with them.

    Rewards follow the rule of one batch: ``rm_scores`` only if every part has them, and of the reward extras those that
    all parts share. Everything else must agree and is joined row by row, whatever the model.
    """
    scored = all("rm_scores" in part.batch.keys() for part in parts)  # noqa: SIM118 - iterating yields rows
    keys = [set(part.meta_info.get("reward_extra_keys", ())) for part in parts]
    shared = set.intersection(*keys) if scored and keys else set()
    return DataProto.concat(
        [_with_rewards(part, own - shared, shared, scored) for part, own in zip(parts, keys, strict=True)]
    )


def _prompts(ids: Sequence[Sequence[int]], length: int) -> dict[str, Tensor]:
    longest = max(len(row) for row in ids)
    if longest > length:
        raise ContractError(
            f"a prompt has {longest} tokens, the batch takes {length}; raise rollout.prompt_length, prompts are not cut"
        )
    prompts, mask = torch.zeros(len(ids), length, dtype=torch.int64), torch.zeros(len(ids), length, dtype=torch.int64)
    for index, row in enumerate(ids):
        prompts[index, : len(row)] = torch.tensor(list(row), dtype=torch.int64)
        mask[index, : len(row)] = 1
    return {"prompts": prompts, "attention_mask": mask}


def _padded(output: DiffusionAgentLoopOutput, length: int) -> dict[str, Any]:
    fields = {name: value for name, value in output.extra_fields.items() if name != "reward_extra_info"}
    for name in EMBEDDINGS:
        if isinstance(fields.get(name), Tensor):
            fields[name], fields[f"{name}_mask"] = pad_embeds(name, fields[name], length, fields.get(f"{name}_mask"))
    fields.update(pad_condition_rows(str(fields.get("sample_id", "")), fields, length))
    return fields


def _stacked(name: str, values: Sequence[Any]) -> Tensor:
    forms = {(tuple(value.shape), value.dtype) for value in values}
    if len(forms) > 1:
        raise ContractError(
            f"{name} differs between samples: {sorted(map(str, forms))}; a batch holds samples of one size and model"
        )
    return torch.stack(list(values))


def _with_rewards(part: DataProto, drop: set[str], keep: set[str], scored: bool) -> DataProto:
    names = [name for name in part.batch.keys() if scored or name != "rm_scores"]  # noqa: SIM118
    objects = {name: values for name, values in part.non_tensor_batch.items() if name not in drop}
    meta = {key: value for key, value in part.meta_info.items() if key != "reward_extra_keys"}
    if scored:
        meta["reward_extra_keys"] = sorted(keep)
    return DataProto(part.batch.select(*names), objects, meta)
