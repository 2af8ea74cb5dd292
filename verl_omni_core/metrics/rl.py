"""Metrics of rewards, advantages and log-probs of one step. ``N`` samples, ``T`` recorded steps of each."""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Sums of log-ratios are clamped to this before an exponential is taken."""


def reward_metrics(rewards: Tensor, group_ids: Tensor, valid: Tensor) -> dict[str, float]:
    """Return ``critic/rewards/*`` over valid samples.

    Args:
        rewards: [N] float, non-finite where invalid is fine. group_ids: [N] int. valid: [N] bool.

    A group counts if it has a valid sample. Without any valid sample only ``invalid_fraction`` is returned: there is
    no number to report.
    """
    valid = valid.bool()
    metrics = {"critic/rewards/invalid_fraction": float((~valid).double().mean())}
    if not bool(valid.any()):
        return metrics
    values = rewards[valid].double()
    _, slots, counts = torch.unique(group_ids[valid], return_inverse=True, return_counts=True)
    zeros = values.new_zeros(len(counts))
    means = zeros.index_add(0, slots, values) / counts
    spreads = (zeros.index_add(0, slots, (values - means[slots]).square()) / counts).sqrt()
    highest = zeros.scatter_reduce(0, slots, values, "amax", include_self=False)
    lowest = zeros.scatter_reduce(0, slots, values, "amin", include_self=False)
    return metrics | {
        **_extremes("critic/rewards", values),
        # equal rewards have spread 0; a spread computed from their rounded mean may not be
        "critic/rewards/zero_std_ratio": float((highest == lowest).double().mean()),
        "critic/rewards/std_mean": float(torch.where(highest == lowest, 0.0, spreads).mean()),
        "critic/rewards/group_size": len(rewards) / len(torch.unique(group_ids)),
    }


def advantage_metrics(advantages: Tensor, valid: Tensor) -> dict[str, float]:
    """Return ``critic/advantages/*`` and ``critic/returns/*`` (equal by definition) over valid samples.

    Args:
        advantages: [N] or [N, T], before clamping. valid: [N] bool.
    """
    kept = advantages[valid.bool()].double()
    if not kept.numel():
        return {}
    return {**_extremes("critic/advantages", kept), **_extremes("critic/returns", kept)}


def scorer_metrics(scores: Mapping[str, Sequence[object] | Tensor]) -> dict[str, float]:
    """Return ``critic/reward/{name}/mean`` of each numeric column over its finite values.

    Args:
        scores: scorer's name to one value a sample; ``combined`` for the weighted sum. Columns of text are left out,
            and so is a column without a finite value.
    """
    metrics = {}
    for name, column in scores.items():
        values = column.tolist() if isinstance(column, Tensor) else list(column)
        if any(isinstance(value, str) for value in values):
            continue
        numbers = torch.tensor([float("nan") if value is None else float(value) for value in values]).double()  # type: ignore[arg-type]
        numbers = numbers[numbers.isfinite()]
        if len(numbers):
            metrics[f"critic/reward/{name.removeprefix('reward/')}/mean"] = float(numbers.mean())
    return metrics


def rollout_correction_metrics(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    *,
    mask: Tensor | None = None,
    timesteps: Tensor | None = None,
) -> dict[str, float]:
    """Return ``rollout_corr/*``: how far the trainer's log-probs of stored steps are from the engine's.

    With matched kernels the differences are about 1e-6. ``ppl`` keeps the name that token models gave it; it is not a
    perplexity of anything here.

    Args:
        old_log_probs, rollout_log_probs: [N, T] fp32 nats a latent element.
        mask: [N, T], 0 where a value does not count; rows without any are left out.
        timesteps: [N, T]; given, differences are also reported by timestep, since a column is not one.

    Raises:
        ValueError: shapes differ, or nothing counts.
    """
    if old_log_probs.shape != rollout_log_probs.shape or old_log_probs.ndim != 2:
        raise ValueError(
            f"log-probs have shapes {tuple(old_log_probs.shape)} and {tuple(rollout_log_probs.shape)}; expected equal "
            "[N, T]"
        )
    kept = torch.ones_like(old_log_probs) if mask is None else mask
    kept = kept.double()
    counts = kept.sum(dim=1)
    if not bool((counts > 0).any()):
        raise ValueError("no log-prob counts; leave the diagnostics out of a step without valid samples")
    old, rollout = old_log_probs.double(), rollout_log_probs.double()
    present = counts > 0

    def per_row(values: Tensor) -> Tensor:
        return ((values * kept).sum(dim=1)[present]) / counts[present]

    def overall(values: Tensor) -> float:
        return float((values * kept).sum() / kept.sum())

    log_ratio = old - rollout
    bounded = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    summed = (log_ratio * kept).sum(dim=1)[present].clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    training, engine = -per_row(old), -per_row(rollout)
    drop = training - engine
    away = log_ratio.abs()
    metrics = {
        "training_ppl": float(training.exp().mean()),
        "training_log_ppl": float(training.mean()),
        "rollout_ppl": float(engine.exp().mean()),
        "rollout_log_ppl": float(engine.mean()),
        "kl": overall(-log_ratio),
        "k3_kl": overall(log_ratio.exp() - log_ratio - 1),
        "log_ppl_diff": float(drop.mean()),
        "log_ppl_abs_diff": float(drop.abs().mean()),
        "log_ppl_diff_max": float(drop.max()),
        "log_ppl_diff_min": float(drop.min()),
        "ppl_ratio": float(drop.exp().mean()),
        "chi2_token": overall((2 * bounded).exp()) - 1,
        "chi2_seq": float((2 * summed).exp().mean()) - 1,
        "logprob_abs_diff_mean": overall(away),
        "logprob_abs_diff_max": float(away[kept > 0].max()),
    }
    if timesteps is not None:
        for timestep in torch.unique(timesteps[kept > 0]).tolist():
            at = (timesteps == timestep) & (kept > 0)
            metrics[f"logprob_abs_diff/ts_{timestep:g}"] = float(away[at].mean())
    return {f"rollout_corr/{name}": value for name, value in metrics.items()}


def rollout_correction_rows(log_probs_B: Tensor, rollout_log_probs_B: Tensor) -> dict[str, Tensor]:
    """Return the rows behind ``actor/rollout_corr/*``: the policy in training against the engine, a stored step a row.

    A row is one step, so its sum over steps is its value. Reduced as ``metrics.names`` declares, the rows give what
    :func:`rollout_correction_metrics` says of [B, 1] log-probs.

    Args:
        log_probs_B, rollout_log_probs_B: [B] fp32 nats a latent element.

    Returns: [B] float64 each, detached.
    """
    current, rollout = log_probs_B.detach().double(), rollout_log_probs_B.detach().double()
    log_ratio = current - rollout
    chi2 = (2 * log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)).exp() - 1
    rows = {
        "training_ppl": (-current).exp(),
        "training_log_ppl": -current,
        "rollout_ppl": (-rollout).exp(),
        "rollout_log_ppl": -rollout,
        "kl": -log_ratio,
        "k3_kl": log_ratio.exp() - log_ratio - 1,
        "log_ppl_diff": -log_ratio,
        "log_ppl_abs_diff": log_ratio.abs(),
        "log_ppl_diff_max": -log_ratio,
        "log_ppl_diff_min": -log_ratio,
        "ppl_ratio": (-log_ratio).exp(),
        "chi2_token": chi2,
        "chi2_seq": chi2,
        "logprob_abs_diff_mean": log_ratio.abs(),
        "logprob_abs_diff_max": log_ratio.abs(),
    }
    return {f"actor/rollout_corr/{name}": values for name, values in rows.items()}


def off_policy_metrics(step: int, min_versions: np.ndarray, max_versions: np.ndarray) -> dict[str, float]:
    """Return ``training/off_policy/*``: how old the policies are that drew a step's samples.

    Args:
        step: 1-based; an on-policy sample of it has version ``step - 1``.
        min_versions, max_versions: [N] oldest and newest policy version that took part in each sample.
    """
    oldest, newest = torch.tensor(min_versions).double(), torch.tensor(max_versions).double()
    ages = {
        "trajectory_staleness": step - 1 - newest,
        "trajectory_staleness_worst": step - 1 - oldest,
        "trajectory_spans": newest - oldest + 1,
    }
    return {
        name: value
        for kind, values in ages.items()
        for name, value in _extremes(f"training/off_policy/{kind}", values).items()
    }


def old_policy_metrics(applied: bool, decay: float, kind: Literal["copy", "ema", "none"]) -> dict[str, float]:
    """Return ``old_policy/*``: whether and how the sampling policy was refreshed from the trained one."""
    return {
        "old_policy/update_applied": float(applied),
        "old_policy/copy_update": float(kind == "copy"),
        "old_policy/ema_update": float(kind == "ema"),
        "old_policy/decay": float(decay),
    }


def _extremes(prefix: str, values: Tensor) -> dict[str, float]:
    return {
        f"{prefix}/mean": float(values.mean()),
        f"{prefix}/max": float(values.max()),
        f"{prefix}/min": float(values.min()),
    }
