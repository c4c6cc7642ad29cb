"""What every transport keeps to (broker/api.py): messages, readers, purges. Tickets and keys have their own files."""

import asyncio

import pytest

from horizonrl.broker.api import Key, Message, Role, Stream, Transport
from horizonrl.broker.connect import connect, connected
from horizonrl.common.config.schema import BrokerSection
from horizonrl.common.errors import LogGap, RecordTooLarge, RunUnknown
from tests.brokers import Broker, fill


@pytest.mark.parametrize("role", [Role.CONTROLLER, Role.LEARNER, Role.ACTOR])
async def test_who_asks_for_an_existing_run_makes_none_and_waits_for_none(
    broker: Broker, role: Role
) -> None:
    settings = BrokerSection(url=broker.url)
    with pytest.raises(RunUnknown, match=f"no streams of run {broker.run}"):
        await connect(broker.run, settings, role, existing=True)
    with pytest.raises(RunUnknown):
        await connect(broker.run, settings, role, existing=True)
    async with broker.open(), connected(broker.run, settings, role, existing=True) as transport:
        assert await transport.get(Key.PROGRESS) is None


async def read_all(
    transport: Transport, after: int, count: int, subject: str | None = None
) -> list[Message]:
    reader = await transport.reader(Stream.GROUPS, after, subject)
    messages: list[Message] = []
    while len(messages) < count and (batch := await reader.fetch(4, 5.0)):
        messages += batch
    await reader.close()
    return messages


async def test_a_message_is_stored_once_under_its_id(broker: Broker) -> None:
    async with broker.open() as transport:
        first = await transport.publish("groups.train", b"one", message_id="train-00000001")
        again = await transport.publish("groups.void", b"other", message_id="train-00000001")
        assert (first.duplicate, again.duplicate) == (False, True)
        assert again.sequence == first.sequence
        assert (await transport.extent(Stream.GROUPS)).messages == 1


async def test_messages_without_an_id_are_all_stored(broker: Broker) -> None:
    async with broker.open() as transport:
        stored = [await transport.publish("dead.groups", b"x") for _ in range(2)]
        assert [word.sequence for word in stored] == [1, 2]
        last = await transport.last(Stream.DEAD, "dead.groups")
        assert last is not None
        assert (last.message_id, last.headers) == (None, {})


async def test_a_reader_sees_subject_data_id_headers_and_sequence_in_order(broker: Broker) -> None:
    async with broker.open() as transport:
        await transport.publish(
            "groups.train", b"\x00\xff", message_id="a", headers={"Horizon-Offset": "7"}
        )
        await transport.publish("groups.void", b"", message_id="b")
        first, second = await read_all(transport, 0, 2)
        assert (first.subject, first.data, first.sequence) == ("groups.train", b"\x00\xff", 1)
        assert (first.message_id, first.headers) == ("a", {"Horizon-Offset": "7"})
        assert (second.subject, second.data, second.sequence) == ("groups.void", b"", 2)
        assert (second.message_id, second.headers) == ("b", {})


async def test_a_reader_starts_after_its_sequence_and_waits_for_what_comes(broker: Broker) -> None:
    async with broker.open() as transport:
        await fill(transport, 3)
        reader = await transport.reader(Stream.GROUPS, after=2)
        assert [message.sequence for message in await reader.fetch(10, 5.0)] == [3]
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(reader.fetch(10, 5.0))
            await asyncio.sleep(0.05)
            await transport.publish("groups.eval", b"late")
        assert [message.data for message in waiting.result()] == [b"late"]


async def test_a_reader_without_messages_returns_empty_at_its_deadline(broker: Broker) -> None:
    async with broker.open() as transport:
        reader = await transport.reader(Stream.GROUPS, after=0)
        async with asyncio.timeout(5.0):
            assert await reader.fetch(10, 0.1) == []
        await fill(transport, 1)
        assert len(await reader.fetch(10, 5.0)) == 1


async def test_a_subject_narrows_a_reader_and_readers_do_not_disturb_one_another(
    broker: Broker,
) -> None:
    async with broker.open() as transport:
        for index in range(6):
            await transport.publish("groups.part" if index % 2 else "groups.train", b"%d" % index)
        parts, whole = await asyncio.gather(
            read_all(transport, 0, 3, "groups.part"), read_all(transport, 0, 6, "groups.>")
        )
        assert [message.sequence for message in parts] == [2, 4, 6]
        assert [message.sequence for message in whole] == [1, 2, 3, 4, 5, 6]


async def test_a_reader_whose_next_message_was_purged_reports_the_gap(broker: Broker) -> None:
    async with broker.open() as transport:
        await fill(transport, 5)
        await transport.purge(Stream.GROUPS, below=4)
        assert [message.sequence for message in await read_all(transport, 3, 2)] == [4, 5]
        with pytest.raises(LogGap, match="begins at 4 but 3"):
            await read_all(transport, 2, 1)


async def test_a_reader_beyond_the_end_of_the_log_reports_that_it_is_another_log(
    broker: Broker,
) -> None:
    async with broker.open() as transport:
        await fill(transport, 2)
        with pytest.raises(LogGap, match="ends at 2 but 10"):
            await read_all(transport, 9, 1)


async def test_a_purge_of_everything_keeps_the_sequence_counting(broker: Broker) -> None:
    async with broker.open() as transport:
        await fill(transport, 3)
        await transport.purge(Stream.GROUPS, below=0)
        assert (await transport.extent(Stream.GROUPS)).messages == 3
        await transport.purge(Stream.GROUPS, below=4)
        extent = await transport.extent(Stream.GROUPS)
        assert (extent.first_sequence, extent.last_sequence, extent.messages) == (4, 3, 0)
        assert (await transport.publish("groups.train", b"x")).sequence == 4


async def test_a_purge_can_be_limited_to_one_subject(broker: Broker) -> None:
    async with broker.open() as transport:
        for subject in ("tickets.train", "tickets.eval", "tickets.train", "tickets.train"):
            await transport.publish(subject, subject.encode())
        await transport.purge(Stream.TICKETS, below=4, subject="tickets.train")
        assert (await transport.extent(Stream.TICKETS)).messages == 2
        eval_ticket = await transport.last(Stream.TICKETS, "tickets.eval")
        assert eval_ticket is not None
        assert eval_ticket.sequence == 2


async def test_the_last_message_of_a_subject_is_found_with_its_id(broker: Broker) -> None:
    async with broker.open() as transport:
        assert await transport.last(Stream.TICKETS, "tickets.train") is None
        await fill(transport, 2, "tickets.train")
        await fill(transport, 1, "tickets.eval", "e")
        last = await transport.last(Stream.TICKETS, "tickets.train")
        assert last == Message("tickets.train", b"1", 2, message_id="m-1")


async def test_a_message_over_the_payload_limit_is_refused_before_it_is_sent(
    broker: Broker,
) -> None:
    async with broker.open() as transport:
        with pytest.raises(RecordTooLarge, match=r"groups\.train"):
            await transport.publish("groups.train", bytes(transport.max_payload_bytes + 1))
        largest = await transport.publish(
            "groups.train",
            bytes(transport.max_payload_bytes),
            message_id="x" * 64,
            headers={"Horizon-A": "y" * 900},
        )
        assert largest.sequence == 1


async def test_a_full_log_makes_the_publisher_wait_until_a_purge_makes_room(broker: Broker) -> None:
    async with broker.open(max_log_bytes=4_000) as transport:
        await transport.publish("groups.train", bytes(3_000), message_id="a")
        async with asyncio.TaskGroup() as group:
            blocked = group.create_task(
                transport.publish("groups.train", bytes(3_000), message_id="b")
            )
            await asyncio.sleep(0.3)
            assert not blocked.done()
            assert transport.counters.full_waits >= 1
            await transport.publish("dead.groups", b"other streams are not held up")
            await transport.purge(Stream.GROUPS, below=2)
        assert blocked.result().sequence == 2


async def test_dead_letters_make_room_for_newer_ones_and_never_make_anyone_wait(
    broker: Broker,
) -> None:
    async with broker.open(max_log_bytes=8_000) as transport:
        for number in range(1, 11):
            assert (await transport.publish("dead.tickets", bytes(2_500))).sequence == number
        held = await transport.extent(Stream.DEAD)
        assert held.stored_bytes <= 8_000
        assert (held.first_sequence, held.last_sequence) == (8, 10)
        await transport.publish("dead.tickets", bytes(20_000))  # more than it may hold in all
        assert (await transport.extent(Stream.DEAD)).messages == 0


async def test_only_the_group_log_has_a_limit(broker: Broker) -> None:
    async with broker.open(max_log_bytes=1 << 20) as transport:
        assert (await transport.extent(Stream.GROUPS)).limit_bytes == 1 << 20
        assert (await transport.extent(Stream.WEIGHTS)).limit_bytes is None


async def test_a_cancelled_publisher_and_a_cancelled_lease_leave_the_transport_usable(
    broker: Broker,
) -> None:
    async with broker.open(max_log_bytes=1_000) as transport:
        await transport.publish("groups.train", bytes(600))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await transport.publish("groups.train", bytes(600))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await transport.lease(5.0)
        await transport.purge(Stream.GROUPS, below=2)
        assert (await transport.publish("groups.train", b"x")).sequence == 2


async def test_the_other_roles_use_what_the_controller_has_created(broker: Broker) -> None:
    async with (
        broker.open(ack_wait_s=7.0, max_log_bytes=9_000) as controller,
        broker.open(role=Role.LEARNER) as learner,
        broker.open(role=Role.ACTOR) as actor,
        broker.open(role=Role.MONITOR) as monitor,
    ):
        assert {role.run for role in (learner, actor, monitor)} == {controller.run}
        assert {role.ack_wait_s for role in (learner, actor, monitor)} == {7.0}
        await actor.publish("groups.train", b"x", message_id="a")
        (message,) = await read_all(learner, 0, 1)
        assert message.message_id == "a"
        assert (await monitor.extent(Stream.GROUPS)).limit_bytes == 9_000
