"""What an algorithm offers: pure functions on tensors, and what it needs to run.

A component is a module with

* ``Options``: a frozen dataclass of its settings; names that :class:`AlgorithmSettings` also has are filled from there,
* ``EVALUATION``: how the trainer evaluates the policy; ``"replay"`` scores stored stochastic steps,
* ``COMPARES_GROUP``: whether advantages compare the samples of a prompt, so that a group needs two; true if not given,
* ``REQUIRES``: tensors that the loss always reads besides the current policy's outputs,
* ``requires(options) -> tuple[str, ...]``: all tensors that it reads under these options; ``REQUIRES`` if not given,
* ``ADAPTERS``: names of adapters beside the policy's, for earlier policies; none if not given,
* ``advantages(rewards, group_ids, valid, options) -> Tensor [N]``,
* ``loss(current, batch, options) -> LossOutput``.

Axes: ``N`` samples of a step, ``B`` rows of a micro-batch (one stored step of one sample each).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from verl_omni_core.errors import ContractError


class LossOutput(NamedTuple):
    """Per-row losses and metrics; the trainer owns weighting and reduction, so any batching gives one gradient."""

    loss: Tensor
    """[B] fp32, before any mean."""
    metrics: dict[str, Tensor]
    """Name to [B] fp32 detached per-row values; ``metrics.names`` declares how each is reduced over all rows."""


@dataclass(frozen=True)
class Current:
    """What the trainer's forward pass says about the rows."""

    log_probs: Tensor
    """[B] fp32 with gradient."""
    prev_sample_mean: Tensor
    """[B, X] fp32 with gradient."""
    std: Tensor
    """[B] fp32 full standard deviation."""
    std_dev_t: Tensor
    """[B] fp32."""
    sqrt_dt: Tensor
    """[B] fp32."""
    velocity: Tensor
    """[B, X] fp32 with gradient."""


class Algorithm(Protocol):
    """The module-level surface of an algorithm component."""

    EVALUATION: str
    REQUIRES: tuple[str, ...]

    def requires(self, options: Any) -> tuple[str, ...]: ...

    def advantages(self, rewards: Tensor, group_ids: Tensor, valid: Tensor, options: Any) -> Tensor: ...

    def loss(self, current: Current, batch: Mapping[str, Tensor], options: Any) -> LossOutput: ...


def needs_reference(algorithm: Any, options: Any) -> bool:
    """Return whether an algorithm component reads the reference policy's means under these options."""
    requires = algorithm.requires(options) if hasattr(algorithm, "requires") else algorithm.REQUIRES
    return "ref_prev_sample_mean" in requires


def require(batch: Mapping[str, Tensor], names: tuple[str, ...], algorithm: str) -> None:
    """Raise ContractError naming what is missing and what is there, before anything is computed."""
    missing = [name for name in names if name not in batch.keys()]  # noqa: SIM118 - a TensorDict refuses a plain "in"
    if missing:
        raise ContractError(f"{algorithm} needs {missing} in the batch; it has {sorted(batch.keys())}")
