"""One rank of the trainer: policy, reference and weights out, by commands that may arrive twice."""

import dataclasses
import math
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch

from verl_omni_core import registry
from verl_omni_core.algorithms._contract import needs_reference
from verl_omni_core.batches import columns
from verl_omni_core.batches.tables import build_table
from verl_omni_core.errors import ConfigError, ContractError, FencedError, OffPolicyError
from verl_omni_core.identity import digest
from verl_omni_core.rollout._contract import WeightUpdate
from verl_omni_core.samplers._denoise import denoise
from verl_omni_core.settings import resolve
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.lease import check_epoch
from verl_omni_core.store.manifest import FileRecord
from verl_omni_core.training import lora
from verl_omni_core.training import ranks as ranks_module
from verl_omni_core.training.losses import diffusion_loss
from verl_omni_core.training.ppo_engine import BatchResult, PPODiffusersFSDPEngine
from verl_omni_core.training.ranks import Ranks, vote
from verl_omni_core.training.replay import Denoising
from verl_omni_core.weights.checksum import checksum
from verl_omni_core.weights.filesystem import write_update
from verl_omni_core.workers.commands import (
    CONTROL,
    InferCommand,
    ProbeCommand,
    RankState,
    UpdateCommand,
    UpdateResult,
    WrittenWeights,
)
from verl_omni_core.workers.step_rows import StepRows
from verl_omni_core.workers.trainer_state import TrainerState
from verl_omni_core.workers.training_worker import TrainingWorker, set_deterministic
from verl_omni_core.workers.update_records import answer, record, refuse_other_rows


class ActorRolloutRefWorker(TrainerState):
    """A rank of the train group. As a Ray actor one of them lives on each device; alone it is a plain object.

    A command carries the fence epoch of its sender: a lower one than seen before, or than the run's newest, is refused.
    """

    def __init__(self, config: RunConfig, rank: int = 0, size: int = 1) -> None:
        self.config = config
        self._rank, self._size = rank, size
        self._store: Any = None
        self._worker: TrainingWorker | None = None
        self._version = 0
        self._epoch = 0
        self._applied: dict[str, dict[str, Any]] = {}
        """Of the training step that is under way, by update id: each optimizer step's ledger ``record``, its metrics'
        ``state`` and the ``ratio_deviation`` of its rows."""
        self._answer: UpdateResult | None = None

    def open_rendezvous(self) -> tuple[str, int]:
        """Open the meeting point of all ranks on this node and return its host and port; rank 0 only."""
        host = ray.util.get_node_ip_address() if ray.is_initialized() else "127.0.0.1"
        self._store, port = ranks_module.open_rendezvous(host, self.config.cluster.actor_timeout_s)
        return host, port

    def init_model(self, address: tuple[str, int] | None = None) -> None:
        """Join the other ranks and build the network; does nothing if that is done.

        Args:
            address: of rank 0's meeting point; not needed by one rank.
        """
        if self._worker is not None:
            return
        self._use_threads()
        set_deterministic(self.config.run.deterministic)
        device = _device()
        ranks = Ranks()
        if self._size > 1:
            if address is None:
                raise ConfigError(f"rank {self._rank} of {self._size} needs the address of rank 0's rendezvous")
            ranks = ranks_module.join(
                self._rank,
                self._size,
                host=address[0],
                port=address[1],
                device=device,
                timeout_s=self.config.training.step_timeout_s,
                store=self._store,
            )
        self._worker = self._build(ranks, device)

    @ray.method(concurrency_group=CONTROL)
    def ping(self, epoch: int | None = None) -> RankState:
        """Return how this rank stands; with an epoch, once it obeys that owner alone."""
        if epoch is not None:
            self._obey(epoch)
        return RankState(self._rank, os.getpid(), self._worker is not None, self._version, self._epoch)

    def update_actor(self, command: UpdateCommand) -> UpdateResult:
        """Apply a training step's optimizer steps, each exactly once.

        A command that was applied is answered from the record. One that broke off between optimizer steps goes on where
        it stopped. Before every step the ranks vote.

        Raises:
            FencedError: a newer owner exists.
            ContractError: another version than expected, or other rows than those of the first delivery.
            OffPolicyError: the samples are of this trainer's version, and before the first optimizer step a ratio
                leaves 1 by more than ``algorithm.max_ratio_deviation``; no step was made.
            NumericError: too many steps were skipped.
        """
        started = time.monotonic()
        worker = self._ready()
        self._fence(command.root, command.epoch)
        digests = [command.batch_digest(number) for number in range(len(command.mini_batches))]
        if self._answer is not None and command.step == self._answer.step == self._version:
            refuse_other_rows([known["batch_digest"] for known in self._answer.records], digests, command.step)
            return dataclasses.replace(self._answer, replayed=True)
        if not command.expected_version == self._version == command.step - 1:
            raise ContractError(
                f"update of step {command.step} expects version {command.expected_version}, this trainer holds "
                f"{self._version}; load the checkpoint of step {command.step - 1}, or send the update that is due"
            )
        refuse_other_rows([done["record"]["batch_digest"] for done in self._applied.values()], digests, command.step)
        ranks = worker.engine.ranks
        rows = vote(ranks, lambda: self._rows(command))
        is_on_policy = rows.versions == {self._version}
        for number, indices in enumerate(command.mini_batches):
            if command.update_id(number) in self._applied:
                continue
            batch = vote(ranks, partial(rows.batch, indices, ranks.rank, ranks.size))
            result = worker.train_mini_batch(
                batch,
                check=self._check_ratio if is_on_policy and not self._has_moved else None,
                before_step=lambda: self._fence(command.root, command.epoch),
            )
            self._applied[command.update_id(number)] = {
                "record": record(command, number, digests[number], result),
                "state": result.metrics.state(),
                "ratio_deviation": result.ratio_deviation,
            }
        learning_rate = worker.engine.lr_scheduler_step()
        self._version = command.step
        self._answer = answer(command, list(self._applied.values()), learning_rate, seconds=time.monotonic() - started)
        self._applied = {}
        return self._answer

    def infer_actor_batch(self, command: InferCommand) -> list[FileRecord]:
        """Write the policy's log-probs of all stored samples as shards of ``logprobs``."""
        return self._infer(command, "policy", "logprobs")

    def infer_ref_batch(self, command: InferCommand) -> list[FileRecord]:
        """Write the reference policy's log-probs and means of all stored samples as shards of ``reference``.

        The reference is the base without adapters, also after a warm start; where all parameters train, a frozen copy.
        """
        return self._infer(command, lora.REFERENCE, "reference")

    def update_weights(self, folder: str, network: str = "policy", epoch: int | None = None) -> WrittenWeights:
        """Write the policy, or its ``average``, into a folder for replicas to load; rank 0 writes, all ranks gather."""
        self._obey(epoch)
        tensors, peft_config = self._gathered(network)
        if self._rank != 0:
            return WrittenWeights(self._version, "", 0, "", [], None)
        kind = "lora" if peft_config else "full"
        paths = write_update(folder, WeightUpdate(self._version, kind, tensors, peft_config))
        files = [path.name for path in paths]
        return WrittenWeights(self._version, kind, len(tensors), checksum(tensors), files, peft_config)

    def weights_checksum(self, network: str = "policy", epoch: int | None = None) -> str:
        """Return what :meth:`update_weights` would say of the weights, without writing them; rank 0's answer counts."""
        self._obey(epoch)
        return checksum(self._gathered(network)[0])

    def sample(self, command: ProbeCommand) -> torch.Tensor:
        """Draw one sample with the trainer's own network and return its final latents [C, h, w] fp32 on the CPU."""
        engine, sampling = self._ready().engine, command.sampling
        schedule, geometry = self._schedule(
            sampling.height, sampling.width, sampling.num_inference_steps, sampling.grid
        )
        generator = torch.Generator().manual_seed(command.seed)
        told = {name: value[None].to(engine.device) for name, value in command.conditioning.items()}
        with engine.eval_mode(command.network) as module:
            drawn = denoise(
                lambda latents, timestep, _: engine.forward_step(
                    latents, timestep, told, sampling.guidance_scale, module
                ),
                engine.adapter.initial_latents(geometry, [generator]).to(engine.device),
                schedule,
                registry.component("sampler", sampling.sampler),
                dict(sampling.sampler_options),
                noise_level=sampling.noise_level,
                window=sampling.window,
                generators=[generator],
            )
        return drawn.latents_clean[0].cpu()

    def copy_adapter(self, source: str, target: str, epoch: int | None = None) -> None:
        """Make an adapter equal to another."""
        self._obey(epoch)
        self._ready().copy_adapter(source, target)

    def ema_update_adapter(self, source: str, target: str, decay: float, epoch: int | None = None) -> None:
        """Move an adapter towards another."""
        self._obey(epoch)
        self._ready().ema_update_adapter(source, target, decay)

    def close(self) -> None:
        """Leave the group of ranks, once a snapshot that was begun is written."""
        if self._writer is not None:
            self._writer.close()
        self._worker = self._writer = None
        ranks_module.leave()

    def _build(self, ranks: Ranks, device: str) -> TrainingWorker:
        config = self.config
        algorithm = resolve.component("algorithm", config.algorithm.name)
        options = resolve.algorithm_options(config)
        path = str(resolve.model_path(config))
        engine = PPODiffusersFSDPEngine(
            config.model.model_copy(update={"path": path}),
            config.training,
            resolve.adapter(config),
            ranks=ranks,
            device=device,
            deterministic=config.run.deterministic,
            total_steps=config.run.steps,
            seed=config.run.seed,
            reference=needs_reference(algorithm, options),
            extra_adapters=getattr(algorithm, "ADAPTERS", ()),
        )
        engine.initialize()
        sampler = config.sampler
        bypass = not config.algorithm.recompute_old_log_probs
        worker = TrainingWorker(engine, diffusion_loss(algorithm, options, bypass=bypass))
        self._worker = worker
        schedule, _ = self._schedule(sampler.height, sampler.width, sampler.num_inference_steps, sampler.grid)
        rule = resolve.component("sampler", sampler.name)
        engine.set_denoising(Denoising(rule, sampler.options, schedule, sampler.noise_level, sampler.guidance_scale))
        return worker

    def _schedule(self, height: int, width: int, steps: int, grid: str) -> tuple[Any, Any]:
        engine = self._ready().engine
        adapter, path = engine.adapter, engine.model.path
        geometry = adapter.geometry(height, width, adapter.decoder_config(path))
        return adapter.schedule(geometry, steps, adapter.scheduler_config(path), grid), geometry

    def _rows(self, command: UpdateCommand) -> StepRows:
        return StepRows(
            RunStore(command.root, epoch=command.epoch),
            command.rollout,
            conditioning=self._conditioning(),
            pack_size=self.config.rollout.pack_size,
            advantages=command.advantages,
            old_log_probs=command.old_log_probs,
            reference=command.reference,
        )

    def _conditioning(self) -> tuple[str, ...]:
        facts = self._ready().engine.adapter.facts
        return (*facts.conditioning, *facts.negative_conditioning)

    def _infer(self, command: InferCommand, network: str, table: str) -> list[FileRecord]:
        worker, attempt = self._ready(), command.attempt
        self._fence(attempt.root, attempt.epoch)
        if command.expected_version != self._version:
            raise ContractError(
                f"the samples are of version {command.expected_version}, this trainer holds {self._version}; score "
                "them before the update, or load the checkpoint of their version"
            )
        ranks = worker.engine.ranks

        def read() -> tuple[StepRows, Any]:
            rows = StepRows(
                RunStore(attempt.root, epoch=attempt.epoch),
                command.rollout,
                conditioning=self._conditioning(),
                pack_size=self.config.rollout.pack_size,
            )
            return rows, rows.batch(rows.sample_indices, ranks.rank, ranks.size)

        rows, batch = vote(ranks, read)
        is_reference = table == "reference"
        scored = worker.infer_batch(batch, network, means=is_reference)
        if not batch["rows"]["weight"].any():
            return []
        own = set(batch["rows"]["sample_index"].tolist())
        places = [place for place, index in enumerate(rows.sample_indices) if index in own]
        values: dict[str, Any] = {
            name: rows.trajectories[name].slice(places[0], len(places)) for name in columns.IDENTITY
        }
        if is_reference:
            values["ref_digest"] = [self._reference_digest()] * len(places)
            values[columns.REF_LOG_PROB] = scored["log_probs"]
            values[columns.REF_PREV_SAMPLE_MEAN] = scored["prev_sample_mean"]
        else:
            values[columns.WEIGHTS_VERSION] = [self._version] * len(places)
            values[columns.OLD_LOG_PROBS] = scored["log_probs"]
        return [attempt.write_table(table, ranks.rank, build_table(table, values))]

    def _reference_digest(self) -> str:
        model = self.config.model
        return digest({"model": model.name, "path": model.path, "dtype": model.dtype, "options": model.options})

    @property
    def _has_moved(self) -> bool:
        return any(not done["record"]["skipped"] for done in self._applied.values())

    def _gathered(self, network: str) -> tuple[dict[str, torch.Tensor], dict[str, Any] | None]:
        named, peft_config = self._ready().engine.get_per_tensor_param(network)
        # gathering is collective, keeping is not: other ranks drop each tensor as it comes
        return {name: tensor for name, tensor in named if self._rank == 0}, peft_config

    def _check_ratio(self, result: BatchResult) -> None:
        limit = self.config.algorithm.max_ratio_deviation
        if not result.pairs or not math.isfinite(result.ratio_deviation):
            return  # the step is skipped: there is nothing to judge, or a forward pass that is not finite
        if limit is not None and result.ratio_deviation > limit:
            raise OffPolicyError(
                f"before the first optimizer step a ratio is {result.ratio_deviation:.3g} away from 1, more than "
                f"algorithm.max_ratio_deviation = {limit:g}: the samples were not drawn by this policy. Check that the "
                "replicas hold this version and compute in the trainer's dtype, or start a run with a higher limit"
            )

    def _fence(self, root: str, epoch: int) -> None:
        self._obey(epoch)
        check_epoch(Path(root), epoch)

    def _obey(self, epoch: int | None) -> None:
        if epoch is None:
            return
        if epoch < self._epoch:
            raise FencedError(f"epoch {epoch} has ended, this trainer obeys epoch {self._epoch}; this owner must stop")
        self._epoch = epoch

    def _ready(self) -> TrainingWorker:
        if self._worker is None:
            raise ContractError("this rank has no network yet; call init_model first")
        self._use_threads()
        return self._worker

    def _use_threads(self) -> None:
        # OpenMP keeps the number for each thread that calls it, and Ray may call from several
        torch.set_num_threads(self.config.training.threads)


def _device() -> str:
    gpus = ray.get_gpu_ids() if ray.is_initialized() else []
    if not (gpus and torch.cuda.is_available()):
        return "cpu"
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.cuda.set_device(0)
    return "cuda:0"
