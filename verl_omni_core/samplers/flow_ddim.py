"""DDIM with noise for flow-matching models.

Source: DiffusionNFT, Zheng et al. 2025 (arXiv:2509.16117), sampler option of its code; DDIM, Song et al. 2021
(arXiv:2010.02502), with alpha = 1 - sigma. Unlike that code this step also scores a given result.
"""

from dataclasses import dataclass, field

from torch import Tensor

from verl_omni_core.samplers._contract import Transition
from verl_omni_core.samplers._transition import (
    check_inputs,
    complete,
    gaussian_log_density,
    noise_levels,
    per_row,
    predict_clean,
    predict_noise,
)

IS_STOCHASTIC = True
MAX_NOISE_LEVEL = 1.0
"""Above it the first step would add more noise than its level holds."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the rule."""

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
    include_logprob_normalizer: bool = True,
) -> Transition:
    """Move or score with spread ``eta s' sqrt(1 - (s' (1 - s))^2 / (s (1 - s'))^2)``; ``std_dev_t`` is that spread.

    ``sigma_second`` has no part in it. Arguments, shapes and errors: ``TransitionRule.step``.
    """
    check_inputs(sample, velocity, sigma, sigma_next, noise, prev_sample)
    # neighbouring levels of a fine grid leave a small difference of squares
    s, s_next = sigma.double(), sigma_next.double()
    kept = (s_next * (1 - s) / (s * (1 - s_next))).square()
    std = noise_levels(noise_level, sigma, most=MAX_NOISE_LEVEL).double() * s_next * (1 - kept).sqrt()
    direction = (s_next.square() - std.square()).clamp(min=0).sqrt().float()
    std = std.float()
    clean, towards = predict_clean(sample, velocity, sigma), predict_noise(sample, velocity, sigma)
    return complete(
        per_row(1 - sigma_next, sample) * clean + per_row(direction, sample) * towards,
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
