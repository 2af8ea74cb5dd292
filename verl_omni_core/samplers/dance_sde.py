"""The stochastic sampler of DanceGRPO: the reverse SDE with a constant diffusion coefficient.

Source: DanceGRPO, Xue et al. 2025 (arXiv:2505.07818), section 3.1. The density keeps its normaliser, as in the authors'
code; two projects that copied the step dropped it.
"""

from dataclasses import dataclass, field

from torch import Tensor

from verl_omni_core.samplers._contract import Transition
from verl_omni_core.samplers._transition import (
    check_inputs,
    complete,
    euler,
    gaussian_log_density,
    noise_levels,
    per_row,
    predict_clean,
)

IS_STOCHASTIC = True


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
    """Move or score with diffusion ``eta`` and spread ``eta sqrt(s - s')``; ``std_dev_t`` is that spread.

    ``sigma_second`` has no part in it. Arguments, shapes and errors: ``TransitionRule.step``.
    """
    check_inputs(sample, velocity, sigma, sigma_next, noise, prev_sample)
    diffusion = noise_levels(noise_level, sigma)
    std = diffusion * (sigma - sigma_next).sqrt()
    # the mean of flow_sde in the authors' order of operations: at low noise the two round apart by 1e-5
    s = per_row(sigma, sample)
    score = -(sample - predict_clean(sample, velocity, sigma) * (1 - s)) / s**2
    correction = -0.5 * per_row(diffusion.square(), sample) * score * per_row(sigma_next - sigma, sample)
    return complete(
        euler(sample, velocity, sigma, sigma_next) + correction,
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
