"""Where the tickets stand that have not ended: what is known without asking, and when the stream is asked again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horizonrl.broker.api import Stream
from horizonrl.broker.memory import MemoryServer, MemoryTransport
from horizonrl.broker.open_tickets import OpenTickets, open_tickets
from horizonrl.broker.tickets import ISSUED_AT_ONCE, TicketQueue
from horizonrl.common.state import Progress
from horizonrl.common.types import MAX_SPANS, Kind, PolicyVersion
from horizonrl.learner.intake.accounts import TicketNumbers
from tests.brokers import Broker
from tests.records import make_ticket


class Counting(MemoryTransport):
    """A transport that counts how often a stream is read."""

    scans = 0

    async def reader(self, *arguments, **named):  # type: ignore[no-untyped-def]
        self.scans += 1
        return await super().reader(*arguments, **named)


def ended(*ranges: tuple[int, int], lowest: int = 0) -> Progress:
    return Progress(lowest_unsettled={Kind.TRAIN: lowest}, ended_ranges={Kind.TRAIN: ranges})


async def test_tickets_that_are_issued_together_stand_in_the_order_of_their_numbers(
    broker: Broker,
) -> None:
    async with broker.open() as transport:
        queue, count = TicketQueue(transport), 2 * ISSUED_AT_ONCE + 5
        stored = await queue.issue_all([make_ticket(number) for number in range(count)])
        assert [each.sequence for each in stored] == list(range(1, count + 1))
        assert not any(each.duplicate for each in stored)
        again = await TicketQueue(transport).issue_all(
            [make_ticket(number) for number in range(count)]
        )
        assert [each.sequence for each in again] == [each.sequence for each in stored]
        assert all(each.duplicate for each in again)
        assert await TicketQueue(transport).count_issued(Kind.TRAIN) == count


async def test_numbers_that_were_passed_over_are_found_where_the_tickets_are_first_counted(
    broker: Broker,
) -> None:
    async with broker.open() as transport:
        for number in (0, 1, 4, 6):
            await TicketQueue(transport).issue(make_ticket(number))
        queue = TicketQueue(transport)
        assert await queue.count_issued(Kind.TRAIN) == 7
        assert list(queue.missing(Kind.TRAIN)) == [2, 3, 5]
        assert await queue.count_issued(Kind.DEMO) == 0
        assert list(queue.missing(Kind.DEMO)) == []


async def test_a_ticket_is_gone_once_it_is_acknowledged_and_its_end_has_not_been_read() -> None:
    transport = MemoryTransport(MemoryServer(), "run")
    queue = TicketQueue(transport)
    still_open = OpenTickets(transport, queue)
    await queue.issue_all([make_ticket(number) for number in range(6)])
    await still_open.refresh(ended(), {Kind.TRAIN: 6})
    assert still_open.gone(ended(), floor=0) == set()
    assert still_open.gone(ended((1, 1)), floor=3) == {(Kind.TRAIN, 0), (Kind.TRAIN, 2)}
    assert still_open.gone(ended(lowest=6), floor=6) == set()


async def test_what_the_controller_has_issued_itself_is_never_read_from_the_stream() -> None:
    transport = Counting(MemoryServer(), "run")
    queue = TicketQueue(transport)
    still_open = OpenTickets(transport, queue)
    await still_open.refresh(ended(), {})
    scans = transport.scans
    tickets = [make_ticket(number) for number in range(300)]
    for ticket, stored in zip(tickets, await queue.issue_all(tickets), strict=True):
        still_open.add(ticket, stored.sequence)
    for _ in range(5):
        await still_open.refresh(ended(), {Kind.TRAIN: 300})
        assert len(still_open.gone(ended((0, 9)), floor=20)) == 10
    assert transport.scans == scans


async def test_a_stream_that_has_lost_its_end_is_read_again_and_the_lost_tickets_are_absent() -> (
    None
):
    server = MemoryServer()
    transport = MemoryTransport(server, "run")
    queue = TicketQueue(transport)
    await queue.issue_all([make_ticket(number) for number in range(5)])
    still_open = OpenTickets(transport, queue)
    await still_open.refresh(ended(), {Kind.TRAIN: 5})
    stream = server.runs["run"].streams[Stream.TICKETS]
    for sequence in (4, 5):
        stream.remove(sequence)
    stream.last_sequence = 3
    await still_open.refresh(ended(), {Kind.TRAIN: 5})
    assert still_open.gone(ended(), floor=0) == {(Kind.TRAIN, 3), (Kind.TRAIN, 4)}
    stored, subject = await queue.reissue(make_ticket(3), 0)
    still_open.add(make_ticket(3), stored.sequence, subject)
    assert still_open.gone(ended(), floor=0) == {(Kind.TRAIN, 4)}
    assert await still_open.stored(Kind.TRAIN, 3) == (stored.sequence, make_ticket(3))
    assert await still_open.stored(Kind.TRAIN, 4) is None


async def test_nothing_is_purged_by_what_is_known_from_before_a_reconnect() -> None:
    transport = MemoryTransport(MemoryServer(), "run")
    queue = TicketQueue(transport)
    await queue.issue_all([make_ticket(number) for number in range(5)])
    still_open = OpenTickets(transport, queue)
    await still_open.refresh(ended(), {})
    transport.counters.reconnects += 1
    await still_open.purge(ended(lowest=4))
    assert (await transport.extent(Stream.TICKETS)).messages == 5
    await still_open.refresh(ended(), {})
    await still_open.purge(ended(lowest=4))
    assert (await transport.extent(Stream.TICKETS)).messages == 1


async def test_tickets_that_a_resumed_learner_has_open_again_are_found_though_they_had_ended() -> (
    None
):
    transport = MemoryTransport(MemoryServer(), "run")
    queue = TicketQueue(transport)
    await queue.issue_all([make_ticket(number) for number in range(5)])
    still_open = OpenTickets(transport, queue)
    before, after = (
        ended(lowest=4),
        ended(lowest=1).model_copy(update={"policy": PolicyVersion(lineage=1)}),
    )
    await still_open.refresh(before, {Kind.TRAIN: 5})
    await still_open.purge(before)
    assert still_open.gone(before, floor=4) == set()
    await still_open.purge(after)  # by what is known of another learner, nothing
    await still_open.refresh(after, {Kind.TRAIN: 5})
    assert still_open.gone(after, floor=4) == {(Kind.TRAIN, number) for number in (1, 2, 3)}


@given(st.sets(st.integers(0, 40)), st.integers(0, 45))
def test_open_tickets_are_those_issued_that_have_not_ended(numbers: set[int], issued: int) -> None:
    known = TicketNumbers()
    for number in numbers:
        known.add(number)
    lowest = known.lowest_missing
    progress = ended(*known.ranges(lowest), lowest=lowest)
    expected = [(Kind.TRAIN, number) for number in range(issued) if number not in numbers]
    assert list(open_tickets(progress, {Kind.TRAIN: issued})) == expected


def test_nothing_is_said_of_tickets_beyond_the_ranges_that_a_record_holds() -> None:
    """Ten thousand actors end tickets in any order: a ticket that the record leaves out is not a lost one."""
    ranges = tuple((2 * place + 1, 2 * place + 1) for place in range(MAX_SPANS))
    progress = ended(*ranges).model_copy(update={"policy": PolicyVersion(version=1)})
    last = ranges[-1][1]
    assert progress.tells(Kind.TRAIN, last)
    assert not progress.tells(Kind.TRAIN, last + 1)
    assert progress.ended(Kind.TRAIN, last)
    assert not progress.ended(Kind.TRAIN, last - 1)
    found = list(open_tickets(progress, {Kind.TRAIN: 10 * MAX_SPANS}))
    assert found == [(Kind.TRAIN, number) for number in range(0, last, 2)]


async def test_tickets_of_another_controller_that_come_during_a_scan_are_found_by_the_next() -> (
    None
):
    transport = MemoryTransport(MemoryServer(), "run")
    queue = TicketQueue(transport)
    still_open = OpenTickets(transport, queue)
    await queue.issue_all([make_ticket(0)])
    stored_tickets = queue.stored_tickets

    async def overtaken():  # type: ignore[no-untyped-def]
        found = await stored_tickets()
        await TicketQueue(transport).issue(make_ticket(1))
        still_open.distrust()
        return found

    queue.stored_tickets = overtaken  # type: ignore[method-assign]
    await still_open.refresh(Progress(), {Kind.TRAIN: 1})
    queue.stored_tickets = stored_tickets  # type: ignore[method-assign]
    await queue.issue_all([make_ticket(number) for number in (1, 2)])
    await still_open.purge(ended((0, 0), lowest=1))
    await still_open.refresh(ended((0, 0), lowest=1), {Kind.TRAIN: 3})
    await still_open.purge(ended((0, 0), lowest=1))
    assert [ticket.number for _, ticket in await queue.stored_tickets()] == [1, 2]


async def test_the_highest_ticket_of_a_kind_stays_though_lower_ones_were_stored_after_it() -> None:
    transport = MemoryTransport()
    queue = TicketQueue(transport)
    for number in (0, 3, 1, 2):
        await queue.issue(make_ticket(number))
    still_open = OpenTickets(transport, queue)
    await still_open.refresh(Progress(), {Kind.TRAIN: 4})
    await still_open.purge(ended(lowest=4))
    assert await TicketQueue(transport).count_issued(Kind.TRAIN) == 4
    assert [ticket.number for _, ticket in await queue.stored_tickets()] == [3, 1, 2]


@pytest.mark.parametrize("settled", [0, 2])
async def test_what_the_broker_has_lost_is_owed_as_far_as_it_is_due_and_counts_as_issued_no_further(
    settled: int,
) -> None:
    server = MemoryServer()
    transport = MemoryTransport(server, "run")
    queue = TicketQueue(transport)
    still_open = OpenTickets(transport, queue)
    await queue.issue_all([make_ticket(number) for number in range(5)])
    await still_open.refresh(ended(lowest=settled), {Kind.TRAIN: 5}, {Kind.TRAIN: 3})
    assert await queue.count_issued(Kind.TRAIN) == 5
    stream = server.runs["run"].streams[Stream.TICKETS]
    stream.messages.clear()
    stream.ids.clear()
    stream.last_sequence = 0
    await still_open.refresh(ended(lowest=settled), {Kind.TRAIN: 5}, {Kind.TRAIN: 3})
    assert await queue.count_issued(Kind.TRAIN) == 3
    lost = {(Kind.TRAIN, number) for number in range(settled, 3)}
    assert still_open.gone(ended(lowest=settled), floor=0) == lost


async def test_the_last_ticket_of_a_kind_stays_though_the_broker_has_lost_later_ones() -> None:
    server = MemoryServer()
    transport = MemoryTransport(server, "run")
    queue = TicketQueue(transport)
    still_open = OpenTickets(transport, queue)
    await queue.issue_all([make_ticket(number) for number in range(9)])
    await still_open.refresh(ended(lowest=8), {Kind.TRAIN: 9})
    await still_open.purge(ended(lowest=8))
    stream = server.runs["run"].streams[Stream.TICKETS]
    stream.messages.clear()
    stream.ids.clear()
    stream.last_sequence = 0
    transport.counters.reconnects += 1
    await queue.issue_all([make_ticket(number) for number in range(5)])
    await still_open.refresh(ended(lowest=5), {Kind.TRAIN: 5})
    await still_open.purge(ended(lowest=5))
    assert [ticket.number for _, ticket in await queue.stored_tickets()] == [4]
    # What is issued again counts as issued, and is not removed either.
    for number in (7, 8):
        stored, subject = await queue.reissue(make_ticket(number), 0)
        still_open.add(make_ticket(number), stored.sequence, subject)
    assert await TicketQueue(transport).count_issued(Kind.TRAIN) == 9
    await still_open.purge(ended(lowest=9))
    assert [ticket.number for _, ticket in await queue.stored_tickets()] == [8]
