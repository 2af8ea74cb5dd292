"""Divergences from a reference policy. ``B`` rows, ``X`` latent axes."""

import torch
from torch import Tensor

ESTIMATE_BOUND = 20.0
"""Log-ratios are clamped to this before k3 takes their exponential."""
K3_BOUND = 10.0


def mean_space_kl(mean_BX: Tensor, other_mean_BX: Tensor, scale_B: Tensor) -> Tensor:
    """Return ``mean((mean - other)^2) / (2 scale^2)`` of each row, [B].

    With the full standard deviation as scale this is the divergence, an element, of two Gaussians that share it.

    Args:
        mean_BX: [B, X] fp32 with gradient. other_mean_BX: [B, X] fp32, no gradient flows through it.
        scale_B: [B] fp32, greater than 0.

    Raises:
        ValueError: shapes differ, or a scale on the CPU is not positive: the steps behind the means are deterministic.
    Source: Flow-GRPO, Liu et al. 2025 (arXiv:2505.05470), equation 9.
    """
    if mean_BX.shape != other_mean_BX.shape:
        raise ValueError(f"means have shapes {tuple(mean_BX.shape)} and {tuple(other_mean_BX.shape)}; expected equal")
    # on another device the question would wait for it, and replay has refused deterministic steps before
    if scale_B.device.type == "cpu" and not bool((scale_B > 0).all()):
        rows = (~(scale_B > 0)).nonzero().flatten().tolist()
        raise ValueError(f"the scale of rows {rows} is not positive; the divergence needs stochastic steps")
    distance_B = (mean_BX - other_mean_BX.detach()).square().flatten(1).mean(dim=1)
    return distance_B / (2 * scale_B.detach().square())


def velocity_kl(velocity_BX: Tensor, other_velocity_BX: Tensor) -> Tensor:
    """Return the mean squared difference of two velocities of each row, [B]; gradient through the first."""
    if velocity_BX.shape != other_velocity_BX.shape:
        raise ValueError(
            f"velocities have shapes {tuple(velocity_BX.shape)} and {tuple(other_velocity_BX.shape)}; expected equal"
        )
    return (velocity_BX - other_velocity_BX.detach()).square().flatten(1).mean(dim=1)


def estimate_kl(log_probs: Tensor, ref_log_probs: Tensor, estimator: str) -> Tensor:
    """Return the estimate of the divergence from the log-probs of one sample each, elementwise.

    Args:
        log_probs, ref_log_probs: any equal shapes, nats; gradient through the first.
        estimator: ``k1`` (``kl``), ``abs``, ``k2`` (``mse``) or ``k3`` (``low_var_kl``); with ``+`` the value is kept
            and the gradient is that of ``k2``, the estimator whose gradient is unbiased.

    Raises:
        ValueError: no such estimator.
    Source: Schulman, "Approximating KL divergence", 2020; bounds as commonly used for token policies.
    """
    if estimator.endswith("+"):
        value = estimate_kl(log_probs, ref_log_probs, estimator[:-1])
        gradient = estimate_kl(log_probs, ref_log_probs, "k2")
        return gradient - gradient.detach() + value.detach()
    difference = log_probs - ref_log_probs
    if estimator in ("k1", "kl"):
        return difference
    if estimator == "abs":
        return difference.abs()
    if estimator in ("k2", "mse"):
        return 0.5 * difference.square()
    if estimator in ("k3", "low_var_kl"):
        backwards = (-difference).clamp(-ESTIMATE_BOUND, ESTIMATE_BOUND)
        return (torch.exp(backwards) - backwards - 1).clamp(-K3_BOUND, K3_BOUND)
    raise ValueError(f"KL estimator {estimator!r} does not exist; known: k1, abs, k2, k3, each also with a trailing +")
