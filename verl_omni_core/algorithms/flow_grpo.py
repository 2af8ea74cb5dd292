"""Flow-GRPO: clipped importance ratios of stored denoising steps, advantages within prompt groups.

With ``sampler.name = "dance_sde"`` this is also DanceGRPO, whose loss is the same.

Source: Flow-GRPO, Liu et al. 2025 (arXiv:2505.05470); DanceGRPO, Xue et al. 2025 (arXiv:2505.07818). Dr.GRPO
(arXiv:2503.20783) for ``normalize_std = false``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from verl_omni_core.algorithms._advantages import group_advantages
from verl_omni_core.algorithms._contract import Current, LossOutput, require
from verl_omni_core.algorithms._kl import mean_space_kl
from verl_omni_core.algorithms._ratios import clipped_surrogate, importance_ratio, ratio_metrics
from verl_omni_core.errors import ContractError

EVALUATION = "replay"
REQUIRES = ("old_log_probs", "advantages")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the algorithm."""

    clip_range: float = field(
        default=1e-4, metadata={"gt": 0, "description": "How far a ratio may leave 1 before its gradient stops."}
    )
    adv_clip: float = field(
        default=5.0, metadata={"gt": 0, "description": "Advantages are clamped to plus and minus this in the loss."}
    )
    kl_coef: float = field(
        default=0.0, metadata={"ge": 0, "description": "Weight of the divergence from the reference policy."}
    )
    kl_scale: Literal["std_dev_t", "tau"] = field(
        default="std_dev_t",
        metadata={
            "description": "Divide the divergence by std_dev_t, as published coefficients assume, or by the full "
            "standard deviation; they differ for flow_sde, by the step's length."
        },
    )
    normalize_std: bool = field(
        default=True, metadata={"description": "Divide advantages by a spread of rewards at all."}
    )
    global_std: bool = field(
        default=True, metadata={"description": "Divide by the spread of the step's rewards, else by the group's."}
    )
    std_epsilon: float = field(
        default=1e-4, metadata={"gt": 0, "description": "Added to the spread of rewards, in reward units."}
    )
    std_ddof: Literal[0, 1] = field(default=1, metadata={"description": "1: unbiased spread; 0: the population's."})


def requires(options: Options) -> tuple[str, ...]:
    """Return the tensors that :func:`loss` reads from the batch under ``options``."""
    return (*REQUIRES, "ref_prev_sample_mean") if options.kl_coef > 0 else REQUIRES


def advantages(rewards: Tensor, group_ids: Tensor, valid: Tensor, options: Options) -> Tensor:
    """Return the advantages [N] fp32, not clamped; see :func:`group_advantages`."""
    return group_advantages(
        rewards,
        group_ids,
        valid,
        normalize_std=options.normalize_std,
        global_std=options.global_std,
        std_epsilon=options.std_epsilon,
        std_ddof=options.std_ddof,
    )


def loss(current: Current, batch: Mapping[str, Tensor], options: Options) -> LossOutput:
    """Return the loss of each row and the rows behind its metrics.

    Args:
        current: the policy's outputs on the rows.
        batch: ``old_log_probs`` [B], ``advantages`` [B], with ``kl_coef`` above 0 ``ref_prev_sample_mean`` [B, X]; if
            there, ``rollout_is_weights`` [B] multiply the ratio term, without gradient.

    Raises:
        ContractError: a tensor is missing or has not one value a row.
        TypeError: log-probs are not fp32.
        ValueError: the steps of a divergence are deterministic.
    """
    require(batch, requires(options), "flow_grpo")
    old_log_probs = batch["old_log_probs"]
    for name, tensor in {"log_probs": current.log_probs, "old_log_probs": old_log_probs}.items():
        if tensor.dtype != torch.float32:
            raise TypeError(f"{name} are {tensor.dtype}; keep log-probs in float32, ratios differ from 1 by 1e-5")
        if tensor.shape != batch["advantages"].shape or tensor.ndim != 1:
            raise ContractError(
                f"{name} have shape {tuple(tensor.shape)}, advantages {tuple(batch['advantages'].shape)}; expected [B] "
                "each, one stored step a row"
            )
    ratio = importance_ratio(current.log_probs, old_log_probs)
    clamped = batch["advantages"].clamp(-options.adv_clip, options.adv_clip)
    total = clipped_surrogate(ratio, clamped, clip_range=options.clip_range)
    weights = batch.get("rollout_is_weights", None)
    if weights is not None:
        total = weights.detach() * total
    metrics = ratio_metrics(current.log_probs, old_log_probs, ratio, clip_range=options.clip_range)
    if options.kl_coef > 0:
        scale = current.std_dev_t if options.kl_scale == "std_dev_t" else current.std
        divergence = mean_space_kl(current.prev_sample_mean, batch["ref_prev_sample_mean"], scale)
        total = total + options.kl_coef * divergence
        metrics["actor/kl_loss"] = divergence.detach()
        metrics["actor/kl_coef"] = torch.full_like(divergence.detach(), options.kl_coef)
    return LossOutput(total, metrics)
