"""Which denoising steps are stochastic, recorded and trained.

A window ``[start, end)`` is a pure function of the settings and the step, so every worker, retry and resumed run
agrees, and all samples of a step share it: windows of their own would add the window to what a group's rewards differ
by. The last step is never in it: it would add noise to the finished image.
"""

import random

from verl_omni_core.errors import ConfigError, UnknownNameError

STRATEGIES = ("random",)


def window_envelope(
    *,
    num_inference_steps: int,
    size: int | None,
    range: tuple[int, int] | None,
) -> tuple[int, int, int]:
    """Return ``(low, high, size)``: windows of ``size`` steps lie in ``[low, high)``.

    Args:
        num_inference_steps: denoising steps of a sample.
        size: steps of the window; none fills the range.
        range: half-open range of step indices; none is all steps but the last.

    Raises:
        ConfigError: the range holds the last step or is no range, or the window does not fit in it.
    """
    last = num_inference_steps - 1
    low, high = range if range is not None else (0, last)
    if not 0 <= low < high <= last:
        raise ConfigError(
            f"sampler.sde_window_range is [{low}, {high}); with {num_inference_steps} steps it must lie in "
            f"[0, {last}) and not be empty: the last step is never stochastic. Use at least 2 steps or a smaller range"
        )
    size = high - low if size is None else size
    if not 1 <= size <= high - low:
        raise ConfigError(
            f"sampler.sde_window_size is {size}; the range [{low}, {high}) holds 1 to {high - low} steps. Shrink the "
            "window or widen sampler.sde_window_range"
        )
    return low, high, size


def window_of_step(
    run_seed: int,
    step: int,
    *,
    num_inference_steps: int,
    size: int | None,
    range: tuple[int, int] | None,
    strategy: str = "random",
) -> tuple[int, int]:
    """Return the half-open window of a training step.

    Args:
        run_seed: ``run.seed``.
        step: 1-based training step.
        num_inference_steps, size, range: as in :func:`window_envelope`.
        strategy: ``random``: the start is uniform over the range, drawn with the seed ``run_seed + step``.

    Raises:
        ConfigError: settings that hold no window. UnknownNameError: no such strategy.
    Source: MixGRPO, Li et al. 2025 (arXiv:2507.21802), with one draw a step that all workers repeat.
    """
    low, high, size = window_envelope(num_inference_steps=num_inference_steps, size=size, range=range)
    if strategy not in STRATEGIES:
        raise UnknownNameError(f"sampler.window {strategy!r} does not exist; known: {', '.join(STRATEGIES)}")
    start = random.Random(run_seed + step).randint(low, high - size)
    return start, start + size
