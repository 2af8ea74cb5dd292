"""The deterministic Euler step of a flow-matching model: how validation samples, and what every stochastic rule is
without noise.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from verl_omni_core.samplers._contract import Transition
from verl_omni_core.samplers._transition import check_inputs, euler

IS_STOCHASTIC = False


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
    """Move by ``x + (s' - s) v``; spread 0, no log-prob, whatever ``noise_level`` and ``noise`` are.

    Arguments, shapes and errors: ``TransitionRule.step``.
    """
    check_inputs(sample, velocity, sigma, sigma_next, noise, prev_sample)
    mean, still = euler(sample, velocity, sigma, sigma_next), torch.zeros_like(sigma)
    moved = mean if prev_sample is None else prev_sample.detach()
    return Transition(moved, mean, still, None, still, (sigma - sigma_next).sqrt())
