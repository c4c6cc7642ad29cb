"""The records on the wire: MessagePack maps with packed arrays (PROTOCOL.md, "Records").

A record is the map {"schema": 2, "type": "group", "body": {field: value}}. A group with branches has schema 3, because
a reader that ignored them would train the rest. The arrays of a turn would dominate its size, so they travel as binary:
token ids as little-endian int32, log-probabilities as little-endian float32.
Decoding any bytes yields a valid record or raises a RecordError.
"""

import struct
from functools import cache
from itertools import count
from typing import Any, TypeVar

import msgpack
from pydantic import ValidationError

from horizonrl.common.arrays import MAX_TOKENS, CheckedIds, CheckedLogprobs
from horizonrl.common.errors import MalformedRecord, RecordTooLarge, UnknownSchema
from horizonrl.common.state import HorizonState, Progress, RunSettings, WeightsManifest
from horizonrl.common.types import Episode, Group, Provenance, Record, Ticket, Turn, Void

SCHEMA_VERSION = 2
BRANCHED_SCHEMA = 3
"""The schema of a group that has an episode of several branches, or a turn that is not trained."""
MAX_RECORD_BYTES = 64 << 20
MAX_COLLECTION = 4_096
"""Most elements of an array or a map on the wire: above every bound in `common/types.py`, far below what would exhaust
the memory."""
MAX_CONTAINERS = 1 << 20
"""Most arrays and maps of a record: an empty one takes 1 byte on the wire and 70 bytes in memory."""

SCHEMAS = (SCHEMA_VERSION, BRANCHED_SCHEMA)

TYPES: dict[type[Record], str] = {
    Ticket: "ticket",
    Group: "group",
    Void: "void",
    Progress: "progress",
    WeightsManifest: "weights",
    HorizonState: "horizon",
    RunSettings: "run",
}
PACKED = {"prompt_ids": "i", "output_ids": "i", "observation_ids": "i", "logprobs": "f"}
"""The fields that travel as binary, and the `struct` code of their elements, 4 bytes each."""

_ADDED: dict[type[Record], tuple[str, ...]] = {
    Ticket: ("repeated",),
    Turn: ("branch", "trained", "state"),
    Episode: ("branches", "refused", "refusal"),
    Provenance: ("stop_ids",),
}
LEFT_OUT: dict[type[Record], dict[str, object]] = {
    model: {name: model.model_fields[name].default for name in names}
    for model, names in _ADDED.items()
}
"""The fields since schema 2 and their defaults, at which they do not travel: a linear group has the bytes of then."""

CHECKED: dict[str, type[CheckedIds] | type[CheckedLogprobs]] = {
    "i": CheckedIds,
    "f": CheckedLogprobs,
}
"""By the same code, how validation knows an array whose elements are within their bounds."""

R = TypeVar("R", bound=Record)
C = TypeVar("C")


def encode(record: Record) -> bytes:
    """Return the record's bytes. Raises RecordTooLarge, and MalformedRecord for a number that does not fit its type."""
    try:
        data: bytes = _pack(TYPES[type(record)], schema_of_record(record), record)
    except (OverflowError, struct.error) as error:
        raise MalformedRecord(
            f"a {TYPES[type(record)]} holds a number that the wire cannot: {error}"
        ) from None
    if len(data) > MAX_RECORD_BYTES:
        raise RecordTooLarge(
            f"a {TYPES[type(record)]} of {len(data)} bytes; at most {MAX_RECORD_BYTES} may travel"
        )
    return data


def decode(data: bytes, record_type: type[R]) -> R:
    """Return the record that the bytes hold. Unknown fields are ignored: a newer program may have added them.

    Raises RecordTooLarge before anything is read, UnknownSchema for another schema version, else MalformedRecord.
    """
    name, schemas = TYPES[record_type], SCHEMAS[: 2 if record_type is Group else 1]
    if len(data) > MAX_RECORD_BYTES:
        raise RecordTooLarge(f"a {name} of {len(data)} bytes; at most {MAX_RECORD_BYTES} are read")
    envelope = _unpack(data)
    # `type`, because isinstance takes True for the integer 1.
    if not isinstance(envelope, dict) or type(envelope.get("schema")) is not int:
        raise MalformedRecord(f"not a {name}: no map with a schema version")
    if envelope["schema"] not in schemas:
        raise UnknownSchema(
            f"schema {envelope['schema']} of a {name}: this program reads {', '.join(map(str, schemas))}; "
            "upgrade the older side"
        )
    if envelope.get("type") != name:
        raise MalformedRecord(f"not a {name}: type is {type_name(envelope.get('type'))}")
    try:
        record = record_type.model_validate(envelope.get("body"))
    except ValidationError as error:
        raise MalformedRecord(f"not a valid {name}: {_explain(error)}") from None
    # Another reader of schema 2 ignores branches: what it trains must not depend on who reads.
    if schema_of_record(record) == BRANCHED_SCHEMA != envelope["schema"]:
        raise MalformedRecord(
            f"a {name} with branches, or an untrained turn, has schema {BRANCHED_SCHEMA}"
        )
    return record


def schema_of_record(record: Record) -> int:
    branched = isinstance(record, Group) and not all(episode.linear for episode in record.episodes)
    return BRANCHED_SCHEMA if branched else SCHEMA_VERSION


def _pack(name: str, schema: int, body: object) -> bytes:
    packed: bytes = msgpack.packb({"schema": schema, "type": name, "body": body}, default=_fields)
    return packed


def _fields(record: object) -> dict[str, Any]:
    """Turn a record into a map; the packer calls this for every record inside a record."""
    if not isinstance(record, Record):
        raise MalformedRecord(f"a {type(record).__name__} cannot travel: only records can")
    # A record is a map of its fields in the order of its class. Signatures depend on this order.
    fields = dict(vars(record))
    for name, default in LEFT_OUT.get(type(record), {}).items():
        if fields[name] == default:
            del fields[name]
    for name, code in _packed_fields(type(record)):
        fields[name] = struct.pack(f"<{len(fields[name])}{code}", *fields[name])
    return fields


@cache
def _packed_fields(record_type: type[Record]) -> tuple[tuple[str, str], ...]:
    return tuple((name, code) for name, code in PACKED.items() if name in record_type.model_fields)


def _unpack(data: bytes, *, check_at_once: bool = True) -> Any:
    """Return what the bytes hold. The elements of all packed arrays are compared with their bounds together.

    If one is out of them, the arrays are returned as common tuples, and the validation finds which one.
    """
    numbers = count(1)
    packed: dict[str, list[bytes]] = {"i": [], "f": []}

    def limit_count(container: C) -> C:
        # msgpack bounds each collection, but not their number: empty ones take far more in memory than on the wire.
        if next(numbers) > MAX_CONTAINERS:
            raise ValueError(f"more than {MAX_CONTAINERS} arrays and maps")
        return container

    def unpack_arrays(fields: dict[Any, Any]) -> dict[Any, Any]:
        for name, value in fields.items():
            # Any map may have such a key: an environment's options, or counts per environment. Those hold no binary.
            if type(value) is bytes and (code := PACKED.get(name)) is not None:
                if len(value) % 4:
                    raise ValueError(f"{name} has {len(value)} bytes, not a multiple of 4")
                elements = struct.unpack(f"<{len(value) // 4}{code}", value)
                if check_at_once and len(elements) <= MAX_TOKENS:
                    packed[code].append(value)
                    elements = CHECKED[code]((elements,))
                fields[name] = elements
        return fields

    # Each takes a byte at least, so that small data holds no more of them than allowed.
    few = len(data) <= MAX_CONTAINERS
    try:
        unpacked = msgpack.unpackb(
            data,
            object_hook=unpack_arrays if few else lambda fields: unpack_arrays(limit_count(fields)),
            list_hook=None if few else limit_count,
            ext_hook=_refuse_extension,
            unicode_errors="replace",  # a text that was cut inside a character is no reason to lose its group
            strict_map_key=True,
            max_array_len=MAX_COLLECTION,
            max_map_len=MAX_COLLECTION,
            max_ext_len=16,
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise MalformedRecord(
            f"not MessagePack within the limits: {type(error).__name__} {error!s:.200}"
        ) from None
    if not (packed["i"] or packed["f"]):
        return unpacked
    import numpy as np  # here: `horizonrl status` reads no groups, and would wait for it

    ids = np.frombuffer(b"".join(packed["i"]), "<i4")
    logprobs = np.frombuffer(b"".join(packed["f"]), "<f4")
    # A NaN is the minimum and the maximum of an array that holds one, and every comparison with it is false.
    if (
        ids.min(initial=0) >= 0
        and logprobs.max(initial=0.0) <= 0.0
        and logprobs.min(initial=0.0) > -np.inf
    ):
        return unpacked
    return _unpack(data, check_at_once=False)


def _refuse_extension(code: int, _: bytes) -> None:
    raise ValueError(f"extension type {code}")


def type_name(value: object) -> str:
    # Not its repr: that of a nest of a thousand arrays, which takes a kilobyte, exceeds the interpreter's stack.
    return repr(value[:40]) if isinstance(value, str) else f"a {type(value).__name__}"


def _explain(error: ValidationError) -> str:
    """Name the first three mistakes, without the values, which may be large and may hold anything."""
    mistakes = [
        f"{'.'.join(map(str, mistake['loc'])) or 'body'}: {mistake['msg']}"[:200]
        for mistake in error.errors(include_url=False, include_context=False, include_input=False)[
            :3
        ]
    ]
    return "; ".join(mistakes)
