"""What the sections of the config share: the base class and the bounded numbers."""

from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
AboveZero = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Band = tuple[AboveZero, AboveZero]


class Section(BaseModel):
    """Keys of one subject. The word "none" stands for None in every source, since TOML has no null."""

    # A misspelt key is an error: a run of days with a default in its place would be worse.
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _none(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {key: None if value == "none" else value for key, value in given.items()}

    @field_validator("*", mode="before")
    @classmethod
    def _no_number(cls, given: Any, info: ValidationInfo) -> Any:
        """Refuse `steps = true`, which pydantic would take for 1."""
        if isinstance(given, bool) and info.field_name is not None:
            annotation = cls.model_fields[info.field_name].annotation
            if bool not in (annotation, *get_args(annotation)):
                # No ValueError: of those nobody can tell whether one key is wrong or two contradict each other.
                raise PydanticCustomError("switch", "this key is not a switch: give its value")
        return given
