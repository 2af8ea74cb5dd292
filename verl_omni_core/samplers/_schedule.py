"""Noise levels of the model families, as pure functions; model adapters choose among them.

All are fp32: strictly decreasing, 1.0 exactly at the start, an appended 0 at the end. They are bit-equal to what
diffusers' scheduler makes: it builds its own levels in fp64 and takes given ones in fp32.

Source: static shift, Stable Diffusion 3 (arXiv:2403.03206), section 5.3.2; the families' grids as in diffusers'
flow-matching Euler scheduler and their published pipelines.
"""

import math

import torch
from torch import Tensor


def linspace_levels(start: float, end: float, count: int) -> Tensor:
    """Return ``count`` evenly spaced levels from ``start`` to ``end``, [count] fp64."""
    return torch.linspace(start, end, count, dtype=torch.float64)


def inverse_levels(num_inference_steps: int) -> Tensor:
    """Return ``1, 1 - 1/N, ..., 1/N``, [N] fp32: what a pipeline hands to its scheduler."""
    return linspace_levels(1, 1 / num_inference_steps, num_inference_steps).float()


def static_shift(levels: Tensor, shift: float) -> Tensor:
    """Return ``k t / (1 + (k - 1) t)``: more of the schedule at high noise for a shift above 1."""
    return shift * levels / (1 + (shift - 1) * levels)


def exponential_shift(levels: Tensor, mu: float) -> Tensor:
    """Return ``e^mu / (e^mu + 1/t - 1)``, the static shift by ``e^mu``; ``levels`` above 0."""
    # a number divided by a tensor is rounded twice; a tensor divided by a tensor once
    one, factor = torch.ones_like(levels), torch.full_like(levels, math.exp(mu))
    return factor / (factor + (one / levels - 1))


def linear_mu(
    tokens: int,
    *,
    base_length: int = 256,
    max_length: int = 4096,
    base_shift: float = 0.5,
    max_shift: float = 1.15,
) -> float:
    """Return the exponential shift's ``mu`` of a sequence of ``tokens``: a line through the two given points."""
    slope = (max_shift - base_shift) / (max_length - base_length)
    return tokens * slope + (base_shift - slope * base_length)


def stretch_to_terminal(levels: Tensor, terminal: float) -> Tensor:
    """Return ``levels`` with their distance from 1 scaled so that the last one is ``terminal``."""
    away = 1 - levels
    return 1 - away / (away[-1] / (1 - terminal))


def close_grid(levels: Tensor) -> Tensor:
    """Return ``levels`` [N] in fp32 with 0 appended, [N + 1].

    Raises:
        ValueError: they do not start at exactly 1 or do not strictly decrease: a sampler recognises its first step by
            that equality.
    """
    sigmas = torch.cat([levels.to(torch.float32), torch.zeros(1)])
    if sigmas[0] != 1 or not bool((sigmas.diff() < 0).all()):
        raise ValueError(f"noise levels must start at 1 and strictly decrease to 0, got {sigmas.tolist()}")
    return sigmas


def uniform_sigmas(num_inference_steps: int, *, shift: float = 1.0) -> Tensor:
    """Return ``1, 1 - 1/N, ..., 1/N, 0`` through a static shift, [N + 1] fp32."""
    return close_grid(static_shift(inverse_levels(num_inference_steps), shift))


def sd3_sigmas(num_inference_steps: int, *, shift: float = 3.0, num_train_timesteps: int = 1000) -> Tensor:
    """Return the grid of diffusers' flow-matching Euler scheduler, [N + 1] fp32.

    Evenly spaced to the *shifted* last level of the training table, then shifted: the last level before 0 does not
    depend on N. That is the scheduler's behaviour, kept so that samples equal the stock pipeline's.
    """
    first = static_shift(torch.tensor(1 / num_train_timesteps, dtype=torch.float32), shift).item()
    return close_grid(static_shift(linspace_levels(1, first, num_inference_steps), shift))


def qwen_image_sigmas(num_inference_steps: int, *, tokens: int, terminal: float = 0.02) -> Tensor:
    """Return Qwen-Image's grid, [N + 1] fp32; ``tokens`` is ``(H / 16) (W / 16)``."""
    mu = linear_mu(tokens, base_length=256, max_length=8192, base_shift=0.5, max_shift=0.9)
    return close_grid(stretch_to_terminal(exponential_shift(inverse_levels(num_inference_steps), mu), terminal))


def ltx_sigmas(num_inference_steps: int, *, video_tokens: int) -> Tensor:
    """Return LTX-2's grid, [N + 1] fp32, the same for audio.

    ``video_tokens`` is ``((F - 1) / 8 + 1) (H / 32) (W / 32)``.
    """
    mu = linear_mu(video_tokens, base_length=1024, max_length=4096, base_shift=0.95, max_shift=2.05)
    return close_grid(exponential_shift(inverse_levels(num_inference_steps), mu))


def shifted_linear_sigmas(num_inference_steps: int, *, shift: float) -> Tensor:
    """Return ``linspace(1, 0, N + 1)`` through a static shift, [N + 1] fp32: Wan (shift 5 or 3) and FLUX (3)."""
    return close_grid(static_shift(linspace_levels(1, 0, num_inference_steps + 1)[:-1].float(), shift))


def bagel_sigmas(num_inference_steps: int, *, shift: float = 3.0) -> Tensor:
    """Return BAGEL's grid, [max(N, 2)] fp32: one interval fewer than ``num_inference_steps``."""
    return close_grid(static_shift(torch.linspace(1, 0, max(num_inference_steps, 2))[:-1], shift))
