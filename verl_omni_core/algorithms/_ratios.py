"""The importance ratio and the losses that are written in it. ``B`` rows."""

import torch
from torch import Tensor


def importance_ratio(log_probs_B: Tensor, old_log_probs_B: Tensor) -> Tensor:
    """Return ``exp(log_probs - old_log_probs)``, [B] fp32; gradient through the first.

    Log-probs of a step are means over latent elements, so this is the D-th root of the ratio of densities: thresholds
    on it are small.
    """
    return torch.exp(log_probs_B - old_log_probs_B.detach())


def clipped_surrogate(ratio_B: Tensor, advantages_B: Tensor, *, clip_range: float) -> Tensor:
    """Return PPO's pessimistic loss of each row, [B], before any mean.

    Args:
        ratio_B: [B] importance ratios, with gradient.
        advantages_B: [B]; no gradient flows through them.
        clip_range: beyond this distance from 1 a ratio gains nothing more.

    Source: PPO, Schulman et al. 2017 (arXiv:1707.06347), equation 7.
    """
    gain_B = -advantages_B.detach()
    return torch.maximum(gain_B * ratio_B, gain_B * ratio_B.clamp(1 - clip_range, 1 + clip_range))


def ratio_metrics(
    log_probs_B: Tensor, old_log_probs_B: Tensor, ratio_B: Tensor, *, clip_range: float
) -> dict[str, Tensor]:
    """Return the rows behind the ratio's metrics, each [B] fp32 detached; ``metrics.names`` says how each reduces.

    The clipped fractions count ratios outside the range whatever the sign of the advantage.
    """
    ratio_B = ratio_B.detach()
    away_B = ratio_B - 1
    return {
        "actor/ppo_kl": old_log_probs_B.detach() - log_probs_B.detach(),
        "actor/ratio_mean": ratio_B,
        "actor/ratio_std": ratio_B,
        "actor/ratio_deviation": away_B.abs(),
        "actor/pg_clipfrac": (away_B.abs() > clip_range).float(),
        "actor/pg_clipfrac_higher": (away_B > clip_range).float(),
        "actor/pg_clipfrac_lower": (-away_B > clip_range).float(),
    }
