"""The form that every settings group shares: frozen, unknown keys refused, defaults validated."""

from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Settings(BaseModel):
    """A group of settings. Every field carries its bound, its unit where it has one, and one sentence."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_conversion_between_kinds(cls, value: Any, info: ValidationInfo) -> Any:
        # pydantic would read true as 1 and "3" as 3; whoever wrote that meant something else
        annotation = cls.model_fields[str(info.field_name)].annotation
        kinds = set(get_args(annotation) or (annotation,))
        takes_text = any(kind in (str, Any) or get_origin(kind) is Literal for kind in kinds | {annotation})
        if isinstance(value, bool) and kinds & {int, float} and bool not in kinds:
            raise ValueError("a truth value where a number is expected")
        if isinstance(value, int | float) and not isinstance(value, bool) and bool in kinds:
            raise ValueError("a number where a truth value is expected")
        if isinstance(value, str) and kinds & {int, float, bool} and not takes_text:
            raise ValueError("text where a number or truth value is expected")
        return value
