"""The settings under the names that VeRL-Omni's users know: views of one :class:`RunConfig`, no second set of values.

Each has :meth:`of`, which takes its part out of a resolved run. Names, defaults and bounds of the fields are ours
(``docs/settings.md`` has the table of both).
"""

from typing import Any, Literal, Self

from pydantic import Field

from verl_omni_core.settings.algorithm import AlgorithmSettings
from verl_omni_core.settings.base import Settings
from verl_omni_core.settings.model import ModelSettings, TrainingDtype
from verl_omni_core.settings.rollout import RolloutSettings
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.settings.sampler import SamplerSettings
from verl_omni_core.settings.training import TrainingSettings


class DiffusionModelConfig(ModelSettings):
    """The generator that is trained: adapter, folder, dtype, LoRA. Source: VeRL-Omni's ``actor_rollout_ref.model``."""

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Return the model's part of a run."""
        return cls(**dict(config.model))


class DiffusionLossConfig(AlgorithmSettings):
    """The loss: name, clip range, clamp of advantages (reward units), KL weight. Source: ``actor.diffusion_loss``."""

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Return the loss's part of a run."""
        return cls(**dict(config.algorithm))


class DiffusionActorConfig(Settings):
    """The policy's side of a run: how it is optimised, and against which loss. Source: ``actor_rollout_ref.actor``."""

    training: TrainingSettings = Field(TrainingSettings(), description="Trainer and optimizer.")
    diffusion_loss: DiffusionLossConfig = Field(DiffusionLossConfig(), description="The loss.")

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Return the actor's part of a run."""
        return cls(training=config.training, diffusion_loss=DiffusionLossConfig.of(config))


class FSDPDiffusionActorConfig(DiffusionActorConfig):
    """An actor that FSDP2 shards over ``training.ranks`` processes, computing in ``dtype``."""

    dtype: TrainingDtype = Field("float32", description="Dtype of the computation.")
    gradient_checkpointing: bool = Field(False, description="Recompute activations in the backward pass.")

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Return the actor's part of a run, with what sharding needs to know of the model."""
        return cls(
            training=config.training,
            diffusion_loss=DiffusionLossConfig.of(config),
            dtype=config.model.dtype,
            gradient_checkpointing=config.model.gradient_checkpointing,
        )


class DiffusionPipelineConfig(Settings):
    """What the pipeline draws: sizes in pixels, steps, guidance, tokens. Source: ``rollout.pipeline``."""

    height: int = Field(32, ge=8, description="Height of the image in pixels.")
    width: int = Field(96, ge=8, description="Width of the image in pixels.")
    num_inference_steps: int = Field(8, ge=1, description="Denoising steps.")
    guidance_scale: float = Field(1.0, ge=0, description="Classifier-free guidance; 1 switches it off.")
    max_sequence_length: int = Field(16, ge=1, description="Tokens of the long text encoder.")

    @classmethod
    def of(cls, config: RunConfig, *, validate: bool = False) -> Self:
        """Return the pipeline's part of a run, for training or (``validate``) for held-out samples."""
        sampler, validation = config.sampler, config.sampler.validation
        guidance = validation.guidance_scale if validate else sampler.guidance_scale
        return cls(
            height=sampler.height,
            width=sampler.width,
            num_inference_steps=(validation if validate else sampler).num_inference_steps,
            guidance_scale=sampler.guidance_scale if guidance is None else guidance,
            max_sequence_length=sampler.max_sequence_length,
        )


class DiffusionRolloutAlgoConfig(Settings):
    """Where a sample is stochastic, and how much: rule, scale, window (step indices). Source: ``rollout.algo``."""

    sampler: str = Field("flow_sde", description="Transition rule.")
    noise_level: float = Field(0.7, ge=0, description="Scale of the noise that stochastic steps add.")
    sde_window_size: int | None = Field(None, ge=1, description="Stochastic steps a sample; none: all but the last.")
    sde_window_range: tuple[int, int] | None = Field(None, description="Half-open range of the window's steps.")
    window: Literal["random"] = Field("random", description="How the window's start is chosen, once a step.")
    options: dict[str, Any] = Field({}, description="Further options of the rule.")

    @classmethod
    def of(cls, config: RunConfig, *, validate: bool = False) -> Self:
        """Return the stochastic part of a run; for held-out samples (``validate``) the noise level is 0."""
        sampler: SamplerSettings = config.sampler
        return cls(
            sampler=sampler.name,
            noise_level=0.0 if validate else sampler.noise_level,
            sde_window_size=sampler.sde_window_size,
            sde_window_range=sampler.sde_window_range,
            window=sampler.window,
            options=sampler.options,
        )


class DiffusionSamplingConfig(Settings):
    """How held-out samples are drawn. Source: ``rollout.val_kwargs``."""

    samples_per_prompt: int = Field(4, ge=1, description="Samples a held-out prompt, each with its own fixed seed.")
    seed: int = Field(42, ge=0, description="Seed of the first sample of a prompt; the next ones add 1 each.")
    pipeline: DiffusionPipelineConfig = Field(DiffusionPipelineConfig(), description="What is drawn.")
    algo: DiffusionRolloutAlgoConfig = Field(DiffusionRolloutAlgoConfig(noise_level=0), description="Without noise.")

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Return the validation's part of a run."""
        validation = config.sampler.validation
        return cls(
            samples_per_prompt=validation.samples_per_prompt,
            seed=validation.seed,
            pipeline=DiffusionPipelineConfig.of(config, validate=True),
            algo=DiffusionRolloutAlgoConfig.of(config, validate=True),
        )


class DiffusionRolloutConfig(RolloutSettings):
    """The generation side: engine and replicas, what they draw, where it is random. Source: ``rollout``."""

    pipeline: DiffusionPipelineConfig = Field(DiffusionPipelineConfig(), description="What is drawn.")
    algo: DiffusionRolloutAlgoConfig = Field(DiffusionRolloutAlgoConfig(), description="Where it is random.")
    validation: DiffusionSamplingConfig = Field(DiffusionSamplingConfig(), description="Held-out samples.")

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Return the rollout's part of a run."""
        return cls(
            **dict(config.rollout),
            pipeline=DiffusionPipelineConfig.of(config),
            algo=DiffusionRolloutAlgoConfig.of(config),
            validation=DiffusionSamplingConfig.of(config),
        )
