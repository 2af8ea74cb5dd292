"""What a sample is worth."""

from typing import Any, Literal

from pydantic import Field

from verl_omni_core.settings.base import Settings


class ScorerSettings(Settings):
    """One scorer and its weight in the sum."""

    name: str = Field(description="Scorer: a module of verl_omni_core.rewards, or package.module.")
    weight: float = Field(1.0, description="Factor of the score in the combined reward.")
    options: dict[str, Any] = Field({}, description="Options of the scorer.")


class RewardSettings(Settings):
    """Scorers, where they run, and what a missing score means."""

    scorers: list[ScorerSettings] = Field([ScorerSettings(name="ocr")], min_length=1, description="Scorers to sum.")
    workers: int = Field(1, ge=1, description="Scoring processes.")
    streaming: bool = Field(True, description="Score samples while others are still being drawn.")
    timeout_s: float = Field(120, gt=0, description="Deadline of scoring one sample, seconds.")
    max_attempts: int = Field(2, ge=1, description="Attempts a sample and scorer.")
    failure: Literal["mask", "drop", "fail"] = Field(
        "mask",
        description="A sample without a score: leave it out of all statistics and the loss, or its whole group, or "
        "stop the run.",
    )
    max_invalid_fraction: float = Field(
        0.2, ge=0, le=1, description="Share of samples without a score above which a step fails."
    )
    shuffle: bool = Field(
        False, description="Permute rewards over a step's samples: a control run that must learn nothing."
    )
