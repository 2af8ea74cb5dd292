"""How samples are drawn, in rollout and in validation."""

from typing import Any, Literal

from pydantic import Field

from verl_omni_core.settings.base import Settings


class ValidationSettings(Settings):
    """How held-out samples are drawn: deterministic steps, fixed seeds."""

    num_inference_steps: int = Field(10, ge=1, description="Denoising steps in validation.")
    samples_per_prompt: int = Field(4, ge=1, description="Samples a held-out prompt, each with its own fixed seed.")
    seed: int = Field(42, ge=0, lt=2**63, description="Root of the samples' own seeds, the same at every validation.")
    guidance_scale: float | None = Field(None, ge=0, description="Guidance in validation; none takes the rollout's.")


class SamplerSettings(Settings):
    """The denoising process of the rollout."""

    name: str = Field("flow_sde", description="Transition rule: a module of verl_omni_core.samplers.")
    height: int = Field(32, ge=8, description="Height of the image in pixels.")
    width: int = Field(96, ge=8, description="Width of the image in pixels.")
    num_inference_steps: int = Field(8, ge=2, description="Denoising steps in rollout.")
    grid: Literal["scheduler", "uniform"] = Field(
        "scheduler", description="Noise levels: the model scheduler's own, or 1, 1-1/N, ..., 1/N through its shift."
    )
    noise_level: float = Field(0.7, ge=0, description="Scale of the noise that stochastic steps add.")
    sde_window_size: int | None = Field(None, ge=1, description="Stochastic steps a sample; none: all but the last.")
    sde_window_range: tuple[int, int] | None = Field(
        None, description="Half-open range of step indices that holds the window; none: all but the last step."
    )
    window: Literal["random"] = Field("random", description="How the window's start is chosen, once a step.")
    guidance_scale: float = Field(1.0, ge=0, description="Classifier-free guidance; 1 switches it off.")
    max_sequence_length: int = Field(16, ge=1, description="Tokens of the long text encoder (T5 for SD3).")
    options: dict[str, Any] = Field({}, description="Further options of the transition rule.")
    validation: ValidationSettings = Field(ValidationSettings(), description="Sampling of held-out prompts.")
