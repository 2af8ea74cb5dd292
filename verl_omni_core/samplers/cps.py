"""Coefficients-preserving sampling: noise is replaced, not added, so every latent keeps its noise level.

Source: Coefficients-Preserving Sampling, Wang and Yu 2025 (arXiv:2509.05952). The log-density is ``-(y - mean)^2``,
neither scaled by the variance nor normalised, as in the authors' code: it is not a Gaussian density, and its ratios
differ from one by the factor ``1 / (2 std^2)``.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from verl_omni_core.samplers._contract import Transition
from verl_omni_core.samplers._transition import (
    check_inputs,
    complete,
    noise_levels,
    per_row,
    predict_clean,
    predict_noise,
)

IS_STOCHASTIC = True
MAX_NOISE_LEVEL = 1.0
"""Above it the sine turns back, and more noise would mean less."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The rule has no options."""


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
) -> Transition:
    """Move or score with spread ``s' sin(eta pi / 2)``; ``std_dev_t`` is that spread.

    The weight of the predicted noise is ``s' cos(eta pi / 2)``: as a root of a difference it could turn negative by
    rounding. ``sigma_second`` has no part in it. Arguments and shapes: ``TransitionRule.step``.

    Raises:
        TypeError, ValueError: as the contract says.
    """
    check_inputs(sample, velocity, sigma, sigma_next, noise, prev_sample)
    angle = noise_levels(noise_level, sigma, most=MAX_NOISE_LEVEL) * (math.pi / 2)
    std = sigma_next * angle.sin()
    clean, towards = predict_clean(sample, velocity, sigma), predict_noise(sample, velocity, sigma)
    return complete(
        per_row(1 - sigma_next, sample) * clean + per_row(sigma_next * angle.cos(), sample) * towards,
        std=std,
        std_dev_t=std,
        sigma=sigma,
        sigma_next=sigma_next,
        noise=noise,
        prev_sample=prev_sample,
        log_density=lambda residual: -residual.square(),
    )
