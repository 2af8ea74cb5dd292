"""Finished samples as tables: trajectories, embeddings by prompt, pictures, and the samples that failed.

Axes: ``N`` samples, ``W`` stochastic steps.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from verl_omni_core.agent_loop.outputs import DiffusionAgentLoopOutput, SampleFailure
from verl_omni_core.batches import columns
from verl_omni_core.batches.schema import SCHEMAS
from verl_omni_core.batches.tables import build_table
from verl_omni_core.errors import ContractError

CONDITIONING_SHA256 = "conditioning_sha256"
"""Column of ``trajectories``: the conditioning that the sample was drawn with, equal for all samples of a prompt."""

_LENGTH = "_len"
_CONDITIONING = tuple(
    column.name
    for column in SCHEMAS["embeddings"].columns
    if column.name not in (columns.PROMPT_KEY, columns.ENCODER_DIGEST) and not column.name.endswith(_LENGTH)
)


def trajectories(
    requests: pa.Table,
    outputs: Sequence[DiffusionAgentLoopOutput],
    *,
    window: tuple[int, int] | None,
    latents: bool,
) -> pa.Table:
    """Build ``trajectories``: scalars of each sample, and what replay needs.

    Args:
        requests: N rows of the ``requests`` table, those of the outputs.
        outputs: N samples of one shape.
        window: half-open range of stochastic steps: their latents, timesteps, indices and log-probs are stored; none
            stores the final latents only.
        latents: without a window, whether to store the final latents.
    """
    fields = [output.extra_fields for output in outputs]
    versions = [int(row["weights_version"]) for row in fields]
    count = len(outputs)
    table: dict[str, Any] = {
        **_identity(requests),
        columns.PROMPT_KEY: requests.column(columns.PROMPT_KEY),
        columns.SEED: requests.column(columns.SEED),
        columns.STATUS: ["ok"] * count,
        columns.ATTEMPTS: [int(row["attempts"]) for row in fields],
        columns.STOP_REASON: [row.get(columns.STOP_REASON) for row in fields],
        columns.REPLICA: [str(row.get(columns.REPLICA, "")) for row in fields],
        columns.MIN_VERSION: versions,
        columns.MAX_VERSION: versions,
        columns.NUM_TURNS: [output.num_turns for output in outputs],
        columns.NUM_PREEMPTED: [output.metrics.num_preempted for output in outputs],
        columns.GENERATE_S: [output.metrics.generate_sequences for output in outputs],
        columns.TOOL_S: [output.metrics.tool_calls for output in outputs],
        columns.SCORE_S: [output.metrics.compute_score for output in outputs],
        columns.WINDOW_START: [None if window is None else window[0]] * count,
        CONDITIONING_SHA256: [conditioning_sha256(output) for output in outputs],
    }
    if window is not None:
        for name in (columns.ALL_LATENTS, columns.ALL_TIMESTEPS, columns.STEP_INDICES):
            table[name] = torch.stack([row[name] for row in fields])
        if all(output.response_logprobs is not None for output in outputs):
            table[columns.ROLLOUT_LOG_PROBS] = torch.stack([_given(output.response_logprobs) for output in outputs])
    elif latents:
        table[columns.LATENTS_CLEAN] = torch.stack([row[columns.LATENTS_CLEAN] for row in fields])
    return build_table("trajectories", table)


def embeddings(
    requests: pa.Table,
    outputs: Sequence[DiffusionAgentLoopOutput],
    *,
    wanted: frozenset[str],
    encoder_digest: str,
) -> pa.Table | None:
    """Build ``embeddings``: one row for each wanted prompt that has a sample here.

    Args:
        requests: N rows of the ``requests`` table, those of the outputs.
        outputs: N samples.
        wanted: keys of the prompts to store.
        encoder_digest: of what encoded them, where the engine does not say.
    Returns: the table; none if no wanted prompt has a sample here.
    Raises: ContractError if samples of one prompt were drawn with different embeddings: training would replay some of
        them with others than their own.
    """
    first: dict[str, int] = {}
    digests = [conditioning_sha256(output) for output in outputs]
    for index, key in enumerate(requests.column(columns.PROMPT_KEY).to_pylist()):
        seen = first.setdefault(key, index)
        if digests[seen] != digests[index]:
            raise ContractError(
                f"samples {seen} and {index} of prompt {key} were drawn with different embeddings; the engine must "
                "encode a prompt alike whatever it shares a batch with"
            )
    keys = [key for key in first if key in wanted]
    if not keys:
        return None
    rows = [outputs[first[key]].extra_fields for key in keys]
    table: dict[str, Any] = {
        columns.PROMPT_KEY: keys,
        columns.ENCODER_DIGEST: [row.get(columns.ENCODER_DIGEST, encoder_digest) for row in rows],
    }
    for name in _CONDITIONING:
        values = [row.get(name) for row in rows]
        if all(value is None for value in values):
            continue
        if "pooled" in name:
            table[name] = torch.stack(values)
            continue
        table[name] = values
        if not name.endswith("_mask"):
            table[f"{name}{_LENGTH}"] = [None if value is None else len(value) for value in values]
    return build_table("embeddings", table)


def failed(requests: pa.Table, failures: Sequence[SampleFailure], *, version: int) -> pa.Table:
    """Build ``trajectories_failed``: N requests, and why each of them has no sample at weights ``version``."""
    count = len(failures)
    return build_table(
        "trajectories_failed",
        {
            **_identity(requests),
            columns.PROMPT_KEY: requests.column(columns.PROMPT_KEY),
            columns.SEED: requests.column(columns.SEED),
            columns.STATUS: ["failed"] * count,
            columns.ERROR_CLASS: [type(failure.error).__name__ for failure in failures],
            columns.ERROR_MESSAGE: [str(failure.error) for failure in failures],
            columns.ATTEMPTS: [failure.attempts for failure in failures],
            columns.REPLICA: [""] * count,
            columns.MIN_VERSION: [version] * count,
            columns.MAX_VERSION: [version] * count,
            columns.NUM_TURNS: [0] * count,
            columns.NUM_PREEMPTED: [-1] * count,
            columns.GENERATE_S: [0.0] * count,
            columns.TOOL_S: [0.0] * count,
            columns.SCORE_S: [0.0] * count,
        },
    )


def media(requests: pa.Table, outputs: Sequence[DiffusionAgentLoopOutput]) -> pa.Table:
    """Build ``media``: N pictures uint8 of one shape, with the sha256 of their pixels."""
    pixels = [output.response_diffusion_output.contiguous() for output in outputs]
    return build_table(
        "media",
        {
            **_identity(requests),
            columns.KIND: ["image" if picture.ndim == 3 else "video" for picture in pixels],
            columns.PIXELS: torch.stack(pixels),
            columns.SHA256: [hashlib.sha256(np.asarray(picture).tobytes()).digest() for picture in pixels],
        },
    )


def conditioning_sha256(output: DiffusionAgentLoopOutput) -> str:
    """Return the digest of names, dtypes, shapes and bits of a sample's conditioning."""
    found = hashlib.sha256()
    for name in _CONDITIONING:
        value = output.extra_fields.get(name)
        if value is not None:
            found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            found.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _given(value: Tensor | None) -> Tensor:
    assert value is not None
    return value


def _identity(requests: pa.Table) -> dict[str, Any]:
    return {name: requests.column(name) for name in columns.IDENTITY}
