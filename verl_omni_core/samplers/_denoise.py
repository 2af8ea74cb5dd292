"""The only denoising loop: every engine runs it, so a rule, a window and a seed mean the same everywhere.

Axes: ``B`` rows, ``X`` latent axes, ``W`` steps of the stochastic window, ``N`` denoising steps.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from verl_omni_core.samplers._contract import TransitionRule
from verl_omni_core.samplers._transition import euler

Velocity = Callable[[Tensor, Tensor, int], Tensor]
"""Latents [B, X] fp32, timestep [B] fp32 and step index to the network's velocity [B, X]."""


class Levels(Protocol):
    """What the loop reads of a schedule."""

    @property
    def sigmas(self) -> Tensor: ...

    @property
    def timesteps(self) -> Tensor: ...


class Trajectory(NamedTuple):
    """What a denoising run leaves: the result, and the recorded steps of the window (none: ``W = 0``)."""

    latents_clean: Tensor
    """[B, X] fp32 at noise level 0."""
    all_latents: Tensor
    """[B, W + 1, X] fp32: before the first step of the window, and after each; [B, 0, X] without a window."""
    all_timesteps: Tensor
    """[B, W] fp32."""
    step_indices: Tensor
    """[W] int64."""
    log_probs: Tensor
    """[B, W] fp32 nats a latent element."""


def draw_noise(shape: Sequence[int], generators: Sequence[torch.Generator], device: torch.device) -> Tensor:
    """Return standard normal noise [B, *shape] fp32 on ``device``, each row from its own generator.

    A row depends on its generator alone, not on the batch it is in. A CPU generator draws on the CPU: the stream, and
    with it the sample, then does not depend on the device.
    """
    rows = [torch.randn(shape, generator=g, device=g.device, dtype=torch.float32) for g in generators]
    return torch.stack([row.to(device) for row in rows])


def denoise(
    velocity: Velocity,
    latents: Tensor,
    schedule: Levels,
    rule: TransitionRule,
    rule_options: Mapping[str, Any],
    *,
    noise_level: float | Tensor,
    window: tuple[int, int] | None,
    generators: Sequence[torch.Generator],
) -> Trajectory:
    """Denoise ``latents`` with noise from one generator a row.

    With a window one tensor is drawn from every generator at every step, inside the window or not: the number of draws
    is part of what a seed means. Without a window nothing is drawn.

    Args:
        velocity: the network; called once a step.
        latents: [B, X] fp32 initial noise.
        schedule: ``sigmas`` [N + 1] and ``timesteps`` [N], fp32.
        rule, rule_options: a sampler component and its options by name.
        noise_level: eta, a scalar or [B].
        window: half-open range of stochastic steps; none denoises deterministically.
        generators: B generators.

    Raises:
        ValueError: as :func:`integrate`; also if the number of generators is not B.
    """
    if window is not None and len(generators) != len(latents):
        raise ValueError(f"got {len(generators)} generators for {len(latents)} rows; expected one a row")

    def noise_of(step_index: int) -> Tensor:
        return draw_noise(latents.shape[1:], generators, latents.device)

    return integrate(
        velocity, latents, schedule, rule, rule_options, noise_level=noise_level, window=window, noise_of=noise_of
    )


@torch.no_grad()
def integrate(
    velocity: Velocity,
    latents: Tensor,
    schedule: Levels,
    rule: TransitionRule,
    rule_options: Mapping[str, Any],
    *,
    noise_level: float | Tensor,
    window: tuple[int, int] | None,
    noise_of: Callable[[int], Tensor],
) -> Trajectory:
    """Denoise ``latents`` with the noise [B, X] that ``noise_of`` returns for each step index.

    Steps in the window use ``rule`` and are recorded. The others are Euler steps; a deterministic rule makes its own
    moves there, with the evaluations before it as ``history`` if it declares ``HISTORY``.

    Raises:
        TypeError: latents are not fp32.
        ValueError: a window that holds the last step or is empty, a window with a deterministic rule, or a schedule
            without one more level than timesteps.
    """
    _check(latents, schedule, rule, window)
    sigmas = schedule.sigmas.to("cpu", torch.float32)  # read by the rule before it launches anything
    timesteps = schedule.timesteps.to(latents.device, torch.float32)
    sigma_second = float(sigmas[1])
    rows = len(latents)
    start, end = window if window is not None else (0, 0)
    recorded = [latents] if window is not None and start == 0 else []
    log_probs: list[Tensor] = []
    history: list[tuple[Tensor, Tensor, Tensor]] = []
    depth = getattr(rule, "HISTORY", 0)
    for i in range(len(timesteps)):
        noise = noise_of(i) if window is not None else None
        velocity_i = velocity(latents, timesteps[i].expand(rows), i).float()
        sigma, sigma_next = sigmas[i].expand(rows), sigmas[i + 1].expand(rows)
        if rule.IS_STOCHASTIC and not start <= i < end:
            latents = euler(latents, velocity_i, sigma, sigma_next)
        else:
            context: dict[str, Any] = {"history": tuple(history)} if depth else {}
            move = rule.step(
                latents,
                velocity_i,
                sigma=sigma,
                sigma_next=sigma_next,
                sigma_second=sigma_second,
                noise_level=noise_level,
                noise=noise,
                **context,
                **rule_options,
            )
            history = [*history, (latents, velocity_i, sigma)][-depth:] if depth else []
            latents = move.prev_sample
            if rule.IS_STOCHASTIC:
                if move.log_prob is None:
                    raise ValueError(
                        f"step {i} of the window adds no noise; raise sampler.noise_level or drop the window"
                    )
                log_probs.append(move.log_prob)
        if window is not None and start <= i + 1 <= end:
            recorded.append(latents)
    return Trajectory(
        latents_clean=latents,
        all_latents=torch.stack(recorded, dim=1) if recorded else latents.new_zeros(rows, 0, *latents.shape[1:]),
        all_timesteps=timesteps[start:end].expand(rows, -1).contiguous(),
        step_indices=torch.arange(start, end),
        log_probs=torch.stack(log_probs, dim=1) if log_probs else latents.new_zeros(rows, 0),
    )


def _check(latents: Tensor, schedule: Levels, rule: TransitionRule, window: tuple[int, int] | None) -> None:
    steps = len(schedule.timesteps)
    if latents.dtype != torch.float32:
        raise TypeError(f"latents are {latents.dtype}; keep them in float32 between steps")
    if len(schedule.sigmas) != steps + 1:
        raise ValueError(f"schedule has {len(schedule.sigmas)} sigmas for {steps} timesteps; expected {steps + 1}")
    if window is None:
        return
    if not rule.IS_STOCHASTIC:
        raise ValueError("a deterministic rule has no stochastic window; use a stochastic sampler or no window")
    if not 0 <= window[0] < window[1] <= steps - 1:
        raise ValueError(
            f"window {window} is not inside [0, {steps - 1}) or is empty; the last step is never stochastic"
        )
