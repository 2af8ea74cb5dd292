"""Runs every row of a batch as an agent loop of its own, many at once, and scores samples as they come.

What a sample is does not depend on how many workers there are, how rows are split among them, or who is done first.
"""

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from verl_omni_core import identity, registry
from verl_omni_core.agent_loop.loops._contract import AgentLoop, LLMClient, LoopContext, Tokenizer
from verl_omni_core.agent_loop.outputs import DiffusionAgentLoopOutput, SampleFailure, build_batch
from verl_omni_core.agent_loop.sampling import training_sampling, validation_sampling
from verl_omni_core.batches.batch import DataProto
from verl_omni_core.errors import ContractError, EngineError
from verl_omni_core.rewards._combine import combine, extras
from verl_omni_core.rewards._contract import ScoringItem
from verl_omni_core.rewards._pool import ScorerPool
from verl_omni_core.rewards._tables import weights_of
from verl_omni_core.rollout._contract import PackPosition, SamplingParams
from verl_omni_core.settings.run import RunConfig

_FIRST_PAUSE_S = 0.2

Result = DiffusionAgentLoopOutput | SampleFailure


class DiffusionAgentLoopWorker:
    """Turns a batch of prompts into a batch of samples."""

    def __init__(
        self,
        config: RunConfig,
        llm_client: LLMClient,
        teacher_client: object | None = None,
        reward_loop_worker_handles: Sequence[Any] | None = None,
        *,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """Make a worker.

        Args:
            config: the run's settings.
            llm_client: generates on some replica.
            teacher_client: accepted and not used; teachers score trajectories in a stage of their own.
            reward_loop_worker_handles: reward workers (Ray handles or plain objects); given, each sample is scored as
                soon as it is drawn.
            tokenizer: makes the batch's ``prompts``; without one they are empty.
        """
        self._config = config
        self._context = LoopContext(config, llm_client, tokenizer)
        self._loops: dict[str, AgentLoop] = {}
        self._weights = weights_of(config.reward)
        self._pool = (
            ScorerPool(reward_loop_worker_handles, list(self._weights), timeout_s=config.reward.timeout_s)
            if reward_loop_worker_handles
            else None
        )
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._free = asyncio.Semaphore(config.rollout.max_concurrency)

    async def generate_sequences(self, batch: DataProto) -> DataProto:
        """Draw one sample a row.

        Args:
            batch: as for :meth:`run_samples`.
        Returns: see :func:`build_batch`; the rows' object columns are carried along. Outputs of several workers
            concatenate: :func:`join_batches`.
        Raises: EngineError if a sample failed for good, once all others are done; names the samples. ContractError,
            UnknownNameError as :meth:`run_samples`.
        """
        results = await self.run_samples(batch)
        failed = [result for result in results if isinstance(result, SampleFailure)]
        if failed:
            first = failed[0]
            raise EngineError(
                f"{len(failed)} of {len(results)} samples failed: {', '.join(f.sample_id for f in failed[:8])}; the "
                f"first after {first.attempts} attempts with {type(first.error).__name__}: {first.error}"
            ) from first.error
        return build_batch(
            [result for result in results if isinstance(result, DiffusionAgentLoopOutput)],
            {name: values for name, values in batch.non_tensor_batch.items() if name != "raw_prompt"},
            prompt_length=self._config.rollout.prompt_length,
            max_prompt_embed_length=self._config.rollout.max_prompt_embed_length,
        )

    async def run_samples(self, batch: DataProto) -> list[Result]:
        """Draw one sample a row; a sample that fails for good is a row of the answer, not an exception.

        Args:
            batch: columns ``raw_prompt`` (or ``prompt``), ``sample_index``, and where they apply
                ``raw_negative_prompt`` (or ``negative_prompt``), ``seed``, ``session``, ``sample_id``, ``agent_name``,
                ``ground_truth``, ``data_source``, ``extra_info``, ``pack_index``. ``meta_info``: ``global_steps`` or
                ``sampling`` (:class:`SamplingParams`), ``validate``, and where samples come in packs ``pack`` (its id)
                and ``pack_size``. With ``validate`` log-probs are off, and rows without a seed get the validation seed
                plus their session.
        Returns: N results in the batch's order.
        Raises: UnknownNameError for an agent loop that does not exist, ContractError for rows without what identifies
            them; both before the first sample.
        """
        if asyncio.get_running_loop() is not self._event_loop:
            self._event_loop = asyncio.get_running_loop()
            self._free = asyncio.Semaphore(self._config.rollout.max_concurrency)
        sampling = self._sampling(batch.meta_info)
        rows = [self._row(batch, index) for index in range(len(batch))]
        loops = [self._loop(row["agent_name"]) for row in rows]
        return list(
            await asyncio.gather(*(self._bounded(loop, sampling, row) for loop, row in zip(loops, rows, strict=True)))
        )

    def _sampling(self, meta: dict[str, Any]) -> SamplingParams:
        given = meta.get("sampling")
        if meta.get("validate"):
            sampling = given or validation_sampling(self._config)
            return dataclasses.replace(sampling, logprobs=False)
        if given is not None:
            return given
        if "global_steps" not in meta:
            raise ContractError(
                "the batch says neither 'sampling' nor 'global_steps' in meta_info; give the step number"
            )
        return training_sampling(self._config, int(meta["global_steps"]))

    def _row(self, batch: DataProto, index: int) -> dict[str, Any]:
        row: dict[str, Any] = {name: values[index] for name, values in batch.non_tensor_batch.items()}
        for name in batch.batch.keys():  # noqa: SIM118 - iterating yields rows
            row[name] = batch.batch.get(name)[index]
        row["sample_index"] = _whole_number(row, "sample_index")
        row["session"] = _whole_number(row, "session", 0)
        row["seed"] = self._seed(row, batch.meta_info)
        row["raw_prompt"] = row["raw_prompt"] if row.get("raw_prompt") is not None else row.get("prompt")
        if row["raw_prompt"] is None:
            raise ContractError(f"row {index} has no prompt; expected a column 'raw_prompt' or 'prompt'")
        if row.get("raw_negative_prompt") is None:
            row["raw_negative_prompt"] = row.get("negative_prompt")
        row["sample_id"] = row.get("sample_id") or f"sample-{row['sample_index']}"
        row["agent_name"] = row.get("agent_name") or self._config.rollout.agent_loop
        row["route_key"] = batch.meta_info.get("pack") or row["sample_id"]
        row["pack"] = None
        if self._config.run.deterministic:
            size = int(batch.meta_info.get("pack_size", len(batch)))
            name = str(batch.meta_info.get("pack") or "")
            row["pack"] = PackPosition(_whole_number(row, "pack_index", index), size, name, count=len(batch))
        return row

    def _seed(self, row: dict[str, Any], meta: dict[str, Any]) -> int:
        if row.get("seed") is not None:
            return int(row["seed"])
        if meta.get("validate"):
            return self._config.sampler.validation.seed + row["session"]
        if "global_steps" not in meta:
            raise ContractError(
                "rows have no 'seed' and meta_info no 'global_steps' to derive one from; give one of them"
            )
        return identity.sample_seed(self._config.run.seed, int(meta["global_steps"]), row["sample_index"])

    def _loop(self, name: str) -> AgentLoop:
        if name not in self._loops:
            component = registry.component("agent_loop", name)
            self._loops[name] = getattr(component, "build", component)(self._context)
        return self._loops[name]

    async def _bounded(self, loop: AgentLoop, sampling: SamplingParams, row: dict[str, Any]) -> Result:
        async with self._free:
            result = await self._drawn(loop, sampling, row)
            if isinstance(result, DiffusionAgentLoopOutput) and result.reward_score is None and self._pool is not None:
                await self._score(self._pool, result, row)
            return result

    async def _drawn(self, loop: AgentLoop, sampling: SamplingParams, row: dict[str, Any]) -> Result:
        """Try a sample; the same seed each time, so it does not matter which attempt succeeds."""
        most = self._config.rollout.max_attempts
        for attempt in range(1, most + 1):
            request_id = row["sample_id"] if attempt == 1 else f"{row['sample_id']}-retry{attempt - 1}"
            try:
                output = await loop.run(sampling, **{**row, "request_id": request_id, "attempt": attempt - 1})
            except Exception as error:  # noqa: BLE001 - a failed sample is a row with its error
                if attempt == most or not getattr(error, "retryable", False):
                    return SampleFailure(row["sample_id"], error, attempt)
                if row["pack"] is not None:
                    row = {**row, "pack": dataclasses.replace(row["pack"], name="")}  # its pack has gone ahead
                await asyncio.sleep(_FIRST_PAUSE_S * 2 ** (attempt - 1))
            else:
                output.extra_fields["attempts"] = attempt
                return output
        raise AssertionError("rollout.max_attempts is at least 1")

    async def _score(self, pool: ScorerPool, output: DiffusionAgentLoopOutput, row: dict[str, Any]) -> None:
        started = time.perf_counter()
        output.scores = await pool.score(scoring_item(output, row))
        values, valid = combine({name: [score] for name, score in output.scores.items()}, self._weights)
        output.reward_score = float(values[0]) if valid[0] else None
        output.extra_fields["reward_extra_info"] = extras(output.scores, self._weights)
        output.metrics.compute_score = time.perf_counter() - started


def scoring_item(output: DiffusionAgentLoopOutput, row: dict[str, Any]) -> ScoringItem:
    """Return a sample as scorers see it: the picture, the row's own columns, and how many turns it took."""
    return ScoringItem(
        sample_id=row["sample_id"],
        image=np.asarray(output.response_diffusion_output),
        prompt=_users_text(row["raw_prompt"]),
        ground_truth=row.get("ground_truth"),
        data_source=row.get("data_source"),
        extra_info={**(row.get("extra_info") or {}), "num_turns": output.num_turns},
    )


def _users_text(prompt: Any) -> str:
    """Return what the user wrote, in a prompt of any agent loop."""
    if isinstance(prompt, str):
        return prompt
    contents = [message.get("content") or "" for message in prompt if message.get("role") == "user"]
    parts = [[{"type": "text", "text": content}] if isinstance(content, str) else content for content in contents]
    return "\n".join(part["text"] for content in parts for part in content if part.get("type") == "text")


def _whole_number(row: dict[str, Any], name: str, default: int | None = None) -> int:
    value = row.get(name, default)
    if value is None:
        raise ContractError(f"rows have no {name!r}; number the samples before they are split among workers")
    return int(value)
