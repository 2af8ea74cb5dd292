"""The sharded network with its optimizer: everything about training that no algorithm needs to know."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig
from torch import Tensor, nn

from verl_omni_core.errors import ConfigError, NumericError
from verl_omni_core.models._contract import DenoiserAdapter
from verl_omni_core.settings.model import ModelSettings
from verl_omni_core.settings.training import TrainingSettings
from verl_omni_core.training import checkpoint, lora, sharding
from verl_omni_core.training.ema import PolicyAverage
from verl_omni_core.training.optim import build_optimizer, build_scheduler
from verl_omni_core.training.ranks import Ranks, alone


@dataclass(frozen=True)
class StepResult:
    """What an optimizer step did."""

    grad_norm: float
    """Over all parameters and ranks, before clipping."""
    skipped: bool
    """The norm was not finite: no parameter moved, on any rank."""


@dataclass
class Counters:
    """How far training has come."""

    optimizer_steps: int = 0
    training_steps: int = 0
    """Advances of the learning-rate schedule."""
    skipped_steps: int = 0
    consecutive_skips: int = 0


class DiffusersFSDPEngine(lora.LoRAAdapterMixin):
    """One rank's share of a denoiser that trains: LoRA or all parameters, FSDP2, clipping, schedule, policy average.

    Args:
        model: with ``path`` a pipeline folder.
        training: optimizer and batches.
        adapter: of the model; loads the network and calls it.
        ranks: who trains together.
        device: ``cpu`` or ``cuda:<n>``.
        deterministic: forward passes keep packs together and hold one denoising step each.
        total_steps: training steps of the run, the length of a cosine schedule.
        seed: of the adapters' initial values, equal on all ranks.
        reference: keep a frozen copy, where all parameters train and a reference policy is needed.
        extra_adapters: names of further adapters beside ``default``.
    """

    module: nn.Module

    def __init__(
        self,
        model: ModelSettings,
        training: TrainingSettings,
        adapter: DenoiserAdapter,
        *,
        ranks: Ranks | None = None,
        device: str = "cpu",
        deterministic: bool = False,
        total_steps: int = 0,
        seed: int = 0,
        reference: bool = False,
        extra_adapters: tuple[str, ...] = (),
    ) -> None:
        self.model = model
        self.training = training
        self.adapter = adapter
        self.ranks = ranks or Ranks()
        self.device = device
        self.deterministic = deterministic
        self.total_steps = total_steps
        self.seed = seed
        self.counters = Counters()
        self.lora_config: LoraConfig | None = None
        self.ema: PolicyAverage | None = None
        self._extra_adapters = extra_adapters
        self._wants_reference = reference
        self._reference: nn.Module | None = None

    def initialize(self) -> None:
        """Load the network, add adapters, shard, and build optimizer, schedule and average.

        Raises:
            ConfigError: adapters that fit nothing, or a model that cannot be loaded.
        """
        compute = getattr(torch, self.model.dtype)
        is_lora = self.model.lora.rank > 0
        if self._extra_adapters and not is_lora:
            raise ConfigError(f"adapters {list(self._extra_adapters)} need model.lora.rank above 0; it is 0")
        # all parameters train from fp32 masters; frozen ones are kept in the dtype they compute in
        module = self.adapter.load_denoiser(self.model.path, compute if is_lora else torch.float32)
        if self.model.gradient_checkpointing:
            module.enable_gradient_checkpointing()
        if is_lora:
            self.lora_config = lora.add_adapters(
                module,
                self.model.lora,
                self.adapter.facts.lora_targets,
                seed=self.seed,
                extra=self._extra_adapters,
            )
        else:
            module.requires_grad_(True)
        mixed = compute if not is_lora and compute != torch.float32 else None
        self._shard(module, mixed)
        if self._wants_reference and not is_lora:
            self._reference = self.adapter.load_denoiser(self.model.path, compute).requires_grad_(False)
            self._shard(self._reference, None)
        self.module = module
        self.trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.optimizer = build_optimizer(self.trainable.values(), self.training)
        self.scheduler = build_scheduler(self.optimizer, self.training, self.total_steps)
        self.counters = Counters()
        if self.training.ema_decay is not None:
            self.ema = PolicyAverage(self.trainable, self.training.ema_decay)

    @contextmanager
    def train_mode(self) -> Iterator[None]:
        """Compute with gradient inside; parameters are sharded again afterwards."""
        self.module.train()
        try:
            yield
        finally:
            sharding.reshard(self.module)

    @contextmanager
    def eval_mode(self, network: str = "policy") -> Iterator[nn.Module]:
        """Compute without gradient inside, with the network that is yielded.

        Args:
            network: ``policy``; ``average``, the policy's average; ``reference``, the network before training (for
                adapters the base without any, also after a warm start); or the name of another adapter.
        """
        self.module.eval()
        with torch.no_grad(), self._network(network) as module:
            try:
                yield module
            finally:
                sharding.reshard(module)

    def forward_step(
        self,
        latents: Tensor,
        timestep: Tensor,
        conditioning: Mapping[str, Tensor],
        guidance_scale: float,
        module: nn.Module | None = None,
    ) -> Tensor:
        """Return the velocity [B, C, h, w] fp32 of latents [B, C, h, w] at timestep [B]."""
        dtype = getattr(torch, self.model.dtype)
        cast = {name: value.to(self.device, dtype) for name, value in conditioning.items()}
        return self.adapter.velocity(module or self.module, latents, timestep, cast, guidance_scale)

    def optimizer_step(self) -> StepResult:
        """Clip and step; on a gradient that is not finite step on no rank, drop it and count.

        Raises:
            NumericError: ``training.max_consecutive_skips`` steps in a row were skipped.
        """
        gradients = [sharding.local(p.grad) for p in self.trainable.values() if p.grad is not None]
        norm = self._norm(gradients)
        if not math.isfinite(norm):
            self.skip_step(f"the gradient's norm is {norm}")
            return StepResult(norm, skipped=True)
        factor = self.training.grad_clip / (norm + 1e-6)
        if factor < 1.0:
            torch._foreach_mul_(gradients, factor)
        self.optimizer.step()
        self.optimizer_zero_grad()
        self.counters.optimizer_steps += 1
        self.counters.consecutive_skips = 0
        if self.ema is not None:
            self.ema.update()
        return StepResult(norm, skipped=False)

    def skip_step(self, reason: str) -> None:
        """Drop the gradient and count a skipped step; all ranks do the same.

        Raises:
            NumericError: too many in a row.
        """
        self.optimizer_zero_grad()
        self.counters.skipped_steps += 1
        self.counters.consecutive_skips += 1
        if self.counters.consecutive_skips >= self.training.max_consecutive_skips:
            raise NumericError(
                f"{self.counters.consecutive_skips} optimizer steps in a row were skipped, the last because {reason}; "
                "lower training.learning_rate, or raise training.max_consecutive_skips"
            )

    def optimizer_zero_grad(self) -> None:
        """Drop the gradient."""
        self.optimizer.zero_grad(set_to_none=True)

    def lr_scheduler_step(self) -> float:
        """Advance the learning rate, once a training step; return the one that follows."""
        self.scheduler.step()
        self.counters.training_steps += 1
        return self.learning_rate

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next optimizer step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def get_data_parallel_rank(self) -> int:
        """Return this rank's number."""
        return self.ranks.rank

    def get_data_parallel_size(self) -> int:
        """Return the number of ranks."""
        return self.ranks.size

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the ranks' process group; none for one rank without any."""
        return self.ranks.group

    def get_per_tensor_param(
        self, network: str = "policy"
    ) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Any] | None]:
        """Return (name, whole CPU tensor) pairs, gathered one at a time, and peft's configuration.

        All ranks must walk through the pairs together.

        Args:
            network: ``policy``, ``average``, or the name of another adapter.
        Returns: the adapter's tensors by peft's names without a model prefix and its configuration; where all
            parameters train, diffusers' names and none.
        """
        if self.lora_config is None:
            named = self._trained(network)
            return ((name, sharding.full(tensor)) for name, tensor in named.items()), None
        if network in ("policy", "average"):
            named = {name.replace(f".{lora.POLICY}.weight", ".weight"): t for name, t in self._trained(network).items()}
        else:
            sharding.reshard(self.module)
            named = dict(lora.adapter_parameters(self.module, network))
        return ((name, sharding.full(tensor)) for name, tensor in named.items()), lora.peft_config(self.lora_config)

    def save_checkpoint(self, folder: str | Path, extra: Mapping[str, Any] | None = None) -> list[str]:
        """Write everything that training goes on from, read it back and compare; all ranks together.

        Args:
            extra: JSON values to keep along.
        Returns: the files' names, on every rank.
        Raises:
            StoreError: what was read back differs, or the disk is full or refuses the write.
        """
        return [file.name for file in checkpoint.save(self, Path(folder), extra or {})]

    def load_checkpoint(self, folder: str | Path) -> dict[str, Any]:
        """Go on from a checkpoint, written by any number of ranks; return its ``extra``.

        Raises:
            StoreError: missing or changed files. ConfigError: a checkpoint of another model, adapter or optimizer; all
                differences are told.
        """
        return checkpoint.load(self, Path(folder))

    def to(self, device: str, *, model: bool = True, optimizer: bool = True) -> None:
        """Move parameters and optimizer state, for instance off a device that generation needs for a while."""
        if model:
            for module in (self.module, self._reference):
                if module is not None:
                    sharding.reshard(module)
                    module.to(device)
            if self.ema is not None:
                self.ema.tensors = {name: tensor.to(device) for name, tensor in self.ema.tensors.items()}
        if optimizer:
            for state in self.optimizer.state.values():
                for key, value in state.items():
                    if isinstance(value, Tensor) and key != "step":
                        state[key] = value.to(device)

    @contextmanager
    def _network(self, name: str) -> Iterator[nn.Module]:
        if name == "policy":
            yield self.module
        elif name == "average":
            average = self._average()
            sharding.reshard(self.module)
            with average.applied():
                yield self.module
                sharding.reshard(self.module)
        elif name == lora.REFERENCE and self.lora_config is None:
            if self._reference is None:
                raise ConfigError("this trainer keeps no frozen copy; build it with reference=True to compare with one")
            yield self._reference
        else:
            with self.use_adapter(name):
                yield self.module

    def _trained(self, network: str) -> dict[str, Tensor]:
        if network == "average":
            return dict(self._average().tensors)
        return dict(self.trainable)

    def _average(self) -> PolicyAverage:
        if self.ema is None:
            raise ConfigError("this trainer keeps no average of the policy; set training.ema_decay")
        return self.ema

    def _shard(self, module: nn.Module, compute_dtype: torch.dtype | None) -> None:
        if compute_dtype is not None and self.ranks.group is None:
            self.ranks = alone(self.device)
        sharding.shard(
            module, self.adapter.facts.shard_blocks, self.ranks, device=self.device, compute_dtype=compute_dtype
        )

    def _norm(self, gradients: list[Tensor]) -> float:
        if not gradients:
            return 0.0
        norms = torch.stack(torch._foreach_norm(gradients)).double().cpu()
        return float(self.ranks.sum(norms.square().sum()).sqrt())
