"""What an engine offers: samples for requests, at a known policy version.

Axes: ``C H W`` pixels, ``W`` stochastic steps, ``X`` latent axes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True)
class SamplingParams:
    """How one sample is drawn."""

    height: int
    width: int
    num_inference_steps: int
    sampler: str
    """Name of the transition rule."""
    sampler_options: Mapping[str, Any]
    grid: str
    noise_level: float
    window: tuple[int, int] | None
    """Half-open range of stochastic steps; none draws deterministically."""
    guidance_scale: float
    max_sequence_length: int
    logprobs: bool = True


@dataclass(frozen=True)
class PackPosition:
    """Where a sample stands in its pack, so that a batch can be computed in a fixed shape."""

    index: int
    size: int
    """Rows of a full pack, and with them the batch's shape; the last pack may have fewer."""
    name: str = ""
    """Of the pack: samples of a named one enter the engine together."""
    count: int = 0
    """Samples of the pack that are drawn at this time."""


@dataclass(frozen=True)
class SampleRequest:
    """One sample to draw."""

    request_id: str
    prompt: str
    negative_prompt: str | None
    seed: int
    sampling: SamplingParams
    pack: PackPosition | None = None
    """Given in deterministic mode: the engine computes the row at this place of a batch of this size."""


@dataclass
class DiffusionOutput:
    """What a replica returns for one sample."""

    diffusion_output: Tensor
    """uint8 [C, H, W]."""
    log_probs: Tensor | None
    """fp32 [W] mean log-density a latent element; none where the sample is deterministic."""
    stop_reason: str = "completed"
    num_preempted: int = -1
    extra_fields: dict[str, Any] = field(default_factory=dict)
    """``all_latents`` fp32 [W + 1, X], ``all_timesteps`` fp32 [W], ``step_indices`` int64 [W], ``latents_clean`` fp32
    [X], the conditioning by name (one prompt's, no batch axis), ``weights_version`` int, ``replica`` str,
    ``generate_s`` float."""


@dataclass(frozen=True)
class WeightUpdate:
    """Weights of one policy version."""

    version: int
    kind: str
    """``lora`` or ``full``."""
    tensors: Mapping[str, Tensor]
    """``lora``: peft's state-dict names without a model prefix; ``full``: diffusers' parameter names."""
    peft_config: Mapping[str, Any] | None = None
    """``r``, ``lora_alpha``, ``target_modules``; given for ``lora``."""


@dataclass(frozen=True)
class LoadedWeights:
    """What an engine says after loading."""

    version: int
    bound_modules: int
    """Modules (lora) or parameters (full) that took a tensor; zero or too few is an error on the engine's side."""
    checksum: str
    """Of the tensors as they stand in the engine; see :func:`verl_omni_core.weights.checksum.checksum`."""


@dataclass(frozen=True)
class EngineInfo:
    """Who generates: goes into the run's manifest."""

    engine: str
    version: str
    pipeline_class: str
    requests: int
    """Requests finished, by the engine's own count."""
    max_batch: int
    """The batch limit in force, after clamping."""
    instance: str = ""
    """Of this start of the engine, in an actor: ``requests`` counts from it."""


class RolloutEngine(Protocol):
    """A component's ``build(options: EngineOptions)`` returns one, started.

    A component may also have two functions that are called before anything starts: ``installed_version() -> str``
    tells the version of the engine's package, and raises ConfigError where it is missing or not admitted;
    ``check(options: EngineOptions) -> None`` raises ConfigError for whatever ``build`` would refuse. ``KNOWN_TO_WORK``
    may name the versions, among those admitted, that the project's tests run with.
    """

    async def generate(self, request: SampleRequest) -> DiffusionOutput: ...

    async def load_weights(self, update: WeightUpdate) -> LoadedWeights: ...

    async def describe(self) -> EngineInfo: ...

    async def sleep(self) -> None: ...

    async def wake_up(self) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class EngineOptions:
    """What an engine is built from."""

    model: str
    """Name of the model adapter."""
    path: str
    """Pipeline folder."""
    dtype: str
    max_batch: int
    batch_wait_ms: float
    threads: int
    tensor_parallel: int
    lora_rank: int
    deterministic: bool
    start_timeout_s: float
    request_timeout_s: float
    options: Mapping[str, Any] = field(default_factory=dict)
    model_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the model adapter."""
