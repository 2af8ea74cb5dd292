"""The form that every settings group shares: frozen, unknown keys refused, defaults validated."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """A group of settings. Every field carries its bound, its unit where it has one, and one sentence."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
