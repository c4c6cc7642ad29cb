"""Several machines as one learner: how their nodes meet, and how each notices that another one is gone.

Place in the flow: `spawn.py` starts this node's ranks where `seat` puts them, and ends them when `ended` returns. Node
0 listens at the rendezvous. Every other node keeps one connection to it, over which both send a line of JSON every
`BEAT_S`: a killed process closes its connection at once, and a machine that is cut off is silent. So every node learns
of a loss within `SILENT_S`, in the middle of a step or between two. Nothing else of a run crosses these connections,
and they authenticate nobody: like the ranks' own, they belong on a private network. Imports no torch.
"""

import asyncio
import contextlib
import errno
import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from horizonrl.common.config.changes import config_changes
from horizonrl.common.errors import ConfigError, RunFailed, first_error
from horizonrl.common.logs import get_logger

log = get_logger()

BEAT_S = 2.0
SILENT_S = 30.0
"""A node that has said nothing for this long is gone. Longer than a pause of a virtual machine that is moved."""
LINE_BYTES = 1 << 20
"""Limit of a line. The longest is a node's recipe, whose `rollout.system_prompt` may be a long text."""
STALE_S = 90.0
"""How long a name may still have the address of the pod before this one: name servers keep it for 30 s, some twice."""
AGAIN_S = 1.0
"""Pause before a node asks again for a seat."""
STRANGER_S = 10.0
"""Longest time from a connection to its first line: a port scan must not hold a place."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """What one node knows of the meeting before it begins; `common/config/training.py` documents the keys."""

    host: str
    port: int
    node_rank: int
    nodes: int
    min_nodes: int
    join_timeout_s: float
    alike: Mapping[str, Any]
    """What has to be equal on all nodes, by name; values are JSON."""

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a node's ranks stand: `position` of `nodes`, and where their rank 0 listens."""

    position: int
    nodes: int
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class NodesEnd:
    """Why the nodes end together, and with which exit code."""

    code: int
    reason: str


class Node(Protocol):
    """This machine's side of the meeting."""

    async def seat(self) -> Seat:
        """Wait for the other nodes. Raises RunFailed if too few come in time, ConfigError for a recipe that differs."""

    async def ended(self) -> NodesEnd:
        """Wait until another node ends or is gone."""

    async def close(self, end: NodesEnd | None) -> None:
        """Tell the others how this node has ended, and leave."""


class Link:
    """A connection to another node: lines of JSON both ways. An empty object is a beat, which nobody has to see."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.peer = str(writer.get_extra_info("peername")[0])

    def send(self, **message: Any) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def receive(self, within_s: float | None = None) -> dict[str, Any]:
        """Return the next message that is no beat; raise ConnectionError when the other side is gone or silent."""
        silent_s = SILENT_S if within_s is None else within_s
        while True:
            try:
                async with asyncio.timeout(silent_s):
                    line = await self._reader.readline()
            except TimeoutError:
                raise ConnectionError(f"silent for {silent_s:g} s") from None
            except ValueError as error:  # a line without an end
                raise ConnectionError(str(error)) from None
            if not line.endswith(b"\n"):
                raise ConnectionError("its connection is closed")
            try:
                message: dict[str, Any] = dict(json.loads(line))
            except (ValueError, TypeError):
                raise ConnectionError(f"it sent {line[:40]!r}, which is no JSON object") from None
            if message:
                return message

    async def beat(self) -> None:
        """Send a beat every `BEAT_S`, for ever. A connection that is gone is noticed by the side that reads."""
        while True:
            self.send()
            await asyncio.sleep(BEAT_S)

    async def close(self) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            # What was sent still leaves, unless the other side no longer reads.
            async with asyncio.timeout(BEAT_S):
                await self._writer.drain()
        self._writer.close()


@dataclass
class Host:
    """Node 0: gathers the others, gives each its seat, and tells all of them when one is gone."""

    rendezvous: Rendezvous
    stop: asyncio.Event
    """Set when another node was asked to stop: the learner then ends with a last checkpoint."""
    _links: dict[int, Link] = field(default_factory=dict)
    _serving: "set[asyncio.Task[None]]" = field(default_factory=set)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _seated: bool = False
    _server: asyncio.Server | None = None

    def __post_init__(self) -> None:
        self._end: asyncio.Future[NodesEnd] = asyncio.get_running_loop().create_future()

    async def seat(self) -> Seat:
        asked = self.rendezvous
        self._server = await self._listen()
        log.info("nodes_awaited", at=asked.address, nodes=asked.nodes, for_s=asked.join_timeout_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(asked.join_timeout_s):
                while len(self._links) < asked.nodes - 1:
                    self._changed.clear()
                    await self._changed.wait()
        present = [0, *sorted(self._links)]
        missing = [node for node in range(asked.nodes) if node not in present]
        if len(present) < asked.min_nodes:
            reason = (
                f"{_name_nodes(missing)} of {asked.nodes} did not come to the rendezvous {asked.address} within "
                f"learner.join_timeout_s = {asked.join_timeout_s:g} s: start what is missing, or start all others with "
                f"learner.nodes = {len(present)}, or let learner.min_nodes be {len(present)}"
            )
            await self.close(NodesEnd(1, reason))
            raise RunFailed(reason)
        self._seated = True
        # On our own address of all that the name has: the one that was listened at.
        host = self._server.sockets[0].getsockname()[0]
        with socket.socket(self._server.sockets[0].family) as probe:
            probe.bind((host, 0))
            port = probe.getsockname()[1]
        for position, node in enumerate(present[1:], start=1):
            self._links[node].send(seat={"position": position, "nodes": len(present), "port": port})
        log.info(
            "nodes_joined",
            nodes=len(present),
            missing=missing,
            peers=[link.peer for link in self._links.values()],
        )
        return Seat(0, len(present), str(host), port)

    async def ended(self) -> NodesEnd:
        return await asyncio.shield(self._end)

    async def close(self, end: NodesEnd | None) -> None:
        self._seated = True
        if self._server is not None:
            self._server.close()
        if not self._end.done():
            self._end.set_result(end or NodesEnd(0, ""))
        for link in list(self._links.values()):
            if end is not None:
                link.send(end=end.code, reason=end.reason)
            await link.close()
        if self._serving:  # each notices that its connection is closed
            await asyncio.wait(self._serving, timeout=BEAT_S)

    async def _listen(self) -> asyncio.Server:
        asked = self.rendezvous
        began = time.monotonic()
        deadline = began + asked.join_timeout_s
        named = not (asked.host.replace(".", "").isdigit() or ":" in asked.host)
        while True:
            try:
                return await asyncio.start_server(
                    self._serve, asked.host, asked.port, limit=LINE_BYTES
                )
            except socket.gaierror as error:  # a pod's name may come a moment after the pod
                if time.monotonic() > deadline:
                    # Code 2 would end a pod's Job for good: not because the name server is away.
                    away = error.errno == socket.EAI_AGAIN
                    raise (RunFailed if away else ConfigError)(
                        f"learner.rendezvous is {asked.address!r}, whose host has no address ({error})"
                    ) from None
                await asyncio.sleep(AGAIN_S)
            except OSError as error:
                if (
                    error.errno == errno.EADDRNOTAVAIL
                    and named
                    and time.monotonic() < min(deadline, began + STALE_S)
                ):
                    await asyncio.sleep(AGAIN_S)
                    continue
                if error.errno == errno.EADDRINUSE:
                    raise RunFailed(
                        f"learner.rendezvous is {asked.address!r}, but something listens there already: another node "
                        "0, which has to end first, or a machine that needs a learner.node_rank of its own"
                    ) from None
                raise ConfigError(
                    f"learner.rendezvous is {asked.address!r}, which is no address of this machine ({error.strerror}), "
                    f"but learner.node_rank is 0: give the address of this machine, or a node_rank from 1 to "
                    f"{asked.nodes - 1} here"
                ) from None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection: a node that wants a seat, and keeps it until either side ends."""
        serving = asyncio.current_task()
        assert serving is not None
        self._serving.add(serving)
        link = Link(reader, writer)
        node: int | None = None
        try:
            hello = await link.receive(STRANGER_S)
            if answer := self._refusal(hello):
                link.send(**answer)
                return
            node = hello["node"]
            self._links[node] = link
            self._changed.set()
            async with asyncio.TaskGroup() as group:
                beats = group.create_task(link.beat())
                while "ended" not in (message := await link.receive()):
                    log.warning("node_asked_to_stop", node=node, peer=link.peer)
                    self.stop.set()
                beats.cancel()
            self._lose(node, link, str(message["ended"]))
        except* ConnectionError as errors:
            if node is None:
                log.warning(
                    "stranger_at_rendezvous", peer=link.peer, error=str(first_error(errors))
                )
            else:
                self._lose(node, link, str(first_error(errors)))
        except* (AttributeError, KeyError, TypeError) as errors:
            log.warning("stranger_at_rendezvous", peer=link.peer, error=repr(first_error(errors)))
        finally:
            await link.close()
            self._serving.discard(serving)

    def _refusal(self, hello: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return what to answer a node that gets no seat, or none now. Raises KeyError or so for what is no node's."""
        asked, node, theirs = self.rendezvous, hello["node"], hello["alike"]
        changed = config_changes(theirs, asked.alike)
        if differing := [
            f"{key}: {here!r}, on node 0 {there!r}" for key, (here, there) in changed.items()
        ]:
            log.warning("node_refused", node=node, differing=differing)
            return {
                "refused": f"node {node} differs from node 0 ({'; '.join(differing)}): start all nodes alike"
            }
        if node not in range(1, asked.nodes):
            raise KeyError(node)
        if node in self._links:
            return {
                "wait": f"{self._links[node].peer} is node {node} already: each machine needs its own node_rank"
            }
        if self._seated:
            return {
                "wait": f"the learner runs without node {node}, which can join when node 0 starts again"
            }
        return None

    def _lose(self, node: int, link: Link, why: str) -> None:
        if self._links.get(node) is link:
            del self._links[node]
        if self._seated and not self._end.done():
            self._end.set_result(NodesEnd(1, f"node {node} ({link.peer}) is gone: {why}"))


@dataclass
class Member:
    """Any node but 0: takes the seat that node 0 gives it, and ends when node 0 says so or is gone."""

    rendezvous: Rendezvous
    _link: Link | None = None
    _beats: asyncio.Task[None] | None = None

    async def seat(self) -> Seat:
        asked = self.rendezvous
        deadline = time.monotonic() + asked.join_timeout_s
        log.info(
            "node_0_awaited", at=asked.address, node=asked.node_rank, for_s=asked.join_timeout_s
        )
        reason = ""
        while True:
            try:
                return await self._ask(max(deadline - time.monotonic(), AGAIN_S))
            except (OSError, TimeoutError) as error:
                await self.close(None)
                if reason != (reason := str(error) or type(error).__name__):
                    log.info("no_seat_yet", at=asked.address, node=asked.node_rank, reason=reason)
                if time.monotonic() > deadline:
                    raise RunFailed(
                        f"node {asked.node_rank} got no seat at the rendezvous {asked.address} within "
                        f"learner.join_timeout_s = {asked.join_timeout_s:g} s ({reason}): is node 0 started, and can "
                        "this machine reach it?"
                    ) from None
            await asyncio.sleep(AGAIN_S)

    async def ended(self) -> NodesEnd:
        assert self._link is not None
        try:
            message = await self._link.receive()
            reason = message["reason"]
            return NodesEnd(int(message["end"]), reason and f"node 0 has ended: {reason}")
        except (ConnectionError, ValueError, KeyError) as error:
            return NodesEnd(1, f"node 0 ({self.rendezvous.address}) is gone: {error}")

    async def close(self, end: NodesEnd | None) -> None:
        if self._beats is not None:
            self._beats.cancel()
        if self._link is not None:
            if end is not None:
                self._link.send(ended=end.reason)
            await self._link.close()

    def leave(self) -> None:
        """Ask node 0 for a last checkpoint and the end: this machine is about to go."""
        if self._link is not None:
            self._link.send(leaves=True)

    async def _ask(self, within_s: float) -> Seat:
        asked = self.rendezvous
        async with asyncio.timeout(within_s):
            self._link = Link(
                *await asyncio.open_connection(asked.host, asked.port, limit=LINE_BYTES)
            )
        self._beats = asyncio.create_task(self._link.beat())
        self._link.send(node=asked.node_rank, alike=dict(asked.alike))
        # Without a deadline of its own: node 0 waits for the others no longer than it may.
        match await self._link.receive():
            case {"seat": seat}:
                return Seat(seat["position"], seat["nodes"], self._link.peer, seat["port"])
            case {"refused": reason}:
                raise ConfigError(str(reason))
            case {"end": _, "reason": reason}:
                raise RunFailed(str(reason))
            case answer:
                raise ConnectionRefusedError(str(answer.get("wait", answer)))


def _name_nodes(nodes: list[int]) -> str:
    return f"node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, nodes))}"
