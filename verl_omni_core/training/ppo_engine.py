"""The policy-gradient engine: replays stored steps and back-propagates an algorithm's loss.

A batch is a TensorDict of no batch size with two entries:

* ``rows`` [R]: ``all_latents`` [R, W+1, X] fp32, ``prompt_index`` [R] int64, ``weight`` [R] fp32 (0: padding, or a row
  that must not count), ``advantages`` [R] fp32, optionally ``pack`` [R] int64, and ``steps`` [R, W]: ``step_indices``
  int64, ``all_timesteps``, ``rollout_log_probs``, ``old_log_probs``, ``ref_prev_sample_mean`` [R, W, X] ..., all fp32;
* ``conditioning`` [P]: what the network is told about each prompt, by the adapter's names.

The gradient is that of the mean over all (row, step) pairs of the mini-batch on all ranks, weighted by ``weight``, for
any number of rows a rank, zero included, and any ``training.micro_batch``.

Axes: ``R`` samples, ``W`` stored steps, ``B`` rows of a forward pass (pairs of sample and step), ``P`` prompts, ``X``
latent axes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from verl_omni_core.algorithms._contract import Current, LossOutput
from verl_omni_core.batches import columns
from verl_omni_core.errors import ContractError, StageLost
from verl_omni_core.metrics.reduce import Accumulator
from verl_omni_core.training import sharding
from verl_omni_core.training.engine import DiffusersFSDPEngine
from verl_omni_core.training.losses import LossFunction, weighted
from verl_omni_core.training.micro_batches import Pair, forward_passes
from verl_omni_core.training.replay import Denoising, check_timesteps, score_step

_LOSS = "actor/loss"
_NOT_FOR_LOSSES = ("all_latents", "prompt_index", "weight", "pack", "steps")


@dataclass(frozen=True)
class BatchResult:
    """What the passes over a mini-batch say, equal on all ranks."""

    metrics: Accumulator
    """The algorithm's metrics and ``actor/loss``, over all rows that count."""
    ratio_deviation: float
    """Largest ``|exp(log_probs - rollout_log_probs) - 1|``; against ``old_log_probs`` where the engine gave none."""
    pairs: float
    """Total weight; zero: nothing was computed and there is no gradient."""


class _Passes:
    """What this rank's passes say; stays on their device until all of them are through."""

    def __init__(self) -> None:
        self._rows: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self._deviations: list[Tensor] = []

    def add(self, current: Current, stored: Mapping[str, Tensor], output: LossOutput, weight: Tensor) -> None:
        for name, values in {_LOSS: output.loss.detach(), **output.metrics}.items():
            self._rows.setdefault(name, []).append((values, weight))
        drawn = stored.get(columns.ROLLOUT_LOG_PROBS, stored.get(columns.OLD_LOG_PROBS))
        if drawn is not None:
            away = (torch.exp(current.log_probs.detach() - drawn) - 1).abs()
            self._deviations.append(torch.where(weight > 0, away, 0.0).max())

    def metrics(self) -> Accumulator:
        """Return the metrics of all rows; a name whose rows all have weight 0 is left out."""
        found = Accumulator()
        for name, rows in self._rows.items():
            values, weights = (torch.cat(parts).cpu() for parts in zip(*rows, strict=True))
            sizes = [len(weight) for _, weight in rows]
            for value, weight in zip(values.split(sizes), weights.split(sizes), strict=True):
                found.add({name: value}, weight)
        return found

    def names(self) -> list[str]:
        """Return the metrics' names, sorted, those without rows included."""
        return sorted(self._rows)

    def deviation(self) -> Tensor:
        """Return the largest ``|ratio - 1|`` as a CPU tensor; nan if there is one."""
        return torch.stack(self._deviations).max().cpu() if self._deviations else torch.zeros(())


class PPODiffusersFSDPEngine(DiffusersFSDPEngine):
    """FlowGRPO and its relatives: likelihood ratios of stored stochastic steps."""

    denoising: Denoising

    def set_denoising(self, denoising: Denoising) -> None:
        """Say how the rollout moved latents; needed before the first batch."""
        self.denoising = denoising

    def prepare_model_inputs(self, batch: TensorDict, pairs: list[Pair]) -> dict[str, Tensor | TensorDict]:
        """Return what a forward pass over (sample, step) pairs reads, on the engine's device but for ``step_index``.

        Args:
            batch: its ``conditioning`` may be on the device already.
        """
        rows = batch["rows"]
        sample, step = torch.tensor(pairs, dtype=torch.int64).T
        conditioning = batch["conditioning"]
        prompts = rows["prompt_index"][sample].to(next(iter(conditioning.values())).device, non_blocking=True)
        latents = rows["all_latents"]
        return {
            "latents": latents[sample, step].to(self.device, non_blocking=True),
            "next_latents": latents[sample, step + 1].to(self.device, non_blocking=True),
            "step_index": rows["steps"]["step_indices"][sample, step],
            "conditioning": conditioning[prompts],
        }

    def prepare_model_outputs(
        self, inputs: Mapping[str, Tensor | TensorDict], module: nn.Module | None = None
    ) -> Current:
        """Run the network on the inputs and score the stored steps under it."""
        conditioning = dict(inputs["conditioning"].items())

        def velocity(latents: Tensor, timestep: Tensor) -> Tensor:
            return self.forward_step(latents, timestep, conditioning, self.denoising.guidance_scale, module)

        return score_step(velocity, inputs["latents"], inputs["next_latents"], inputs["step_index"], self.denoising)

    def forward_backward_batch(
        self, batch: TensorDict, loss_fn: LossFunction, *, check: Callable[[BatchResult], None] | None = None
    ) -> BatchResult:
        """Add up the gradient of a mini-batch; every rank calls it with its own rows.

        Args:
            batch: at least one row; a rank without any takes one of the others with weight 0.
            loss_fn: see :func:`verl_omni_core.training.losses.diffusion_loss`.
            check: called with the result, equal on all ranks; what it raises drops the gradient first.
        Raises:
            ContractError: no row at all, or timesteps that are not the schedule's.
            StageLost: a pass failed on one of several ranks.
        """
        rows = batch["rows"]
        self._check(rows)
        passes, total, padding = self._plan(rows)
        if total == 0:
            return BatchResult(Accumulator(), 0.0, 0.0)
        said = _Passes()
        try:
            batch = self._with_conditioning_moved(batch)
            with self.train_mode():
                for number, pairs in enumerate([*passes, *padding]):
                    is_last = number + 1 == len(passes) + len(padding)
                    sharding.sync_gradients(self.module, self._reduces_each_pass or is_last)
                    self._backward(batch, pairs, loss_fn, total, said, is_padding=number >= len(passes))
        except Exception as error:
            self.optimizer_zero_grad()
            if self.ranks.size == 1:
                raise
            # gradients that were not reduced yet cannot be dropped, and the other ranks may wait for this one
            raise StageLost(
                f"rank {self.ranks.rank} failed in a forward or backward pass ({type(error).__name__}: {error}); the "
                "ranks must be started anew, from the last checkpoint"
            ) from error
        result = self._reduce(said, total)
        if check is not None:
            try:
                check(result)
            except BaseException:
                self.optimizer_zero_grad()
                raise
        return result

    def infer_batch(self, batch: TensorDict, network: str = "policy", *, means: bool = False) -> TensorDict:
        """Score all stored steps without gradient.

        Args:
            network: see :meth:`DiffusersFSDPEngine.eval_mode`.
            means: also return the means of the steps.
        Returns: CPU TensorDict [R, W] with ``log_probs`` [R, W] and, if asked, ``prev_sample_mean`` [R, W, X], fp32.
        """
        rows = batch["rows"]
        self._check(rows)
        count, steps = rows["steps"].batch_size
        passes = self._passes(rows, range(count))
        result = TensorDict({"log_probs": torch.zeros(count, steps)}, [count, steps])
        if means:
            result["prev_sample_mean"] = torch.zeros(count, steps, *rows["all_latents"].shape[2:])
        padding = int(self.ranks.max(torch.tensor(len(passes)))) - len(passes)
        batch = self._with_conditioning_moved(batch)
        with self.eval_mode(network) as module:
            for pairs in [*passes, *[passes[0][:1]] * padding]:
                current = self.prepare_model_outputs(self.prepare_model_inputs(batch, pairs), module)
                sample, step = torch.tensor(pairs, dtype=torch.int64).T
                result["log_probs"][sample, step] = current.log_probs.cpu()
                if means:
                    result["prev_sample_mean"][sample, step] = current.prev_sample_mean.cpu()
        return result

    @property
    def _reduces_each_pass(self) -> bool:
        # unreduced gradients are whole, not sharded: nothing for an adapter, a second copy of the model otherwise
        return self.lora_config is None

    def _with_conditioning_moved(self, batch: TensorDict) -> TensorDict:
        # once a mini-batch, a row a prompt: passes index it on the device
        conditioning = batch["conditioning"].to(torch.device(self.device)).to(getattr(torch, self.model.dtype))
        return TensorDict({"rows": batch["rows"], "conditioning": conditioning}, [])

    def _check(self, rows: TensorDict) -> None:
        if not len(rows):
            raise ContractError("a rank got no row at all; give it one of the mini-batch with weight 0")
        check_timesteps(rows["steps"]["step_indices"], rows["steps"]["all_timesteps"], self.denoising)

    def _plan(self, rows: TensorDict) -> tuple[list[list[Pair]], float, list[list[Pair]]]:
        counted = rows["weight"].nonzero().flatten().tolist()
        steps = rows["steps"].batch_size[1]
        passes = self._passes(rows, counted)
        total = float(self.ranks.sum(rows["weight"].double().sum() * steps))
        most = int(self.ranks.max(torch.tensor(len(passes))))
        return passes, total, [[(0, 0)]] * (most - len(passes))

    def _passes(self, rows: TensorDict, samples: range | list[int]) -> list[list[Pair]]:
        packs = rows.get("pack", None) if self.deterministic else None
        return forward_passes(
            list(samples),
            rows["steps"].batch_size[1],
            self.training.micro_batch,
            packs=None if packs is None else packs[list(samples)].tolist(),
            mix_steps=not self.deterministic,
        )

    def _backward(
        self, batch: TensorDict, pairs: list[Pair], loss_fn: LossFunction, total: float, said: _Passes, is_padding: bool
    ) -> None:
        current = self.prepare_model_outputs(self.prepare_model_inputs(batch, pairs))
        stored, weight = self._stored(batch["rows"], pairs)
        if is_padding:
            weight = torch.zeros_like(weight)
        output = loss_fn(current, stored)
        weighted(output.loss, weight, total, self.ranks.size).backward()
        said.add(current, stored, output, weight)

    def _stored(self, rows: TensorDict, pairs: list[Pair]) -> tuple[dict[str, Tensor], Tensor]:
        sample, step = torch.tensor(pairs, dtype=torch.int64).T
        picked = {name: value[sample, step] for name, value in rows["steps"].items()}
        picked |= {name: value[sample] for name, value in rows.items() if name not in _NOT_FOR_LOSSES}
        stored = {name: value.to(self.device, non_blocking=True) for name, value in picked.items()}
        return stored, rows["weight"][sample].to(self.device, non_blocking=True)

    def _reduce(self, said: _Passes, total: float) -> BatchResult:
        names, own = said.names(), said.metrics().state()
        nothing = (0.0,) * 6
        states = self.ranks.gather(torch.tensor([own.get(name, nothing) for name in names], dtype=torch.float64))
        merged = Accumulator()
        for state in states:
            rows = zip(names, state.tolist(), strict=True)
            merged.merge({name: values for name, values in rows if values[0] > 0})
        deviation = torch.stack(self.ranks.gather(said.deviation())).max()
        return BatchResult(merged, float(deviation), total)
