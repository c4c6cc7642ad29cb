import contextlib
import random
import struct
import time
from typing import Any, get_args

import msgpack
import pytest
import xxhash
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from horizonrl.broker import codec
from horizonrl.broker.codec import MAX_RECORD_BYTES, PACKED, TYPES, decode, encode
from horizonrl.common.errors import MalformedRecord, RecordError, RecordTooLarge, UnknownSchema
from horizonrl.common.state import (
    CategoryYield,
    EnvironmentSettings,
    HorizonGrowth,
    HorizonState,
    Progress,
    RepeatedTasks,
    RunSettings,
)
from horizonrl.common.types import (
    Branch,
    Episode,
    Group,
    Kind,
    PolicyVersion,
    Provenance,
    Record,
    StopReason,
    Ticket,
    Turn,
    VersionSpan,
)
from tests.records import (
    branched_episode,
    half_trained_episode,
    make_episode,
    make_group,
    make_ticket,
    make_turn,
)
from tests.strategies import groups, records

LARGE_GROUP_S = 0.25
"""Measured: 4 ms to encode, 8 ms to decode on one busy core; the rest is room for a slow machine."""


def envelope(body: Any, name: str = "ticket", schema: Any = 2) -> bytes:
    return bytes(msgpack.packb({"schema": schema, "type": name, "body": body}))


def one_turn_group() -> Group:
    episode = make_episode(0, make_turn(tokens=(5, 2**31 - 1), answer=(7,)))
    return Group(
        ticket=make_ticket(group_size=1), episodes=(episode,), provenance=Provenance(actor="a")
    )


def body_of(record: Record) -> dict[str, Any]:
    body: dict[str, Any] = msgpack.unpackb(encode(record))["body"]
    return body


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(records)
def test_every_record_comes_back_as_it_was(record: Record) -> None:
    assert decode(encode(record), type(record)) == record


def test_token_ids_and_logprobs_travel_as_little_endian_binary() -> None:
    turn = body_of(one_turn_group())["episodes"][0]["turns"][0]
    assert turn["output_ids"] == b"\x05\x00\x00\x00\xff\xff\xff\x7f"
    assert turn["logprobs"] == b"\x00\x00\x00\xbf" * 2
    assert turn["observation_ids"] == b"\x07\x00\x00\x00"


def test_every_array_of_numbers_in_the_records_is_packed() -> None:
    arrays = {
        name
        for model in (Turn, Branch, Episode, *TYPES)
        for name, field in model.model_fields.items()
        if get_args(field.annotation)
        and get_args(field.annotation)[0]
        not in (
            VersionSpan,
            Turn,
            Branch,
            Episode,
            HorizonGrowth,
            CategoryYield,
            RepeatedTasks,
            EnvironmentSettings,
        )
        if str(field.annotation).startswith("tuple")
    }
    assert arrays == set(PACKED)


def test_fields_of_a_newer_writer_are_ignored() -> None:
    body = body_of(make_ticket())
    body["colour"] = "green"
    body["task"]["difficulty"] = 3
    assert decode(envelope(body), Ticket) == make_ticket()


def test_fields_with_a_default_may_be_missing() -> None:
    assert decode(envelope({}, "progress"), Progress) == Progress()


@pytest.mark.parametrize("schema", [0, 1, 3, 10**9])
def test_another_schema_version_is_named_as_such(schema: int) -> None:
    with pytest.raises(UnknownSchema, match=str(schema)):
        decode(envelope({}, schema=schema), Ticket)


def test_a_linear_group_has_the_bytes_of_schema_2() -> None:
    """A program of before the branches reads it, and digests of stored groups stay what they were."""
    packed: dict[str, Any] = msgpack.unpackb(encode(make_group()))
    assert packed["schema"] == 2
    assert "branches" not in packed["body"]["episodes"][0]
    assert not {"branch", "trained"} & packed["body"]["episodes"][0]["turns"][0].keys()
    assert xxhash.xxh3_128_hexdigest(encode(make_group())) == "e1071afcba64a5af2c5ca4368b9041be"


@pytest.mark.parametrize(
    "episode", [branched_episode(0), half_trained_episode(0)], ids=["branches", "an untrained turn"]
)
def test_a_group_that_is_not_linear_has_schema_3_and_no_other_is_read(episode: Episode) -> None:
    ticket = make_ticket(group_size=1, horizon_turns=5)
    group = Group(ticket=ticket, episodes=(episode,), provenance=Provenance(actor="a"))
    packed: dict[str, Any] = msgpack.unpackb(encode(group))
    assert packed["schema"] == 3
    assert decode(encode(group), Group) == group
    with pytest.raises(MalformedRecord, match="has schema 3"):
        decode(envelope(packed["body"], "group", 2), Group)


def test_a_linear_group_may_say_schema_3_and_no_other_record_may() -> None:
    assert decode(envelope(body_of(make_group()), "group", 3), Group) == make_group()
    with pytest.raises(UnknownSchema, match="3 of a ticket: this program reads 2"):
        decode(envelope(body_of(make_ticket()), schema=3), Ticket)


def test_a_record_over_the_limit_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(RecordTooLarge, match=str(MAX_RECORD_BYTES + 1)):
        decode(b"\xc1" * (MAX_RECORD_BYTES + 1), Group)


def test_a_record_over_the_limit_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_RECORD_BYTES", 100)
    with pytest.raises(RecordTooLarge):
        encode(make_group())


def test_a_number_that_the_wire_cannot_hold_is_not_encoded() -> None:
    group = one_turn_group()
    turn = group.episodes[0].turns[0].model_copy(update={"logprobs": (-1e300, -0.5)})
    episode = group.episodes[0].model_copy(update={"turns": (turn,)})
    with pytest.raises(MalformedRecord, match="number"):
        encode(group.model_copy(update={"episodes": (episode,)}))


MALFORMED = {
    "empty": b"",
    "not MessagePack": b"\xc1",
    "text": b"hello",
    "a list": msgpack.packb([1, 2]),
    "an integer": msgpack.packb(7),
    "truncated": encode(make_ticket())[:-3],
    "trailing bytes": encode(make_ticket()) + b"\x00",
    "no schema": msgpack.packb({"type": "ticket", "body": {}}),
    "schema as text": envelope({}, schema="1"),
    "schema as a truth value": envelope({}, schema=True),
    "no body": msgpack.packb({"schema": 2, "type": "ticket"}),
    "body is a list": envelope([1]),
    "another type": envelope({}, name="group"),
    "type is binary": msgpack.packb({"schema": 2, "type": b"ticket", "body": {}}),
    "type is a nest": msgpack.packb({"schema": 2}).replace(b"\x81", b"\x82")
    + b"\xa4type"
    + b"\x91" * 1000
    + b"\xc0",
    "integer keys": msgpack.packb({1: 2}),
    "an extension": msgpack.packb(
        {"schema": 2, "type": "ticket", "body": msgpack.ExtType(5, b"x")}
    ),
    "text that is not UTF-8": b"\xa2\xff\xfe",
    "deep nesting": b"\x91" * 5_000 + b"\xc0",
    "an array that claims four thousand million elements": b"\xdd\xff\xff\xff\xff",
    "a map that claims four thousand million entries": b"\xdf\xff\xff\xff\xff",
    "more arrays than a record may have": b"\xdc\x10\x00"
    + (b"\xdc\x10\x00" + b"\x90" * 4096) * 4096,
    "a string that claims four gigabytes": b"\xdb\xff\xff\xff\xff",
    "nested claims": b"\xdd\x00\x0f\xff\xff" * 200,
    "negative number": envelope(body_of(make_ticket()) | {"number": -1}),
    "number too large": envelope(body_of(make_ticket()) | {"number": 2**60}),
    "unknown kind": envelope(body_of(make_ticket()) | {"kind": "trane"}),
    "environment name with a dot": envelope(
        body_of(make_ticket()) | {"task": {"env_id": "a.b", "task_id": "1"}}
    ),
}


@pytest.mark.parametrize("name", PACKED)
def test_an_option_may_have_the_name_of_a_packed_array(name: str) -> None:
    environment = EnvironmentSettings(
        env_id="own", options={name: 3, "nested": {name: [1, 2]}}, step_timeout_s=1.0
    )
    recipe = RunSettings(
        total_steps=1, max_deliver=1, max_context_tokens=64, environments=(environment,)
    )
    assert decode(encode(recipe), RunSettings) == recipe


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
def test_bytes_that_are_no_ticket_are_malformed(data: bytes) -> None:
    with pytest.raises(MalformedRecord):
        decode(data, Ticket)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("output_ids", b"\x00\x00\x00"),
        ("output_ids", struct.pack("<i", 5)),
        ("output_ids", struct.pack("<2i", 5, -6)),
        ("output_ids", "ab"),
        ("output_ids", None),
        ("logprobs", struct.pack("<2f", -0.5, float("nan"))),
        ("logprobs", struct.pack("<2f", -0.5, float("-inf"))),
        ("logprobs", struct.pack("<2f", -0.5, 0.5)),
        ("logprobs", struct.pack("<3f", -0.5, -0.5, -0.5)),
        ("logprobs", [-0.5, -1e300]),
        ("reward", float("nan")),
        ("spans", []),
        ("spans", [{"version": 0, "lineage": 0, "tokens": 3}]),
        ("spans", [{"version": 1 << 31, "lineage": 0, "tokens": 2}]),
        ("reward", 1e300),
    ],
)
def test_a_turn_that_is_out_of_bounds_makes_its_group_malformed(name: str, value: Any) -> None:
    body = body_of(one_turn_group())
    body["episodes"][0]["turns"][0][name] = value
    with pytest.raises(MalformedRecord):
        decode(envelope(body, "group"), Group)


def test_a_text_for_people_is_cut_and_its_group_is_kept() -> None:
    body, long = body_of(one_turn_group()), "x" * 300_000
    body["episodes"][0] |= {"prompt": long, "error": long}
    body["episodes"][0]["turns"][0] |= {"text": long, "observation": long}
    body["provenance"] |= {"engine": long, "environment": long}
    group = decode(envelope(body, "group"), Group)
    episode, turn = group.episodes[0], group.episodes[0].turns[0]
    assert turn.output_ids == (5, 2**31 - 1)
    mark = " [... 300000 characters]"
    assert {episode.prompt, turn.text, turn.observation} == {"x" * 262_120 + mark}
    assert {episode.error, group.provenance.engine, group.provenance.environment} == {
        "x" * 1_000 + mark
    }
    assert decode(encode(group), Group) == group


def test_a_text_that_ends_in_half_a_character_keeps_its_group() -> None:
    data = encode(
        one_turn_group().model_copy(update={"provenance": Provenance(actor="a", engine="half: X.")})
    )
    # What languages of UTF-16 cut a text to.
    group = decode(data.replace(b"half: X.", b"half: \xed\xa0"), Group)
    assert group.provenance.engine.startswith("half: \ufffd")


def test_the_message_of_a_malformed_record_names_the_place_and_stays_short() -> None:
    body = body_of(make_ticket()) | {"group_size": "x" * 10_000}
    with pytest.raises(MalformedRecord, match="group_size") as caught:
        decode(envelope(body), Ticket)
    assert len(str(caught.value)) < 1_000


@pytest.mark.parametrize(
    ("record_type", "body"),
    [
        (Group, {"episodes": [{"turns": [None] * 1024}] * 256}),
        (Group, {"episodes": [{"turns": [{"spans": [None] * 1024}] * 1024}]}),
        (Group, {"episodes": [{"prompt_ids": (-1,) * 100_000}]}),
        (
            Progress,
            {
                "outcomes": {
                    f"kind {index}": {"dropped": dict.fromkeys("abcdefgh", -1)}
                    for index in range(4096)
                }
            },
        ),
        (Progress, {"ended_ranges": {"train": [None] * 1024}}),
        (Progress, {"growths": [{}] * 4096}),
        (HorizonState, {"tickets_issued": {str(index): -1 for index in range(4096)}}),
    ],
)
def test_a_record_in_which_all_is_wrong_costs_a_few_errors_and_not_one_a_mistake(
    record_type: type[Record], body: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError) as caught:
        record_type.model_validate(body)
    assert caught.value.error_count() < 1_100, "an error takes a kilobyte"


@given(st.binary(max_size=200), st.sampled_from(list(TYPES)))
@example(b"\xc7\x00\xff", Ticket)
@example(b"\xd6\xff\x00\x00\x00\x00", Ticket)
def test_any_bytes_decode_or_raise_a_record_error(data: bytes, record_type: type[Record]) -> None:
    with contextlib.suppress(RecordError):
        decode(data, record_type)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(groups(), st.randoms(use_true_random=False))
def test_a_damaged_group_decodes_to_a_valid_group_or_raises_a_record_error(
    group: Group, chance: random.Random
) -> None:
    damaged = bytearray(encode(group))
    for _ in range(chance.randint(1, 4)):
        damaged[chance.randrange(len(damaged))] = chance.randrange(256)
    data = bytes(damaged[: chance.randint(1, len(damaged))] if chance.random() < 0.3 else damaged)
    try:
        decoded = decode(data, Group)
    except RecordError:
        return
    assert decode(encode(decoded), Group) == decoded


def test_a_large_group_is_coded_in_milliseconds() -> None:
    turn = Turn(
        output_ids=tuple(range(64)),
        logprobs=(-0.25,) * 64,
        spans=(VersionSpan(version=1, lineage=0, tokens=64),),
        observation_ids=tuple(range(128)),
        text="x" * 200,
        observation="y" * 400,
    )
    episodes = tuple(
        Episode(
            index=index,
            prompt_ids=tuple(range(512)),
            turns=(turn,) * 20,
            stop=StopReason.TERMINATED,
        )
        for index in range(8)
    )
    ticket = make_ticket(group_size=8, horizon_turns=20).model_copy(update={"kind": Kind.TRAIN})
    group = Group(
        ticket=ticket.model_copy(update={"issued": PolicyVersion(version=1)}),
        episodes=episodes,
        provenance=Provenance(actor="a"),
    )
    started = time.perf_counter()
    data = encode(group)
    assert decode(data, Group) == group
    assert time.perf_counter() - started < LARGE_GROUP_S


def test_texts_may_be_longer_than_a_collection() -> None:
    group = one_turn_group()
    turn = group.episodes[0].turns[0].model_copy(update={"text": "→" * 100_000})
    group = group.model_copy(
        update={"episodes": (group.episodes[0].model_copy(update={"turns": (turn,)}),)}
    )
    assert decode(encode(group), Group) == group
