"""Batches of direct gets as a server, a network or an older server may answer them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from nats.aio.client import Client
from structlog.testing import capture_logs

from horizonrl.broker.api import Message
from horizonrl.broker.connect import connected
from horizonrl.broker.groups import GroupLog
from horizonrl.broker.nats.connection import Connection
from horizonrl.broker.nats.freshness import Freshness
from horizonrl.broker.nats.reader import NatsReader, add_batch
from horizonrl.broker.nats.server import EmbeddedServer
from horizonrl.common.config.schema import BrokerSection
from tests.records import make_group

END = b"NATS/1.0 204 EOB\r\nNats-Num-Pending: 0\r\nNats-Last-Sequence: 9\r\n\r\n"
NOBODY = b"NATS/1.0 503\r\n\r\n"


def answer(sequence: int, before: int | None, own: bytes = b"NATS/1.0\r\n") -> bytes:
    batch = b"" if before is None else b"Nats-Num-Pending: 7\r\nNats-Last-Sequence: %d\r\n" % before
    added = (
        b"Nats-Stream: run_GROUPS\r\nNats-Subject: run.groups.train\r\nNats-Sequence: %d\r\n"
        % sequence
    )
    return own + added + b"Nats-Time-Stamp: 2026-01-02T03:04:05.678901234Z\r\n" + batch + b"\r\n"


class Scripted(Connection):
    """A connection whose server gives these answers to every batch."""

    def __init__(self, answers: list[bytes]) -> None:
        super().__init__("nats://nowhere")

        @asynccontextmanager
        async def unread_answers() -> AsyncIterator[tuple[str, asyncio.Queue[tuple[bytes, bytes]]]]:
            queue: asyncio.Queue[tuple[bytes, bytes]] = asyncio.Queue()
            for headers in answers:
                queue.put_nowait((headers, b"data"))
            yield "inbox", queue

        async def publish(*_: object, **__: object) -> None: ...

        parse = Client._parse_header_lines
        client = SimpleNamespace(
            unread_answers=unread_answers, publish=publish, _parse_header_lines=parse
        )
        self.client = cast(Any, client)
        self._up.set()

    def api(self, stream: str) -> str:
        return "$JS.API"

    def jetstream(self, *_: object) -> Any:
        return None


def batch(answers: list[bytes]) -> list[Message]:
    found: list[Message] = []
    query = {"seq": 5, "next_by_subj": "run.groups.>", "batch": 8}
    asyncio.run(add_batch(Scripted(answers), "run_GROUPS", "run.", query, found))
    return found


@pytest.mark.parametrize(
    ("answers", "sequences"),
    [
        ([answer(5, 0), answer(6, 5), answer(9, 6), END], [5, 6, 9]),
        ([answer(5, 0), answer(9, 6), END], [5]),
        ([answer(6, 5), answer(9, 6), END], []),
        ([answer(5, None)], [5]),
        ([answer(5, 0), NOBODY], [5]),
        ([NOBODY], []),
        ([b"NATS/1.0 404 Message Not Found\r\n\r\n"], []),
        ([b""], []),
    ],
    ids=[
        "whole",
        "one-lost",
        "first-lost",
        "server-2.10",
        "moved",
        "nobody",
        "nothing",
        "no-headers",
    ],
)
def test_a_batch_ends_where_an_answer_is_missing(
    answers: list[bytes], sequences: list[int]
) -> None:
    found = batch(answers)
    assert [message.sequence for message in found] == sequences
    assert {message.subject for message in found} <= {"groups.train"}
    assert {message.stored_at for message in found} <= {1767323045.0}


def test_a_publishers_headers_are_kept_and_the_servers_are_not() -> None:
    own = b"NATS/1.0\r\nNats-Msg-Id: train-1\r\nStatus: 408\r\nNats-Last-Sequence: 3\r\n"
    (found,) = batch([answer(5, 0, own), END])
    assert found.message_id == "train-1"
    assert found.headers == {"Status": "408", "Nats-Last-Sequence": "3"}


def test_what_has_come_when_the_time_runs_out_is_kept() -> None:
    """Else a reader behind a slow line would ask for the same batch for ever."""

    async def read() -> tuple[list[int], int]:
        connection = Scripted([answer(5, 0), answer(6, 5)])  # and then nothing, not even an end
        reader = NatsReader(
            connection, ("run_GROUPS", "run.groups.>", "run."), 4, Freshness(clustered=False)
        )
        reader._flowing, reader._reconnects = True, connection.counters.reconnects
        found = await reader.fetch(8, 0.1)
        return [message.sequence for message in found], reader._next

    assert asyncio.run(read()) == ([5, 6], 7)


@pytest.mark.process
def test_what_a_damaged_replica_leaves_out_is_taken_from_the_leader_and_a_hole_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def incomplete(*arguments: Any) -> None:
        await add_batch(*arguments)
        found = arguments[-1]
        # As a replica without them.
        found[:] = [message for message in found if message.sequence not in (3, 4)]

    monkeypatch.setattr("horizonrl.broker.nats.reader.add_batch", incomplete)

    async def scenario() -> None:
        async with (
            EmbeddedServer(tmp_path / "nats") as server,
            connected("r", BrokerSection(url=server.url)) as there,
        ):
            log = GroupLog(there)
            for number in range(7):
                await log.publish(make_group(number))
            await there._connection.jetstream().delete_msg("r_GROUPS", 6)  # type: ignore[attr-defined]
            reader = await log.read(0)
            with capture_logs() as logs:
                entries = [entry for _ in range(6) if (entry := await reader.next(5.0)) is not None]
            assert [entry.sequence for entry in entries] == [1, 2, 3, 4, 5, 7]
            assert [entry.holes for entry in entries] == [(), (), (), (), (), ((6, 6),)]
            (damage,) = [line for line in logs if line["event"] == "replica_damaged"]
            assert (damage["left_out"], damage["first"]) == (2, 3)
            assert [
                (line["first"], line["last"]) for line in logs if line["event"] == "log_hole"
            ] == [(6, 6)]

    asyncio.run(scenario())
