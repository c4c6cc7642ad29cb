"""PROTOCOL.md names everything that travels, with its bounds and defaults."""

import inspect
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from horizonrl.broker import codec, dead, groups, streams, weights
from horizonrl.broker.api import Key, Stream
from horizonrl.common import types
from horizonrl.common.types import DropReason, Kind, Phase, Record, StopReason

PROTOCOL = (Path(inspect.getfile(codec)).resolve().parent / "PROTOCOL.md").read_text()
RECORDS = [
    model
    for _, model in inspect.getmembers(types, inspect.isclass)
    if issubclass(model, Record) and model is not Record
]
ROUND = {(1 << 31) - 1: "2^31 - 1", 1e9: "1e9", -1e9: "-1e9", 1 << 20: "2^20"}
"""Numbers as the page writes them."""


@pytest.mark.parametrize("model", RECORDS, ids=lambda model: model.__name__)
def test_every_field_of_a_record_is_described_with_its_bounds_and_its_default(model: type[Record]) -> None:
    schema = model.model_json_schema()
    missing = [
        row
        for name, field in model.model_fields.items()
        if (row := f"| `{name}` | {spelled(name, field, schema)} | {default(field)} | ") not in PROTOCOL
    ]
    assert missing == []


def spelled(name: str, field: FieldInfo, schema: dict[str, Any]) -> str:
    """Return a field's type and bounds as the page has them."""
    part = schema["properties"][name]
    optional = [option for option in part.get("anyOf", ()) if option != {"type": "null"}]
    part = (optional or [part])[0]
    part = schema["$defs"].get(part["$ref"].rpartition("/")[2], part) if "$ref" in part else part
    text = packed(name, part) if name in codec.PACKED else KINDS[part["type"]](part, field)
    return f"{text}, or nil" if optional else text


def packed(name: str, part: dict[str, Any]) -> str:
    kind = {"i": "int32", "f": "float32"}[codec.PACKED[name]]
    return f"{kind} array, at most {number(part['maxItems'])}"


def text_of(part: dict[str, Any], field: FieldInfo) -> str:
    if "enum" in part:
        return ", ".join(f"`{value}`" for value in part["enum"])
    if "A-Z" in part.get("pattern", ""):
        return "name"
    if "maxLength" in part:
        return f"text, {number(part.get('minLength', 0))} to {number(part['maxLength'])} characters"
    kept = TypeAdapter(Annotated[field.annotation, *field.metadata, None]).validate_python("x" * (1 << 19))
    return f"text, cut at {len(kept)} characters"


def range_of(part: dict[str, Any], what: str) -> str:
    least, most = part.get("minimum"), part.get("maximum", part.get("exclusiveMaximum", 0) - 1)
    if (least, most) == (0, (1 << 53) - 1):
        return "count"
    if least is None:
        return f"{what}, above {part['exclusiveMinimum']}"
    return f"{what}, {number(least)} or more" if most < 0 else f"{what}, {number(least)} to {number(most)}"


def number(value: float) -> str:
    return ROUND.get(value, str(value))


KINDS = {
    "string": text_of,
    "boolean": lambda part, _: "boolean",
    "integer": lambda part, _: range_of(part, "integer"),
    "number": lambda part, _: range_of(part, "number"),
    "object": lambda part, _: "map",
    "array": lambda part, _: f"array, at most {part['maxItems']}" if "maxItems" in part else "array",
}


def default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "nil"
    if isinstance(value, (str, tuple, dict)) and not value:
        return "empty"
    if isinstance(value, Record):
        return "its fields'"
    return f"`{value.value if isinstance(value, StrEnum) else str(value).lower()}`"


@pytest.mark.parametrize("name", codec.TYPES.values())
def test_every_type_of_record_is_described(name: str) -> None:
    assert f"**`{name}`**" in PROTOCOL


@pytest.mark.parametrize("values", [Kind, StopReason, DropReason, Phase])
def test_every_value_of_an_enumeration_is_described(values: type[StrEnum]) -> None:
    assert [value for value in values if f"`{value}`" not in PROTOCOL] == []


def test_every_stream_key_subject_and_header_is_described() -> None:
    named = [f"`{{run}}_{stream.value}`" for stream in Stream] + [f".{key.value}`" for key in Key]
    named += [f"{{run}}.{subject}" for subject in (groups.VOID, groups.PART, groups.JOINED, weights.FRAME)]
    named += [groups.PARTS, groups.DIGEST, groups.FIRST, weights.POLICY, weights.OFFSET]
    named += [dead.REASON, dead.SUBJECT, dead.SEQUENCE, dead.OFFSET, streams.ACTORS]
    assert [name for name in named if name not in PROTOCOL] == []


def test_the_limits_are_the_ones_that_hold() -> None:
    assert f"{codec.MAX_RECORD_BYTES >> 20} MiB" in PROTOCOL
    assert f"at most {codec.MAX_COLLECTION} elements" in PROTOCOL
    assert f'"schema": {codec.SCHEMA_VERSION}' in PROTOCOL
