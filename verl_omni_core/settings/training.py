"""The optimizer step."""

from typing import Literal

from pydantic import Field

from verl_omni_core.settings.base import Settings


class TrainingSettings(Settings):
    """The trainer: ranks, batches, optimizer, averaging."""

    ranks: int = Field(1, ge=1, description="Processes that share the model (FSDP2), one a device.")
    learning_rate: float = Field(6e-4, ge=0, description="AdamW's or SGD's step size.")
    micro_batch: int = Field(32, ge=1, description="Rows in one forward and backward pass.")
    prompts_per_update: int | None = Field(
        None, ge=1, description="Prompts in one optimizer step; none: all prompts of the step."
    )
    epochs_per_step: int = Field(1, ge=1, description="Passes over a step's samples.")
    grad_clip: float = Field(1.0, gt=0, description="Largest norm of the gradient.")
    optimizer: Literal["adamw", "sgd"] = Field("adamw", description="Optimizer.")
    weight_decay: float = Field(1e-4, ge=0, description="Decoupled weight decay.")
    betas: tuple[float, float] = Field((0.9, 0.999), description="AdamW's averaging factors.")
    eps: float = Field(1e-8, gt=0, description="AdamW's denominator floor.")
    schedule: Literal["constant", "cosine"] = Field("constant", description="Learning rate over the steps.")
    warmup_steps: int = Field(0, ge=0, description="Steps of linear growth from 0 to the learning rate.")
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="Where the cosine ends, as a share of the learning rate.")
    ema_decay: float | None = Field(
        None, ge=0, lt=1, description="Average of the policy over optimizer steps, for validation and export."
    )
    max_consecutive_skips: int = Field(3, ge=1, description="Optimizer steps skipped in a row before the run stops.")
    threads: int = Field(2, ge=1, description="CPU threads of a rank, where it runs on a CPU.")
    step_timeout_s: float = Field(3600, gt=0, description="Deadline of one update, seconds.")
