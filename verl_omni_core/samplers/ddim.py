"""DDIM with noise for variance-preserving models that predict noise, the clean sample or v.

Such a model has no flow-matching level. Its ``sigma`` here is noise over signal, ``sqrt(1 / alpha_bar - 1)``, as
diffusers' schedulers name it: fp32 resolves it at both ends of the schedule. ``velocity`` is what the network predicts.

Source: DDIM, Song et al. 2021 (arXiv:2010.02502), equations 12 and 16; as a policy in DDPO (arXiv:2305.13301) and
DanceGRPO (arXiv:2505.07818).
"""

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from verl_omni_core.samplers._contract import Transition
from verl_omni_core.samplers._transition import check_inputs, complete, gaussian_log_density, noise_levels, per_row

IS_STOCHASTIC = True
MAX_NOISE_LEVEL = 1.0
"""DDPM's own spread; above it a step may add more noise than its level holds."""

PredictionType = Literal["epsilon", "sample", "v_prediction"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the rule."""

    prediction_type: PredictionType = field(
        default="epsilon", metadata={"description": "What the network predicts, by diffusers' names."}
    )
    include_logprob_normalizer: bool = field(
        default=True, metadata={"description": "Keep the density's constant terms; they cancel in every ratio."}
    )


def step(
    sample: Tensor,
    velocity: Tensor,
    *,
    sigma: Tensor,
    sigma_next: Tensor,
    sigma_second: float,
    noise_level: float | Tensor,
    noise: Tensor | None = None,
    prev_sample: Tensor | None = None,
    prediction_type: PredictionType = "epsilon",
    include_logprob_normalizer: bool = True,
) -> Transition:
    """Move or score with spread ``eta sqrt(V)``, V the variance of DDPM's posterior; ``std_dev_t`` is that spread.

    Args:
        velocity: [B, X] fp32 the prediction named by ``prediction_type``.
        sigma, sigma_next: [B] fp32 ``sqrt(1 / alpha_bar - 1)`` before and after the move.
        sigma_second: no part in it. Others, shapes and errors: ``TransitionRule.step``.
    """
    check_inputs(sample, velocity, sigma, sigma_next, noise, prev_sample)
    alpha, alpha_next = (1 / (1 + level.double().square()) for level in (sigma, sigma_next))
    beta, beta_next = (level.double().square() / (1 + level.double().square()) for level in (sigma, sigma_next))
    variance = beta_next / beta * (1 - alpha / alpha_next)
    std = noise_levels(noise_level, sigma, most=MAX_NOISE_LEVEL).double() * variance.sqrt()
    direction = (beta_next - std.square()).clamp(min=0).sqrt().float()
    std = std.float()
    signal, spread = per_row(alpha.sqrt().float(), sample), per_row(beta.sqrt().float(), sample)
    if prediction_type == "epsilon":
        clean, towards = (sample - spread * velocity) / signal, velocity
    elif prediction_type == "sample":
        clean, towards = velocity, (sample - signal * velocity) / spread
    else:
        clean, towards = signal * sample - spread * velocity, signal * velocity + spread * sample
    return complete(
        per_row(alpha_next.sqrt().float(), sample) * clean + per_row(direction, sample) * towards,
        std=std,
        std_dev_t=std,
        sigma=sigma,
        sigma_next=sigma_next,
        noise=noise,
        prev_sample=prev_sample,
        log_density=lambda residual: gaussian_log_density(
            residual, std, include_logprob_normalizer=include_logprob_normalizer
        ),
    )
