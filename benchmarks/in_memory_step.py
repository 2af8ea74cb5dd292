"""A training step as a straight loop in one process: the product's engine and trainer, no Ray, no Prefect, no Arrow.

Axes: ``N`` samples of a step, ``W`` stored steps, ``P`` prompts, ``X`` latent axes.
"""

import asyncio
import threading
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from verl_omni_core import identity, registry
from verl_omni_core.agent_loop.sampling import training_sampling
from verl_omni_core.batches import columns
from verl_omni_core.data.prompt_sampler import rows_of_step
from verl_omni_core.data.prompts import prompts_of
from verl_omni_core.rewards._contract import Score, ScoringItem
from verl_omni_core.rollout._contract import DiffusionOutput, PackPosition, SampleRequest, WeightUpdate
from verl_omni_core.rollout._options import engine_options
from verl_omni_core.settings import resolve
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.training.losses import diffusion_loss
from verl_omni_core.training.ppo_engine import PPODiffusersFSDPEngine
from verl_omni_core.training.replay import Denoising
from verl_omni_core.workers.training_worker import set_deterministic

Drawn = tuple[DiffusionOutput, Score]


@dataclass(frozen=True)
class InMemoryStep:
    """What one step of the loop took and gave."""

    seconds: float
    parts: dict[str, float]
    """Seconds of ``draw_and_score``, ``update`` and ``load_weights``."""
    rewards: list[float]
    """Of the samples, in their order."""
    checksum: str
    """Of the weights that the engine holds after it."""


class InMemoryLoop:
    """An engine, a scorer and a trainer of this process.

    Samples are scored while others are still being drawn, as the product does it: a plainer loop would be slower.
    """

    def __init__(self, config: RunConfig) -> None:
        """Build all three; the network starts where the product's does.

        Args:
            config: of a run with one replica, one rank, one scorer and the engine's own log-probs.
        """
        self._config = config
        self._prompts = prompts_of(config, "train").to_pylist()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="engine", daemon=True).start()
        self._engine = self._wait(registry.component("engine", config.rollout.name).build(engine_options(config)))
        (entry,) = config.reward.scorers
        self._scorer = registry.component("reward", entry.name).build(resolve.scorer_options(entry))
        self._algorithm = resolve.component("algorithm", config.algorithm.name)
        self._options = resolve.algorithm_options(config)
        bypass = not config.algorithm.recompute_old_log_probs
        self._loss = diffusion_loss(self._algorithm, self._options, bypass=bypass)
        self._trainer = self._build_trainer()
        self._load(version=0)

    def step(self, number: int) -> InMemoryStep:
        """Draw, score, learn, and hand the weights over; ``number`` is 1-based."""
        begun = time.perf_counter()
        items, requests = self._planned(number)
        drawn = self._wait(self._draw(items, requests))
        scored = time.perf_counter()
        rewards = torch.tensor([float("nan") if score.value is None else score.value for _, score in drawn])
        self._update([output for output, _ in drawn], [request.prompt for request in requests], rewards)
        updated = time.perf_counter()
        checksum = self._load(version=number)
        ended = time.perf_counter()
        parts = {"draw_and_score": scored - begun, "update": updated - scored, "load_weights": ended - updated}
        return InMemoryStep(ended - begun, parts, rewards.tolist(), checksum)

    def close(self) -> None:
        """Stop the engine."""
        self._wait(self._engine.close())
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        # the engine has deadlines of its own for each request; this one only ends a wait that those did not
        limit_s = self._config.rollout.start_timeout_s + self._config.rollout.request_timeout_s
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(limit_s)

    def _planned(self, number: int) -> tuple[list[ScoringItem], list[SampleRequest]]:
        config, group = self._config, self._config.rollout.group_size
        draws = rows_of_step(
            config.run.seed,
            number,
            dataset_rows=len(self._prompts),
            prompts_per_step=config.data.prompts_per_step,
            shuffle=config.data.shuffle,
        )
        sampling = training_sampling(config, number)
        size = config.rollout.pack_size
        nothing: np.ndarray = np.empty(0, np.uint8)
        items, requests = [], []
        for index in range(len(draws) * group):
            row = self._prompts[draws[index // group].dataset_row]
            pack = PackPosition(index % size, size) if config.run.deterministic else None
            seed = identity.sample_seed(config.run.seed, number, index)
            name, prompt = f"{number}-{index}", row[columns.PROMPT]
            requests.append(SampleRequest(name, prompt, row.get(columns.NEGATIVE_PROMPT), seed, sampling, pack))
            items.append(ScoringItem(name, nothing, prompt, row.get(columns.GROUND_TRUTH)))
        return items, requests

    async def _draw(self, items: list[ScoringItem], requests: list[SampleRequest]) -> list[Drawn]:
        free = asyncio.Semaphore(getattr(self._scorer, "CONCURRENCY", 32))

        async def one(item: ScoringItem, request: SampleRequest) -> Drawn:
            output = await self._engine.generate(request)
            shown = ScoringItem(item.sample_id, output.diffusion_output.numpy(), item.prompt, item.ground_truth)
            async with free:
                (score,) = await asyncio.to_thread(self._scorer.score, [shown])
            return output, score

        return await asyncio.gather(*(one(item, request) for item, request in zip(items, requests, strict=True)))

    def _update(self, outputs: list[DiffusionOutput], prompts: list[str], rewards_N: Tensor) -> None:
        config, trainer = self._config, self._trainer
        torch.set_num_threads(config.training.threads)
        groups_N = torch.arange(len(outputs)) // config.rollout.group_size
        valid_N = torch.isfinite(rewards_N)
        advantages_N = self._algorithm.advantages(rewards_N, groups_N, valid_N, self._options)
        batch = self._batch(outputs, prompts, advantages_N, valid_N)
        per_update = (config.training.prompts_per_update or config.data.prompts_per_step) * config.rollout.group_size
        for _ in range(config.training.epochs_per_step):
            for first in range(0, len(outputs), per_update):
                rows = batch["rows"][first : first + per_update]
                part = TensorDict({"rows": rows[rows["weight"] > 0], "conditioning": batch["conditioning"]}, [])
                trainer.optimizer_zero_grad()
                trainer.forward_backward_batch(part, self._loss)
                trainer.optimizer_step()
        trainer.lr_scheduler_step()

    def _batch(
        self, outputs: list[DiffusionOutput], prompts: list[str], advantages_N: Tensor, valid_N: Tensor
    ) -> TensorDict:
        fields = [output.extra_fields for output in outputs]
        numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
        first = dict(reversed(list(zip(prompts, fields, strict=True))))
        facts = self._trainer.adapter.facts
        names = [name for name in (*facts.conditioning, *facts.negative_conditioning) if name in fields[0]]
        conditioning = {name: torch.stack([first[prompt][name] for prompt in numbers]) for name in names}
        log_probs = torch.stack([output.log_probs for output in outputs if output.log_probs is not None])
        steps = {name: torch.stack([row[name] for row in fields]) for name in ("step_indices", "all_timesteps")}
        steps |= {columns.ROLLOUT_LOG_PROBS: log_probs, columns.OLD_LOG_PROBS: log_probs}
        count = len(outputs)
        rows = {
            "all_latents": torch.stack([row["all_latents"] for row in fields]),
            "prompt_index": torch.tensor([numbers[prompt] for prompt in prompts]),
            "weight": valid_N.float(),
            "advantages": advantages_N,
            "pack": torch.arange(count) // self._config.rollout.pack_size,
            "steps": TensorDict(steps, [count, log_probs.shape[1]]),
        }
        return TensorDict(
            {"rows": TensorDict(rows, [count]), "conditioning": TensorDict(conditioning, [len(numbers)])}, []
        )

    def _load(self, version: int) -> str:
        named, peft_config = self._trainer.get_per_tensor_param()
        update = WeightUpdate(version, "lora" if peft_config else "full", dict(named), peft_config)
        return str(self._wait(self._engine.load_weights(update)).checksum)

    def _build_trainer(self) -> PPODiffusersFSDPEngine:
        config, path = self._config, str(resolve.model_path(self._config))
        set_deterministic(config.run.deterministic)
        trainer = PPODiffusersFSDPEngine(
            config.model.model_copy(update={"path": path}),
            config.training,
            resolve.adapter(config),
            deterministic=config.run.deterministic,
            total_steps=config.run.steps,
            seed=config.run.seed,
        )
        trainer.initialize()
        sampler, adapter = config.sampler, trainer.adapter
        geometry = adapter.geometry(sampler.height, sampler.width, adapter.decoder_config(path))
        schedule = adapter.schedule(geometry, sampler.num_inference_steps, adapter.scheduler_config(path), sampler.grid)
        rule = resolve.component("sampler", sampler.name)
        trainer.set_denoising(Denoising(rule, sampler.options, schedule, sampler.noise_level, sampler.guidance_scale))
        return trainer
