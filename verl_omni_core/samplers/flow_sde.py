"""The stochastic sampler of Flow-GRPO: the reverse SDE of a flow-matching model.

Source: Flow-GRPO, Liu et al. 2025 (arXiv:2505.05470), section 4.2. The log-density is the mean over latent elements as
in its code; the joint density would be the sum.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from verl_omni_core.samplers._contract import Transition
from verl_omni_core.samplers._transition import check_inputs, complete, gaussian_log_density, noise_levels, sde_mean

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
    """Move or score with diffusion ``g = eta sqrt(s / (1 - s))`` and spread ``g sqrt(s - s')``.

    At ``s = 1`` the diffusion would be infinite; the grid's second level stands in there, in the denominator only.
    ``std_dev_t`` is ``g``, without the root of the step. Arguments, shapes and errors: ``TransitionRule.step``.
    """
    check_inputs(sample, velocity, sigma, sigma_next, noise, prev_sample)
    regular = torch.where(sigma == 1, torch.full_like(sigma, sigma_second), sigma)
    diffusion = noise_levels(noise_level, sigma) * (sigma / (1 - regular)).sqrt()
    std = diffusion * (sigma - sigma_next).sqrt()
    return complete(
        sde_mean(sample, velocity, sigma, sigma_next, diffusion),
        std=std,
        std_dev_t=diffusion,
        sigma=sigma,
        sigma_next=sigma_next,
        noise=noise,
        prev_sample=prev_sample,
        log_density=lambda residual: gaussian_log_density(
            residual, std, include_logprob_normalizer=include_logprob_normalizer
        ),
    )
