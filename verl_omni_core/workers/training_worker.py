"""One rank's training loop over batches in memory: no store, no cluster."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from verl_omni_core.errors import ContractError
from verl_omni_core.metrics.reduce import Accumulator
from verl_omni_core.training.engine import Counters
from verl_omni_core.training.losses import LossFunction
from verl_omni_core.training.ppo_engine import BatchResult, PPODiffusersFSDPEngine
from verl_omni_core.training.ranks import vote


@dataclass(frozen=True)
class MiniBatchResult:
    """What one optimizer step did, equal on all ranks."""

    metrics: Accumulator
    """By the names of ``actor/*``."""
    ratio_deviation: float | None
    """See :class:`BatchResult`; none without rows, or where a log-prob is not finite."""
    skipped: bool


class TrainingWorker:
    """Trains a :class:`PPODiffusersFSDPEngine` on mini-batches; all ranks call the same methods in the same order."""

    def __init__(self, engine: PPODiffusersFSDPEngine, loss_fn: LossFunction | None = None) -> None:
        self.engine = engine
        self._loss_fn = loss_fn

    def reset(self) -> None:
        """Build network, adapters, optimizer and schedule anew, as they are before the first step."""
        self.engine.initialize()
        self.engine.counters = Counters()

    def set_loss_fn(self, loss_fn: LossFunction) -> None:
        """Choose the loss; see :func:`verl_omni_core.training.losses.diffusion_loss`."""
        self._loss_fn = loss_fn

    def to(self, device: str, *, model: bool = True, optimizer: bool = True) -> None:
        """Move parameters and optimizer state."""
        self.engine.to(device, model=model, optimizer=optimizer)

    def train_mini_batch(
        self,
        batch: TensorDict,
        *,
        check: Callable[[BatchResult], None] | None = None,
        before_step: Callable[[], None] | None = None,
    ) -> MiniBatchResult:
        """Make one optimizer step.

        Args:
            batch: this rank's rows; see :mod:`verl_omni_core.training.ppo_engine`.
            check: may refuse the step by what the passes say; called with the same result on all ranks.
            before_step: may refuse the step on this rank alone. The ranks vote after it: one refusal, and none steps.
        Raises:
            What refused, on the rank where it did; ContractError on the others. NumericError: too many skipped steps.
        """
        if self._loss_fn is None:
            raise ContractError("this worker has no loss; call set_loss_fn first")
        engine = self.engine
        engine.optimizer_zero_grad()
        result = engine.forward_backward_batch(batch, self._loss_fn, check=check)
        try:
            vote(engine.ranks, before_step)
        except BaseException:
            engine.optimizer_zero_grad()
            raise
        metrics = Accumulator()
        if result.pairs == 0:
            engine.skip_step("no row of the mini-batch is valid")
            is_skipped = True
        else:
            step = engine.optimizer_step()
            is_skipped = step.skipped
            if not is_skipped:  # what is not finite would hide the other mini-batches' numbers; the skip is counted
                metrics = result.metrics
                metrics.add({"actor/grad_norm": step.grad_norm})
        metrics.add({"actor/skipped_steps": float(is_skipped), "actor/optimizer_steps": float(not is_skipped)})
        has_ratios = result.pairs > 0 and math.isfinite(result.ratio_deviation)
        return MiniBatchResult(metrics, result.ratio_deviation if has_ratios else None, is_skipped)

    def train_batch(self, mini_batches: Sequence[TensorDict]) -> list[MiniBatchResult]:
        """Make an optimizer step on each mini-batch, then advance the learning rate once."""
        results = [self.train_mini_batch(batch) for batch in mini_batches]
        self.engine.lr_scheduler_step()
        return results

    def infer_batch(self, batch: TensorDict, network: str = "policy", *, means: bool = False) -> TensorDict:
        """Score stored steps without gradient; see :meth:`PPODiffusersFSDPEngine.infer_batch`."""
        return self.engine.infer_batch(batch, network, means=means)

    def save_checkpoint(self, folder: str | Path, extra: dict[str, Any] | None = None) -> list[str]:
        """Write a checkpoint, read it back and compare; returns the names of its files."""
        return self.engine.save_checkpoint(folder, extra)

    def load_checkpoint(self, folder: str | Path) -> dict[str, Any]:
        """Go on from a checkpoint; returns what was kept along with it."""
        return self.engine.load_checkpoint(folder)

    def copy_adapter(self, source: str, target: str) -> None:
        """Make an adapter equal to another."""
        self.engine.copy_adapter(source, target)

    def ema_update_adapter(self, source: str, target: str, decay: float) -> None:
        """Move an adapter towards another."""
        self.engine.ema_update_adapter(source, target, decay)


def set_deterministic(deterministic: bool) -> None:
    """Choose deterministic kernels where torch has them; it warns where it has none."""
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    # kernels write all of their output; filling it first only costs
    torch.utils.deterministic.fill_uninitialized_memory = False
