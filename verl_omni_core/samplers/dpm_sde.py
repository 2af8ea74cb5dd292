"""First-order stochastic DPM-Solver for flow-matching models.

Source: SDE-DPM-Solver++, Lu et al. 2022 (arXiv:2211.01095), equations 18 and 19, with alpha = 1 - sigma; an option of
MixGRPO (arXiv:2507.21802).
"""

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from verl_omni_core.samplers._contract import Transition
from verl_omni_core.samplers._transition import (
    check_inputs,
    complete,
    gaussian_log_density,
    per_row,
    predict_clean,
    predict_noise,
)

IS_STOCHASTIC = True

Variant = Literal["dpmsolver++", "dpmsolver"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the rule."""

    algorithm_type: Variant = field(
        default="dpmsolver++",
        metadata={
            "description": "Extrapolate the clean prediction (++) or the noise prediction, which has no step from 1."
        },
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
    algorithm_type: Variant = "dpmsolver++",
    include_logprob_normalizer: bool = True,
) -> Transition:
    """Move or score with spread ``s' sqrt(1 - e^-2H)`` (``++``), H the stride in log signal-to-noise.

    ``std_dev_t`` is the spread. The method has no noise level: ``noise_level`` and ``sigma_second`` have no part in it.
    Arguments, shapes and errors: ``TransitionRule.step``.
    """
    check_inputs(sample, velocity, sigma, sigma_next, noise, prev_sample)
    s, s_next = sigma.double(), sigma_next.double()
    shrink = (1 - s) * s_next / (s * (1 - s_next))
    if algorithm_type == "dpmsolver++":
        prediction = predict_clean(sample, velocity, sigma)
        keep, gain = s_next / s * shrink, (1 - s_next) * (1 - shrink.square())
        std = s_next * (1 - shrink.square()).sqrt()
    else:
        prediction = predict_noise(sample, velocity, sigma)
        keep, gain = (1 - s_next) / (1 - s), 2 * (s_next - s * (1 - s_next) / (1 - s))
        std = s_next * (shrink.pow(-2) - 1).sqrt()
    std = std.float()
    return complete(
        per_row(keep.float(), sample) * sample + per_row(gain.float(), sample) * prediction,
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
