"""Scoring stored steps again: the network on stored latents, then the sampler's own step with the stored result.

The sampler's function and the model's adapter are those of the rollout, so a log-prob here and there differ by the
kernels alone.

Axes: ``B`` rows (one stored step of one sample each), ``X`` latent axes, ``N`` denoising steps.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl_omni_core.algorithms._contract import Current
from verl_omni_core.errors import ContractError
from verl_omni_core.models._contract import Schedule
from verl_omni_core.samplers._contract import TransitionRule


@dataclass(frozen=True)
class Denoising:
    """How the rollout moved its latents; the trainer scores with the same."""

    rule: TransitionRule
    rule_options: Mapping[str, Any]
    schedule: Schedule
    """On the CPU."""
    noise_level: float
    guidance_scale: float

    def __post_init__(self) -> None:
        if not self.rule.IS_STOCHASTIC:
            raise ContractError(
                "the sampler is deterministic, so its steps have no log-probs to train on; use a stochastic sampler"
            )


def check_timesteps(step_indices: Tensor, timesteps: Tensor, denoising: Denoising) -> None:
    """Compare what the rollout stored with this side's noise levels.

    Args:
        step_indices: int64, any shape. timesteps: fp32, the same shape.
    Raises:
        ContractError: an index that has no stochastic step, or another timestep there than the rollout had.
    """
    steps = len(denoising.schedule.timesteps)
    if step_indices.numel() and not 0 <= int(step_indices.min()) <= int(step_indices.max()) < steps - 1:
        raise ContractError(
            f"stored step indices go from {int(step_indices.min())} to {int(step_indices.max())}; a stochastic step of "
            f"{steps} is one of 0 to {steps - 2}"
        )
    expected = denoising.schedule.timesteps[step_indices]
    if not torch.equal(timesteps, expected):
        worst = (timesteps - expected).abs().max().item()
        raise ContractError(
            f"the rollout's timesteps differ from the trainer's by up to {worst:.4g}; both sides need one "
            "num_inference_steps, image size and grid"
        )


def score_step(
    velocity: Callable[[Tensor, Tensor], Tensor],
    latents: Tensor,
    next_latents: Tensor,
    step_index: Tensor,
    denoising: Denoising,
) -> Current:
    """Evaluate the policy on stored steps.

    Args:
        velocity: the network with its conditioning, of latents [B, X] and timestep [B].
        latents: [B, X] fp32 before the step. next_latents: [B, X] fp32 after it; data.
        step_index: [B] int64 on the CPU; rows may stand at different steps.
    Raises:
        ContractError: the steps are deterministic under the sampler's noise level.
    """
    sigmas, device = denoising.schedule.sigmas, latents.device
    predicted = velocity(latents, denoising.schedule.timesteps[step_index].to(device, non_blocking=True))
    moved = denoising.rule.step(
        latents,
        predicted,
        sigma=sigmas[step_index],
        sigma_next=sigmas[step_index + 1],
        sigma_second=float(sigmas[1]),
        noise_level=denoising.noise_level,
        prev_sample=next_latents,
        **denoising.rule_options,
    )
    if moved.log_prob is None:
        raise ContractError(
            f"the stored steps add no noise at noise level {denoising.noise_level}, so they have no log-probs; raise "
            "sampler.noise_level"
        )
    scales = (moved.std, moved.std_dev_t, moved.sqrt_dt)
    std, std_dev_t, sqrt_dt = (scale.to(device, non_blocking=True) for scale in scales)
    return Current(moved.log_prob, moved.mean, std, std_dev_t, sqrt_dt, predicted)
