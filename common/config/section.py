"""What the sections of the config share: the base class, the bounded numbers, and how a kind decides the keys.

A section with kinds is a union of classes, one for each set of keys: `Annotated[PpoLoss | GspoLoss, ByKind("ppo")]`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
AboveZero = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Band = tuple[AboveZero, AboveZero]


class Section(BaseModel):
    """Keys of one subject. The word "none" stands for None in every source, since TOML has no null."""

    # A misspelt key is an error: a run of days with a default in its place would be worse.
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _none(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        return {key: None if value == "none" else value for key, value in raw.items()}

    @field_validator("*", mode="before")
    @classmethod
    def _no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `steps = true`, which pydantic would take for 1."""
        if isinstance(value, bool) and info.field_name is not None:
            annotation = cls.model_fields[info.field_name].annotation
            if bool not in (annotation, *get_args(annotation)):
                # No ValueError: of those nobody can tell whether one key is wrong or two contradict each other.
                raise PydanticCustomError("switch", "this key is not a switch: give its value")
        return value


OWN_KIND = "MODULE:FUNCTION"
OwnKind = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]


class Own(Section):
    """A kind that is a function of another package. The keys that HorizonRL does not know are its keywords."""

    model_config = ConfigDict(extra="allow")

    @property
    def options(self) -> Mapping[str, Any]:
        return self.model_extra or {}


@dataclass(frozen=True, slots=True)
class ByKind:
    """Annotation of a union of sections whose key `kind` chooses the class; `default` stands for a missing kind."""

    default: str

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        choices = {
            kind: handler.generate_schema(section) for kind, section in by_kind(source).items()
        }
        return core_schema.tagged_union_schema(choices, discriminator=self._kind)

    def _kind(self, value: Any) -> str:
        kind = (
            value.get("kind", self.default)
            if isinstance(value, dict)
            else getattr(value, "kind", self.default)
        )
        return as_kind(kind)


def list_sections(annotation: Any) -> list[type[Section]]:
    """Return the classes of a section: several if it has kinds. A list of sections has one; a value has none."""
    candidates = (annotation, *get_args(annotation))
    return [
        section
        for section in candidates
        if isinstance(section, type) and issubclass(section, Section)
    ]


def list_kinds(section: type[Section]) -> list[str]:
    """Return the kinds that have the keys of a class."""
    if issubclass(section, Own):
        return [OWN_KIND]
    return [as_kind(kind) for kind in get_args(section.model_fields["kind"].annotation) or (None,)]


def as_kind(kind: Any) -> str:
    """Return the name under which `by_kind` has a value of the key `kind`."""
    return "none" if kind is None else OWN_KIND if ":" in str(kind) else str(kind)


def by_kind(annotation: Any) -> dict[str, type[Section]]:
    """Return the class of each kind of a section, the default kind first; empty for a section without kinds."""
    sections = list_sections(annotation)
    return {
        kind: section for section in sections if len(sections) > 1 for kind in list_kinds(section)
    }
