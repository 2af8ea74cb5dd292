"""Which network is trained, and how much of it."""

from typing import Any, Literal

from pydantic import Field

from verl_omni_core.settings.base import Settings

Dtype = Literal["float32", "bfloat16", "float16"]
TrainingDtype = Literal["float32", "bfloat16"]
"""Without float16: its gradients underflow unless the loss is scaled, which nothing here does."""


class LoraSettings(Settings):
    """Low-rank adapters; ``rank = 0`` trains all parameters instead."""

    rank: int = Field(16, ge=0, description="Rank of the adapters; 0 trains all parameters.")
    alpha: float = Field(32, gt=0, description="Scale numerator: the adapter's output is multiplied by alpha / rank.")
    init: Literal["gaussian", "default"] = Field("gaussian", description="How lora_A is drawn; lora_B starts at zero.")
    targets: list[str] | None = Field(
        None, description="Module name patterns that get an adapter; none takes the model's own list."
    )
    exclude: list[str] = Field([], description="Module name patterns that never get an adapter.")
    dtype: TrainingDtype = Field("float32", description="Dtype of the adapter's parameters.")
    adapter_path: str | None = Field(None, description="Folder of a peft adapter to start from.")


class ModelSettings(Settings):
    """The generator that is trained."""

    name: str = Field("sd3", description="Model adapter: a module of verl_omni_core.models, or package.module.")
    path: str = Field("glyph", description="Pipeline folder in diffusers format, or 'glyph' for the embedded model.")
    dtype: TrainingDtype = Field(
        "float32", description="Dtype in which the trainer computes; not float16, whose gradients underflow."
    )
    lora: LoraSettings = Field(LoraSettings(), description="Adapters, or all parameters with rank 0.")
    gradient_checkpointing: bool = Field(False, description="Recompute activations in the backward pass.")
    options: dict[str, Any] = Field({}, description="Further options of the model adapter.")
