"""What a transition rule offers.

A component is a module with ``Options``, ``IS_STOCHASTIC``, perhaps ``MAX_NOISE_LEVEL``, and ``step``. ``step`` moves
latents from one noise level to the next, or scores a move that was stored: the same function serves rollout and replay,
so their log-probs agree.

Axes: ``B`` rows, ``X`` any latent axes.
"""

from typing import NamedTuple, Protocol

from torch import Tensor


class Transition(NamedTuple):
    """One move of a batch from ``sigma`` to ``sigma_next``."""

    prev_sample: Tensor
    """[B, X] fp32 latents after the move (diffusers' word: the previous, less noisy sample)."""
    mean: Tensor
    """[B, X] fp32 mean of the move."""
    std: Tensor
    """[B] fp32 full standard deviation of the move, in latent units."""
    log_prob: Tensor | None
    """[B] fp32 mean log-density a latent element; none for a deterministic move."""
    std_dev_t: Tensor
    """[B] fp32 the scale under which the rule's literature writes its divergences (algorithms 2.3)."""
    sqrt_dt: Tensor
    """[B] fp32 square root of ``sigma - sigma_next``."""


class TransitionRule(Protocol):
    """The module-level surface of a sampler component."""

    IS_STOCHASTIC: bool
    MAX_NOISE_LEVEL: float
    """The largest ``noise_level`` that has a meaning; a rule without this takes any."""

    def step(
        self,
        sample: Tensor,
        velocity: Tensor,
        *,
        sigma: Tensor,
        sigma_next: Tensor,
        sigma_second: float,
        noise_level: float | Tensor,
        noise: Tensor | None = None,
        prev_sample: Tensor | None = None,
        **options: object,
    ) -> Transition:
        """Move ``sample`` along ``velocity``, or score the given ``prev_sample``.

        Args:
            sample: [B, X] fp32 latents at ``sigma``.
            velocity: [B, X] fp32 network output, towards noise.
            sigma, sigma_next: [B] fp32 noise levels, ``sigma > sigma_next``. On the CPU they are checked without
                waiting for the device of ``sample``; the result's [B] scales are where they are.
            sigma_second: the grid's second level; stands in for ``sigma`` where that is exactly 1.
            noise_level: eta, a scalar or [B].
            noise: [B, X] standard normal; needed unless ``prev_sample`` is given.
            prev_sample: [B, X] fp32 a stored result to score; data, no gradient.

        Raises:
            TypeError: an input is not float32. ValueError: neither noise nor prev_sample for a stochastic move, or a
                noise level outside 0 to ``MAX_NOISE_LEVEL``.
        """
        ...
