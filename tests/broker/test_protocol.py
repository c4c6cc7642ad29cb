"""PROTOCOL.md names everything that travels, with its bounds and defaults."""

import asyncio
import inspect
from collections.abc import AsyncIterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import pytest
import xxhash
from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from horizonrl.actors import loop
from horizonrl.broker import codec, groups
from horizonrl.broker import dead_letters as dead
from horizonrl.broker.api import Key, Message, Stream
from horizonrl.broker.memory import MemoryServer, MemoryTransport
from horizonrl.broker.nats import connection, streams
from horizonrl.broker.nats import transport as nats_transport
from horizonrl.broker.scan import scan
from horizonrl.broker.tickets import TicketQueue
from horizonrl.broker.weights import chain, frames
from horizonrl.common import state, types
from horizonrl.common.types import DropReason, Kind, Phase, PolicyVersion, Record, StopReason
from tests.records import make_group, make_ticket

PROTOCOL = (Path(inspect.getfile(codec)).resolve().parent / "PROTOCOL.md").read_text()
RECORDS = [
    model
    for module in (types, state)
    for _, model in inspect.getmembers(module, inspect.isclass)
    if issubclass(model, Record) and model is not Record and model.__module__ == module.__name__
]
ROUND = {(1 << 31) - 1: "2^31 - 1", 1e9: "1e9", -1e9: "-1e9", 1 << 20: "2^20"}
"""Numbers as the page writes them."""


@pytest.mark.parametrize("model", RECORDS, ids=lambda model: model.__name__)
def test_every_field_of_a_record_is_described_with_its_bounds_and_its_default(
    model: type[Record],
) -> None:
    schema = model.model_json_schema()
    missing = [
        row
        for name, field in model.model_fields.items()
        if (row := f"| `{name}` | {spell_command(name, field, schema)} | {default(field)} | ")
        not in PROTOCOL
    ]
    assert missing == []


def spell_command(name: str, field: FieldInfo, schema: dict[str, Any]) -> str:
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
    kept = TypeAdapter(Annotated[field.annotation, *field.metadata, None]).validate_python(
        "x" * (1 << 19)
    )
    return f"text, cut at {len(kept)} characters"


def range_of(part: dict[str, Any], what: str) -> str:
    least, most = part.get("minimum"), part.get("maximum", part.get("exclusiveMaximum", 0) - 1)
    if (least, most) == (0, (1 << 53) - 1):
        return "count"
    if least is None:
        return f"{what}, above {part['exclusiveMinimum']}"
    return (
        f"{what}, {number(least)} or more"
        if most < 0
        else f"{what}, {number(least)} to {number(most)}"
    )


def number(value: float) -> str:
    return ROUND.get(value, str(value))


KINDS = {
    "string": text_of,
    "boolean": lambda part, _: "boolean",
    "integer": lambda part, _: range_of(part, "integer"),
    "number": lambda part, _: range_of(part, "number"),
    "object": lambda part, _: "map",
    "array": lambda part, _: (
        f"array, at most {part['maxItems']}" if "maxItems" in part else "array"
    ),
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


@pytest.mark.parametrize("values", [Kind, StopReason, DropReason, Phase, state.ContextRule])
def test_every_value_of_an_enumeration_is_described(values: type[StrEnum]) -> None:
    assert [value for value in values if f"`{value}`" not in PROTOCOL] == []


def test_every_stream_key_subject_and_header_is_described() -> None:
    named = [f"`{{run}}_{stream.value}`" for stream in Stream] + [f".{key.value}`" for key in Key]
    named += [
        f"{{run}}.{subject}" for subject in (groups.VOID, groups.PART, groups.JOINED, frames.FRAME)
    ]
    named += [groups.PARTS, groups.DIGEST, groups.FIRST, frames.POLICY, frames.OFFSET]
    named += [dead.REASON, dead.SUBJECT, dead.SEQUENCE, dead.OFFSET, streams.ACTORS]
    assert [name for name in named if name not in PROTOCOL] == []


def test_the_limits_are_the_ones_that_hold() -> None:
    assert f"{codec.MAX_RECORD_BYTES >> 20} MiB" in PROTOCOL
    assert f"at most {codec.MAX_COLLECTION} elements" in PROTOCOL
    assert f'"schema": {codec.SCHEMA_VERSION}' in PROTOCOL


def test_the_numbers_are_the_ones_that_hold() -> None:
    page = " ".join(PROTOCOL.split())
    assert f"anyway after {loop.WEIGHTS_WAIT_S:g} seconds" in page
    assert f"to the reply subject, with {loop.RETRY_DELAY_S:g} seconds" in page
    assert f"`max_payload` less {nats_transport.HEADER_ROOM} bytes" in page
    assert f"{streams.DUPLICATE_WINDOW_S / 3600:g} hour" in page.replace("one hour", "1 hour")
    assert [code for code in connection.STREAM_IS_FULL if str(code) not in page] == []


def test_messages_have_the_ids_that_the_page_gives_them(tmp_path: Path) -> None:
    async def scenario() -> dict[Stream, list[str]]:
        transport = MemoryTransport(MemoryServer(max_payload_bytes=512))
        queue, log = TicketQueue(transport), groups.GroupLog(transport)
        await queue.issue(make_ticket(42))
        await queue.reissue(make_ticket(42), 7)
        frame = tmp_path / "frame"
        frame.write_bytes(bytes(1_500))
        fifth, sixth = (PolicyVersion(version=version, lineage=2) for version in (5, 6))
        await frames.publish_frame(transport, frame, fifth, "")
        await chain.publish_changes(transport, bytes(600), fifth, sixth, "")
        await transport.publish("groups.train", bytes(512))
        await (await log.read(after=0)).next(1)
        await log.publish(make_group(3))
        return {
            stream: [message.message_id async for message in all_of(transport, stream)]
            for stream in Stream
        }

    ids, digest = asyncio.run(scenario()), xxhash.xxh3_128_hexdigest(codec.encode(make_group(3)))
    assert ids == {
        Stream.TICKETS: ["train-00000042", "train-00000042.again-7"],
        Stream.WEIGHTS: ["w-2-5-0", "w-2-5-1", "w-2-5-2", "c-2-6-0", "c-2-6-1"],
        Stream.GROUPS: [
            None,
            *(
                f"train-00000003.{digest[:16]}.{part}"
                for part in range(len(ids[Stream.GROUPS]) - 2)
            ),
            "train-00000003",
        ],
        Stream.DEAD: ["dead-GROUPS-1"],
    }
    assert len(ids[Stream.GROUPS]) > 3


def all_of(transport: MemoryTransport, stream: Stream) -> AsyncIterator[Message]:
    return scan(transport, stream, 0, f"{stream.value.lower()}.>")
