"""What the transition rules share: checks of their inputs, predictions, the drift, the draw and its log-density.

Axes: ``B`` rows, ``X`` any latent axes.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from verl_omni_core.samplers._contract import Transition

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


def per_row(value_B: Tensor, like_BX: Tensor) -> Tensor:
    """Return ``value_B`` on the device of ``like_BX``, shaped [B, 1, ...] so that it broadcasts over its axes."""
    return value_B.to(like_BX.device, non_blocking=True).view(-1, *(1,) * (like_BX.ndim - 1))


def noise_levels(noise_level: float | Tensor, sigma_B: Tensor, *, most: float = math.inf) -> Tensor:
    """Return eta as a [B] fp32 tensor.

    Args:
        most: the largest legal value, a rule's ``MAX_NOISE_LEVEL``.

    Raises:
        ValueError: a value above ``most``, a negative scalar, or a tensor that has not one value a row.
    """
    if most < math.inf:
        highest = float(noise_level.max()) if isinstance(noise_level, Tensor) else noise_level
        if highest > most:
            raise ValueError(f"noise_level is {highest}; this rule takes 0 to {most:g}, lower sampler.noise_level")
    if not isinstance(noise_level, Tensor):
        if noise_level < 0:
            raise ValueError(f"noise_level is {noise_level}; expected 0 or more, set sampler.noise_level")
        return torch.full_like(sigma_B, float(noise_level))
    if noise_level.numel() not in (1, sigma_B.numel()):
        raise ValueError(f"noise_level has shape {tuple(noise_level.shape)}; expected a scalar or [{sigma_B.numel()}]")
    return noise_level.to(sigma_B).reshape(-1).expand_as(sigma_B)


def check_inputs(
    sample: Tensor,
    velocity: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    noise: Tensor | None,
    prev_sample: Tensor | None,
) -> None:
    """Refuse anything but fp32 and matching shapes.

    Raises:
        TypeError: an input is not float32: bf16 anywhere between drawing a step and scoring it biases ratios.
        ValueError: shapes differ, or both ``noise`` and ``prev_sample`` are given.
    """
    latents = {"sample": sample, "velocity": velocity, "noise": noise, "prev_sample": prev_sample}
    levels = {"sigma": sigma, "sigma_next": sigma_next}
    for name, tensor in {**latents, **levels}.items():
        if tensor is None:
            continue
        if tensor.dtype != torch.float32:
            raise TypeError(f"{name} is {tensor.dtype}; cast it to float32 before the step")
        expected = sample.shape if name in latents else sample.shape[:1]
        if tensor.shape != expected:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {tuple(expected)}")
    if noise is not None and prev_sample is not None:
        raise ValueError("got both noise and prev_sample; give noise to draw a step or prev_sample to score one")


def predict_clean(sample: Tensor, velocity: Tensor, sigma: Tensor) -> Tensor:
    """Return the clean latents that ``velocity`` points away from: ``x - sigma v``, [B, X]."""
    return sample - per_row(sigma, sample) * velocity


def predict_noise(sample: Tensor, velocity: Tensor, sigma: Tensor) -> Tensor:
    """Return the noise that ``velocity`` points to: ``x + (1 - sigma) v``, [B, X]."""
    return sample + (1 - per_row(sigma, sample)) * velocity


def euler(sample: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """Return the deterministic move along the velocity, [B, X] fp32."""
    return sample + per_row(sigma_next - sigma, sample) * velocity


def sde_mean(sample: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor, diffusion: Tensor) -> Tensor:
    """Return the mean of a reverse-time SDE step with diffusion coefficient ``diffusion`` [B].

    ``x + dt v + g^2 / (2 s) eps dt`` with ``eps = x + (1 - s) v``, collected in ``x`` and ``v``.
    """
    s, dt, g2 = per_row(sigma, sample), per_row(sigma_next - sigma, sample), per_row(diffusion.square(), sample)
    return sample * (1 + g2 / (2 * s) * dt) + velocity * (1 + g2 * (1 - s) / (2 * s)) * dt


def gaussian_log_density(residual_BX: Tensor, std_B: Tensor, *, include_logprob_normalizer: bool) -> Tensor:
    """Return the log-density of each latent element, [B, X] in nats; the constants are optional."""
    std = per_row(std_B, residual_BX)
    density = -residual_BX.square() / (2 * std.square())
    return density - std.log() - HALF_LOG_2PI if include_logprob_normalizer else density


def complete(
    mean: Tensor,
    *,
    std: Tensor,
    std_dev_t: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    noise: Tensor | None,
    prev_sample: Tensor | None,
    log_density: Callable[[Tensor], Tensor],
) -> Transition:
    """Draw around ``mean`` or score ``prev_sample``, and collect the result.

    A batch is stochastic or it is not: a row without spread has no log-density, and masking it afterwards would send
    nan through the gradient of its neighbours.

    Args:
        mean: [B, X] fp32. std, std_dev_t, sigma, sigma_next: [B] fp32.
        noise, prev_sample: [B, X] fp32, at most one of them.
        log_density: residual [B, X] to log-density an element [B, X].

    Raises:
        ValueError: noise levels do not decrease, some rows are stochastic and others not, or neither ``noise`` nor
            ``prev_sample`` is given for a stochastic move.
    """
    drops, spreads = torch.stack((sigma - sigma_next, std)).tolist()
    if not all(drop > 0 for drop in drops):
        rows = [row for row, drop in enumerate(drops) if not drop > 0]
        raise ValueError(f"sigma is not above sigma_next in rows {rows}; pass levels of one decreasing schedule")
    still = [row for row, spread in enumerate(spreads) if not spread > 0]
    moved = prev_sample.detach() if prev_sample is not None else None
    log_prob = None
    if len(still) == len(spreads):
        moved = mean if moved is None else moved
    elif still:
        raise ValueError(
            f"std is not positive in rows {still}, the other rows are stochastic; step the two kinds separately and "
            "exclude deterministic steps from sampler.sde_window_range"
        )
    else:
        if moved is None:
            if noise is None:
                raise ValueError(
                    "a stochastic move needs noise to draw a step or prev_sample to score one; got neither"
                )
            moved = (mean + per_row(std, mean) * noise).detach()
        # accumulated in fp64, so that the number of rows in a batch does not change a row's result
        log_prob = log_density(moved - mean).flatten(1).mean(dim=1, dtype=torch.float64).float()
    return Transition(moved, mean, std, log_prob, std_dev_t, (sigma - sigma_next).sqrt())
