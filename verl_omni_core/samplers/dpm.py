"""Deterministic DPM-Solver and DPM-Solver++ of first and second order (multistep) for flow-matching models.

Source: DPM-Solver, Lu et al. 2022 (arXiv:2206.00927); DPM-Solver++, Lu et al. 2022 (arXiv:2211.01095), algorithm 2,
with alpha = 1 - sigma. Rollouts of DiffusionNFT and the tail of MixGRPO-Flash use it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from verl_omni_core.samplers._contract import Transition
from verl_omni_core.samplers._transition import check_inputs, per_row, predict_clean, predict_noise

IS_STOCHASTIC = False
HISTORY = 1
"""Evaluations before the current one that a step reads."""

Variant = Literal["dpmsolver++", "dpmsolver"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the rule."""

    algorithm_type: Variant = field(
        default="dpmsolver++",
        metadata={"description": "Extrapolate the clean prediction (++) or the noise prediction."},
    )
    solver_type: Literal["midpoint", "heun"] = field(
        default="midpoint",
        metadata={"description": "How the second order weighs the change since the last evaluation."},
    )
    solver_order: Literal[1, 2] = field(
        default=2,
        metadata={"description": "2 needs an evaluation before this one; the first and the last step are of order 1."},
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
    history: Sequence[tuple[Tensor, Tensor, Tensor]] = (),
    algorithm_type: Variant = "dpmsolver++",
    solver_type: Literal["midpoint", "heun"] = "midpoint",
    solver_order: Literal[1, 2] = 2,
) -> Transition:
    """Move by the solver; spread 0, no log-prob, whatever ``noise_level`` and ``noise`` are.

    Args:
        history: ``(sample, velocity, sigma)`` of the evaluation before this one, or nothing.
        sigma_second: no part in it. Others, shapes and errors: ``TransitionRule.step``.
    """
    check_inputs(sample, velocity, sigma, sigma_next, noise, prev_sample)
    predict = predict_clean if algorithm_type == "dpmsolver++" else predict_noise
    prediction = predict(sample, velocity, sigma)
    s, s_next = sigma.double(), sigma_next.double()
    if algorithm_type == "dpmsolver++":
        # e^-H as a ratio of levels stays finite at both ends of the schedule, the logarithms do not
        shrink = (1 - s) * s_next / (s * (1 - s_next))
        keep, gain = s_next / s, (1 - s_next) * (1 - shrink)
    else:
        shrink = (1 - s) * s_next / (s * (1 - s_next))
        keep, gain = (1 - s_next) / (1 - s), s_next - s * (1 - s_next) / (1 - s)
    mean = per_row(keep.float(), sample) * sample + per_row(gain.float(), sample) * prediction
    if solver_order == 2 and history:
        change = _change(prediction, predict(*history[-1]), history[-1][2].double(), s, s_next)
        stride = -shrink.log()
        if solver_type == "midpoint":
            weight = 0.5 * gain
        elif algorithm_type == "dpmsolver++":
            weight = (1 - s_next) * ((shrink - 1) / stride + 1)
        else:
            weight = -s_next * ((1 / shrink - 1) / stride - 1)
        second = per_row(weight.float(), sample) * change
        # at the last level the stride is infinite and the step is of first order
        mean = mean + torch.where(per_row(sigma_next > 0, sample), second, torch.zeros_like(second))
    still = torch.zeros_like(sigma)
    moved = mean if prev_sample is None else prev_sample.detach()
    return Transition(moved, mean, still, None, still, (sigma - sigma_next).sqrt())


def _change(prediction: Tensor, before: Tensor, s_before: Tensor, s: Tensor, s_next: Tensor) -> Tensor:
    """Return the change of the prediction over the coming stride of log signal-to-noise, extrapolated."""
    stride = _log_snr(s_next) - _log_snr(s)
    stride_before = _log_snr(s) - _log_snr(s_before)
    return per_row((stride / stride_before).float(), prediction) * (prediction - before)


def _log_snr(s: Tensor) -> Tensor:
    return (1 - s).log() - s.log()
