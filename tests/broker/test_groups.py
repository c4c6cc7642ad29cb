import asyncio
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from horizonrl.broker.api import Key, Stored, Stream, Transport
from horizonrl.broker.codec import encode
from horizonrl.broker.groups import CHAIN, REPEAT, DeadLetter, Entry, GroupLog
from horizonrl.broker.memory import MemoryServer, MemoryTransport
from horizonrl.broker.scan import scan
from horizonrl.broker.state import StateStore
from horizonrl.common.errors import BrokerUnreachable, LogGap
from horizonrl.common.state import Progress
from horizonrl.common.types import Group, Kind, Turn, VersionSpan, Void
from tests.broker.silence import SilentTransport
from tests.brokers import Broker
from tests.records import make_group, make_ticket

SMALL_PAYLOAD = 1_024

T = TypeVar("T")


async def entries(transport: Transport, count: int, after: int = 0) -> list[Entry]:
    reader = await GroupLog(transport).read(after)
    found = [entry for _ in range(count) if (entry := await reader.next(5.0))]
    await reader.close()
    return found


def make_void(number: int = 0) -> Void:
    return Void(ticket=make_ticket(number), reason="delivered 5 times", actor="a")


def large_group(number: int, tokens: int, seed: int = 0) -> Group:
    turn = Turn(
        output_ids=tuple((seed + index) % 50_000 for index in range(tokens)),
        logprobs=(-0.5,) * tokens,
        spans=(VersionSpan(version=0, lineage=0, tokens=tokens),),
    )
    group = make_group(number)
    episodes = tuple(episode.model_copy(update={"turns": (turn,)}) for episode in group.episodes)
    return group.model_copy(update={"episodes": episodes})


async def subjects(transport: Transport) -> list[str]:
    before = (await transport.extent(Stream.GROUPS)).first_sequence - 1
    return [message.subject async for message in scan(transport, Stream.GROUPS, before, "groups.>")]


async def test_groups_and_voids_are_read_in_the_order_of_the_log(broker: Broker) -> None:
    async with broker.open() as transport:
        log = GroupLog(transport)
        await log.publish(make_group(1))
        await log.publish_void(make_void(0))
        await log.publish(make_group(0, kind=Kind.EVAL))
        assert await entries(transport, 3) == [
            Entry(1, make_group(1)),
            Entry(2, make_void(0)),
            Entry(3, make_group(0, kind=Kind.EVAL)),
        ]
        assert await subjects(transport) == ["groups.train", "groups.void", "groups.eval"]


async def test_a_ticket_ends_once_whichever_end_comes_first(broker: Broker) -> None:
    async with broker.open() as transport:
        log = GroupLog(transport)
        assert not (await log.publish(make_group(0))).duplicate
        assert (await log.publish(make_group(0, rewards=(0.0, 0.0)))).duplicate
        assert (await log.publish_void(make_void(0))).duplicate
        assert not (await log.publish_void(make_void(1))).duplicate
        assert (await log.publish(make_group(1))).duplicate
        assert (await transport.extent(Stream.GROUPS)).messages == 2


async def test_a_reader_resumes_after_its_cursor_and_returns_none_at_the_end(
    broker: Broker,
) -> None:
    async with broker.open() as transport:
        for number in range(12):
            await GroupLog(transport).publish(make_group(number))
        assert [entry.sequence for entry in await entries(transport, 3, after=9)] == [
            10,
            11,
            12,
        ]
        reader = await GroupLog(transport).read(after=12)
        assert await reader.next(0.1) is None
        await GroupLog(transport).publish(make_group(12))
        assert await reader.next(5.0) == Entry(13, make_group(12))


async def test_an_undecodable_message_is_kept_in_dead_once_and_passed_over(broker: Broker) -> None:
    async with broker.open() as transport:
        await transport.publish("groups.train", b"\xffjunk", message_id="train-00000007")
        await transport.publish("groups.train", encode(make_void(3)))
        await GroupLog(transport).publish(make_group(8))
        for _ in range(2):
            first, second, third = await entries(transport, 3)
            assert isinstance(first.record, DeadLetter)
            assert (first.sequence, first.record.ticket_id) == (1, "train-00000007")
            assert isinstance(second.record, DeadLetter)
            assert second.record.ticket_id is None
            assert third == Entry(3, make_group(8))
        assert (await transport.extent(Stream.DEAD)).messages == 2
        reader = await transport.reader(Stream.DEAD, 0)
        dead = (await reader.fetch(1, 5.0))[0]
        await reader.close()
        assert (dead.subject, dead.data) == ("dead.groups", b"\xffjunk")
        assert dead.message_id == "dead-GROUPS-1"
        assert dead.headers["Horizon-Subject"] == "groups.train"


async def test_a_reader_whose_cursor_was_purged_reports_the_gap(broker: Broker) -> None:
    async with broker.open() as transport:
        log = GroupLog(transport)
        for number in range(4):
            await log.publish(make_group(number))
        await log.purge_below(3)
        assert [entry.sequence for entry in await entries(transport, 2, after=2)] == [3, 4]
        with pytest.raises(LogGap):
            await entries(transport, 1, after=1)


async def test_a_group_over_the_payload_limit_travels_in_parts(broker: Broker) -> None:
    async with broker.open() as transport:
        group = large_group(3, tokens=700_000)
        assert len(encode(group)) > transport.max_payload_bytes
        log = GroupLog(transport)
        assert not (await log.publish(group)).duplicate
        assert (await log.publish(group)).duplicate
        await log.publish(make_group(4))
        assert await subjects(transport) == ["groups.part"] * 2 + [
            "groups.joined",
            "groups.train",
        ]
        assert await entries(transport, 2) == [Entry(3, group), Entry(4, make_group(4))]


@dataclass
class SmallLog:
    """A log in memory whose messages hold a kilobyte."""

    server: MemoryServer
    transport: MemoryTransport
    log: GroupLog


@pytest.fixture
def small() -> SmallLog:
    server = MemoryServer(max_payload_bytes=SMALL_PAYLOAD)
    transport = MemoryTransport(server)
    log = GroupLog(transport)
    # Some tests make the log smaller than a group for a while, to interrupt its upload.
    log._room = sys.maxsize
    return SmallLog(server, transport, log)


async def test_parts_of_several_actors_may_interleave(small: SmallLog) -> None:
    wanted = [large_group(number, tokens=600, seed=number) for number in range(4)]
    await asyncio.gather(
        *(GroupLog(MemoryTransport(small.server)).publish(group) for group in wanted)
    )
    read = await entries(small.transport, 4)
    assert [entry.record for entry in read] == wanted


async def test_a_crash_between_parts_leaves_nothing_to_read_and_another_actor_ends_the_ticket(
    small: SmallLog,
) -> None:
    small.server.max_log_bytes = (
        2_500  # room for two of the five parts: the publisher stops in between
    )
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await small.log.publish(large_group(0, tokens=600, seed=1))
    reader = await small.log.read(after=0)
    assert await reader.next(0.05) is None
    small.server.max_log_bytes = 1 << 20
    second = large_group(0, tokens=600, seed=2)
    assert not (await small.log.publish(second)).duplicate
    entry = await reader.next(1.0)
    assert entry is not None
    assert entry.record == second


async def test_the_same_actor_finishes_an_upload_that_was_interrupted(small: SmallLog) -> None:
    group = large_group(0, tokens=600)
    small.server.max_log_bytes = 2_500
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await small.log.publish(group)
    small.server.max_log_bytes = 1 << 20
    await small.log.publish(group)
    assert [entry.record for entry in await entries(small.transport, 1)] == [group]


async def interrupted(
    small: SmallLog, group: Group, meanwhile: Callable[[], Awaitable[T]]
) -> tuple[T, Stored]:
    """Publish a large group, and do something else when its upload stops between two parts at a full log."""
    small.server.max_log_bytes = 2_500
    async with asyncio.TaskGroup() as tasks:
        upload = tasks.create_task(small.log.publish(group))
        await asyncio.sleep(0.02)
        small.server.max_log_bytes = 1 << 20
        done = await meanwhile()
    return done, upload.result()


@pytest.mark.parametrize("later", [False, True], ids=["the-newest", "with-another-behind"])
async def test_a_purge_keeps_the_parts_that_a_later_entry_joins(
    small: SmallLog, later: bool
) -> None:
    group = large_group(1, tokens=600)
    between, joined = await interrupted(
        small, group, lambda: small.log.publish(make_group(0, rewards=(1.0,)))
    )
    assert 1 < between.sequence < joined.sequence
    if later:
        await small.log.publish(large_group(2, tokens=600))
    await small.log.purge_below(joined.sequence)
    assert [
        entry.record for entry in await entries(small.transport, 1, after=between.sequence)
    ] == [group]
    await small.log.purge_below(joined.sequence + 1)
    assert (await small.transport.extent(Stream.GROUPS)).first_sequence == joined.sequence + 1


async def test_a_purge_that_cannot_see_what_is_joined_later_removes_nothing(
    small: SmallLog,
) -> None:
    await small.log.publish(make_group(0, rewards=(1.0,)))
    await small.log.publish(large_group(1, tokens=600))
    silent = SilentTransport(small.server)
    before = await silent.extent(Stream.GROUPS)
    with pytest.raises(BrokerUnreachable):
        await GroupLog(silent).purge_below(2)
    assert await silent.extent(Stream.GROUPS) == before
    assert silent.readers == 0


async def test_parts_that_do_not_come_are_no_dead_letter(small: SmallLog) -> None:
    await small.log.publish(large_group(1, tokens=600))
    joined = await small.transport.last(Stream.GROUPS, "groups.joined")
    assert joined is not None
    silent = SilentTransport(small.server, delivered=1)
    reader = await GroupLog(silent).read(after=joined.sequence - 1)
    with pytest.raises(BrokerUnreachable):
        await reader.next(1.0)
    silent.delivered = 100
    entry = await reader.next(1.0)
    assert entry == Entry(joined.sequence, large_group(1, tokens=600))
    assert (await silent.extent(Stream.DEAD)).messages == 0


async def test_an_upload_that_a_purge_has_passed_is_made_again(small: SmallLog) -> None:
    async def consumed() -> None:
        between = await small.log.publish(make_group(0, rewards=(1.0,)))
        await small.log.purge_below(between.sequence + 1)

    group = large_group(1, tokens=600)
    _, joined = await interrupted(small, group, consumed)
    after = (await small.transport.extent(Stream.GROUPS)).first_sequence - 1
    assert await entries(small.transport, 1, after) == [Entry(joined.sequence, group)]
    assert (await small.log.publish(group)).duplicate


async def test_an_upload_that_is_taken_up_after_its_parts_were_purged_is_whole(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with broker.open() as transport:
        transport.max_payload_bytes = SMALL_PAYLOAD
        log, group, publish = GroupLog(transport), large_group(0, tokens=600), transport.publish

        async def cut(subject: str, data: bytes, **others: str) -> Stored:
            if subject == "groups.joined":
                raise BrokerUnreachable("cut off")
            return await publish(subject, data, message_id=others["message_id"])

        with monkeypatch.context() as patch:
            patch.setattr(transport, "publish", cut)
            with pytest.raises(BrokerUnreachable):
                await log.publish(group)
        parts = (await transport.extent(Stream.GROUPS)).last_sequence
        await transport.purge(Stream.GROUPS, below=parts + 1)
        joined = await log.publish(group)
        assert joined.sequence == 2 * parts + 1
        assert await entries(transport, 1, after=parts) == [Entry(joined.sequence, group)]


def purge_at_the_join(transport: Transport, patch: pytest.MonkeyPatch) -> None:
    """Let a purge take all parts between an upload's last look and its joining message."""
    publish = transport.publish

    async def late(subject: str, data: bytes, **others: Any) -> Stored:
        if subject == "groups.joined":
            patch.undo()
            await transport.purge(
                Stream.GROUPS, below=(await transport.extent(Stream.GROUPS)).last_sequence + 1
            )
        return await publish(subject, data, **others)

    patch.setattr(transport, "publish", late)


async def test_a_group_whose_parts_are_purged_as_it_is_joined_is_published_again(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with broker.open() as transport:
        transport.max_payload_bytes = SMALL_PAYLOAD
        log, group = GroupLog(transport), large_group(0, tokens=600)
        purge_at_the_join(transport, monkeypatch)
        stored = await log.publish(group)
        dead, whole = await entries(
            transport, 2, after=(await transport.extent(Stream.GROUPS)).first_sequence - 1
        )
        assert whole == Entry(stored.sequence, group)
        assert isinstance(dead.record, DeadLetter)
        assert (dead.record.ticket_id, dead.record.cause) == (None, "purged")
        # The end that ended nothing holds nothing back.
        await log.purge_below(dead.sequence + 1)
        assert (await transport.extent(Stream.GROUPS)).first_sequence == dead.sequence + 1
        assert (await log.publish(group)).duplicate


async def test_when_the_sender_of_purged_parts_has_died_the_next_end_of_the_ticket_is_stored(
    small: SmallLog,
) -> None:
    await small.transport.publish(
        "groups.part", b"x", message_id="train-00000000.0000000000000000.0"
    )
    await small.transport.purge(Stream.GROUPS, below=2)
    headers = {"Horizon-Parts": "1", "Horizon-Digest": "0" * 32, "Horizon-First-Sequence": "1"}
    joined = await small.transport.publish(
        "groups.joined", b"", message_id="train-00000000", headers=headers
    )
    state = StateStore(small.transport)
    await state.put(Key.PROGRESS, Progress(cursor=joined.sequence - 1))
    assert (await small.log.publish(make_group(0))).duplicate  # the learner may yet read it
    await state.put(
        Key.PROGRESS, Progress(cursor=joined.sequence, lowest_unsettled={Kind.TRAIN: 1})
    )
    assert (await small.log.publish(make_group(0))).duplicate  # the ticket has ended
    await state.put(
        Key.PROGRESS, Progress(cursor=joined.sequence, ended_ranges={Kind.TRAIN: ((1, 3),)})
    )
    assert not (await small.log.publish(make_group(0))).duplicate
    assert (await small.log.publish_void(make_void(0))).duplicate
    _, entry = await entries(small.transport, 2, after=joined.sequence - 1)
    assert entry.record == make_group(0)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Horizon-Parts": "2", "Horizon-Digest": "0" * 32, "Horizon-First-Sequence": "1"},
        {"Horizon-Parts": "99999999", "Horizon-Digest": "0" * 32, "Horizon-First-Sequence": "1"},
        {"Horizon-Parts": "-1", "Horizon-Digest": "x", "Horizon-First-Sequence": "abc"},
        {"Horizon-Parts": "1", "Horizon-Digest": "x", "Horizon-First-Sequence": "77"},
    ],
)
async def test_a_joining_message_without_its_parts_is_a_dead_letter(
    small: SmallLog, headers: dict[str, str]
) -> None:
    await small.transport.publish(
        "groups.part", b"x", message_id="train-00000000.0000000000000000.0"
    )
    await small.transport.publish("groups.part", b"y", message_id="someone-else")
    await small.transport.publish(
        "groups.joined", b"", message_id="train-00000000", headers=headers
    )
    async with asyncio.timeout(5.0):
        [entry] = await entries(small.transport, 1)
    assert isinstance(entry.record, DeadLetter)
    assert entry.record.ticket_id == "train-00000000"


async def test_joined_parts_that_hold_no_group_are_kept_whole_in_dead(small: SmallLog) -> None:
    junk = b"\xc1" * 2_500
    await small.log._publish_parts("train-00000000", "train-00000000", junk)
    [entry] = await entries(small.transport, 1)
    assert isinstance(entry.record, DeadLetter)
    reader = await small.transport.reader(Stream.DEAD, 0)
    pieces = await reader.fetch(10, 1.0)
    assert b"".join(piece.data for piece in pieces) == junk
    assert [piece.headers["Horizon-Offset"] for piece in pieces] == ["0", "1024", "2048"]


async def test_a_group_whose_earlier_ends_were_all_refused_does_not_walk_through_each_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("horizonrl.broker.groups.AGAIN_S", 0.0)

    transport = MemoryTransport(MemoryServer(), "run")
    log, state = GroupLog(transport), StateStore(transport)
    published: list[str] = []
    publish = transport.publish

    async def noted(
        subject: str, data: bytes, *, message_id: str | None = None, **named: Any
    ) -> Any:
        published.append(message_id or "")
        return await publish(subject, data, message_id=message_id, **named)

    transport.publish = noted  # type: ignore[method-assign]
    for cursor in range(1, 21):
        published.clear()
        assert not (await log.publish(make_group(0))).duplicate
        await state.put(Key.PROGRESS, Progress(cursor=cursor))  # the learner passes over it
    assert len(published) == CHAIN + 2
    assert published[-1] == f"train-00000000{REPEAT}19"
