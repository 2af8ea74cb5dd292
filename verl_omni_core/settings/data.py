"""Which prompts a run sees."""

from typing import Literal

from pydantic import Field

from verl_omni_core.settings.base import Settings


class DataSettings(Settings):
    """Prompt tables: parquet, JSON or JSON lines, one row a prompt."""

    train: str = Field("glyph", description="Training prompts: a file, or 'glyph' for the embedded set.")
    validation: str = Field("glyph", description="Held-out prompts: a file, or 'glyph' for the embedded set.")
    prompt_column: str = Field("prompt", description="Column that holds the prompt.")
    negative_prompt_column: str | None = Field(None, description="Column that holds a negative prompt, if any.")
    ground_truth_column: str | None = Field(
        "ground_truth", description="Column that scorers compare with; a file may lack the default one."
    )
    prompts_per_step: int = Field(12, ge=1, description="Prompts drawn for a training step.")
    shuffle: bool = Field(True, description="Draw prompts in a seeded random order, else in file order.")
    overlong: Literal["error", "truncate"] = Field(
        "error", description="A prompt longer than a text encoder takes: refuse the run, or cut it and count."
    )
    max_validation_prompts: int | None = Field(None, ge=1, description="Use only the first rows of the held-out set.")
