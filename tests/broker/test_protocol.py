"""PROTOCOL.md names everything that travels."""

import inspect
from enum import StrEnum
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("model", RECORDS, ids=lambda model: model.__name__)
def test_every_field_of_a_record_is_described(model: type[Record]) -> None:
    assert [name for name in model.model_fields if f"`{name}`" not in PROTOCOL] == []


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
