"""How a reward is scored against the other samples of its prompt.

Axes: ``N`` samples of a step in any order, ``P`` groups, ``K`` rewards.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class GroupStatistics(NamedTuple):
    """Per sample and per group, over the valid samples of each group; fp64."""

    slots: Tensor
    """[N] int64, the sample's group."""
    counts: Tensor
    """[P] valid samples."""
    centred: Tensor
    """[N] reward minus the group's mean; exactly 0 for invalid samples and in groups whose rewards are all equal."""
    squares: Tensor
    """[P] sum of squared ``centred``."""


def group_statistics(rewards_N: Tensor, group_ids_N: Tensor, valid_N: Tensor) -> GroupStatistics:
    """Return the groups' sizes, centred rewards and spreads over valid samples.

    Args:
        rewards_N: [N] float; non-finite where invalid is fine.
        group_ids_N: [N] int, equal for samples of one prompt.
        valid_N: [N] bool.

    Raises:
        ValueError: shapes differ, or a valid reward is not finite.
    """
    if rewards_N.ndim != 1 or rewards_N.shape != group_ids_N.shape or rewards_N.shape != valid_N.shape:
        raise ValueError(
            f"expected three 1-D tensors of equal length, got rewards {tuple(rewards_N.shape)}, group_ids "
            f"{tuple(group_ids_N.shape)} and valid {tuple(valid_N.shape)}; combine reward columns before calling"
        )
    valid_N = valid_N.bool()
    bad = valid_N & ~rewards_N.isfinite()
    if bad.any():
        raise ValueError(f"rewards of rows {bad.nonzero().flatten().tolist()} are not finite; mark them invalid")
    _, slots = torch.unique(group_ids_N, return_inverse=True)
    groups = int(slots.max()) + 1 if len(slots) else 0
    kept = valid_N.double()
    values = torch.where(valid_N, rewards_N, torch.zeros_like(rewards_N)).double()  # fp32 sums lose near-equal rewards
    zeros = values.new_zeros(groups)
    counts = zeros.index_add(0, slots, kept)
    means = zeros.index_add(0, slots, values) / counts.clamp(min=1)
    lowest = torch.where(valid_N, values, torch.inf)
    highest = torch.where(valid_N, values, -torch.inf)
    spread = zeros.scatter_reduce(0, slots, highest, "amax", include_self=False) - zeros.scatter_reduce(
        0, slots, lowest, "amin", include_self=False
    )
    centred = torch.where(valid_N & (spread[slots] > 0), values - means[slots], 0.0)
    return GroupStatistics(slots, counts, centred, zeros.index_add(0, slots, centred.square()))


def group_advantages(
    rewards_N: Tensor,
    group_ids_N: Tensor,
    valid_N: Tensor,
    *,
    normalize_std: bool = True,
    global_std: bool = True,
    std_epsilon: float = 1e-4,
    std_ddof: int = 1,
) -> Tensor:
    """Score each sample against the other samples of its prompt.

    ``(r - mean of the group) / (spread + std_epsilon)``, with the spread of all valid rewards of the step or of the
    group. Invalid samples enter no statistic and change no other sample's score.

    Args:
        rewards_N: [N] float, combined reward in reward units; higher is better.
        group_ids_N: [N] int, equal for samples of one prompt; any order.
        valid_N: [N] bool; false where the reward is missing.
        normalize_std: divide by a spread; false as in Dr.GRPO (arXiv:2503.20783).
        global_std: the spread of the whole step, else of the group (1 for a group of one).
        std_epsilon: added to the spread, in reward units.
        std_ddof: 1 for the unbiased spread, 0 for the population's.

    Returns: [N] fp32, unitless with ``normalize_std``; zero for invalid samples, in groups with fewer than two valid
        samples and in groups whose rewards are all equal.
    Raises: ValueError as :func:`group_statistics`.
    Source: GRPO, Shao et al. 2024 (arXiv:2402.03300); Flow-GRPO, Liu et al. 2025 (arXiv:2505.05470). The spread is
        taken over the N rewards once, not over their copies at each trained step.
    """
    groups = group_statistics(rewards_N, group_ids_N, valid_N)
    if not normalize_std:
        return groups.centred.float()
    if global_std:
        spread_N = _spread_of_all(rewards_N, valid_N, std_ddof).expand_as(groups.centred)
    else:
        spread_N = _spread(groups.squares, groups.counts, std_ddof)[groups.slots]
    return (groups.centred / (spread_N + std_epsilon)).float()


def gdpo_advantages(
    rewards_KN: Tensor, weights_K: Tensor, group_ids_N: Tensor, valid_N: Tensor, *, std_floor: float = 1e-6
) -> Tensor:
    """Score several rewards separately within the groups, add them up by weight and whiten the sum over the step.

    Args:
        rewards_KN: [K, N] float. weights_K: [K] float. group_ids_N: [N] int. valid_N: [N] bool.
        std_floor: a spread below this counts as this, in reward units.

    Returns: [N] fp32; zero for invalid samples.
    Raises: ValueError as :func:`group_statistics`, or if rewards and weights do not match.
    Source: GDPO (arXiv:2601.05242), population spreads over the batch of samples.
    """
    if rewards_KN.ndim != 2 or weights_K.shape != rewards_KN.shape[:1]:
        raise ValueError(
            f"got rewards {tuple(rewards_KN.shape)} and weights {tuple(weights_K.shape)}; expected [K, N] and [K]"
        )
    total = torch.zeros(rewards_KN.shape[1], dtype=torch.float64)
    for rewards_N, weight in zip(rewards_KN, weights_K.double(), strict=True):
        groups = group_statistics(rewards_N, group_ids_N, valid_N)
        spread_N = _spread(groups.squares, groups.counts, 0, lone=0.0)[groups.slots].clamp(min=std_floor)
        total += weight * groups.centred / spread_N
    whole = group_statistics(total, torch.zeros_like(group_ids_N), valid_N)
    return (whole.centred / _spread(whole.squares, whole.counts, 0, lone=0.0).clamp(min=std_floor)).float()


def _spread_of_all(rewards_N: Tensor, valid_N: Tensor, ddof: int) -> Tensor:
    whole = group_statistics(rewards_N, torch.zeros_like(valid_N, dtype=torch.int64), valid_N)
    return _spread(whole.squares, whole.counts, ddof)


def _spread(squares_P: Tensor, counts_P: Tensor, ddof: int, lone: float = 1.0) -> Tensor:
    spread = (squares_P / (counts_P - ddof).clamp(min=1)).sqrt()
    return torch.where(counts_P > 1, spread, torch.full_like(spread, lone))
