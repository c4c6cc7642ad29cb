"""The launcher of this machine's ranks: one process per rank, all of which end together.

Place in the flow: `nodes.py` says where this machine's ranks stand among those of other machines; `launch.py` is what
each rank runs. The launcher only waits, and imports no torch. Used by the learner and by `horizonrl history replay`.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Sequence
from typing import Any

import psutil

from horizonrl.common.children import bind, bound
from horizonrl.common.errors import RunFailed
from horizonrl.common.logs import get_logger
from horizonrl.common.processes import horizonrl_command
from horizonrl.learner.ranks.nodes import Host, Member, Node, NodesEnd, Rendezvous, Seat

log = get_logger()

AFTERMATH_S = 5.0
"""How long a launcher waits after a first loss, for the other ranks' own errors and for which node is gone."""
GOODBYE_S = 30.0
"""How long a node whose ranks have ended waits for node 0, whose rank 0 has a tracker and an event loop to close."""
LAUNCHER = "HORIZONRL_LAUNCHER"
"""Environment variable with the id of the process that launched the ranks: they do not outlive it."""
LOOPBACK = "127.0.0.1"


def spawn_ranks(ranks: int, shutdown_s: float, rendezvous: Rendezvous | None = None) -> None:
    """Launch `ranks` processes here and end with their exit code. Returns in each rank, and if there is only one.

    Ranks that have not ended `shutdown_s` after SIGTERM are killed. With a rendezvous, the other nodes' ranks are part
    of the same learner. The code is then 0 only if the run is over.
    """
    # Before torch is imported. Packed micro-batches have ever new lengths, which would leave holes in the GPU's memory.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the name that torch had for it earlier
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # A single machine's rank 0 writes a last checkpoint when its launcher dies. With more machines it could not: the
    # launchers of the others end their ranks at once.
    orphaned = signal.SIGTERM if rendezvous is None else signal.SIGKILL
    if launcher := os.environ.get(LAUNCHER):
        # This is a rank: the launcher has started the same command line once more.
        bind(int(launcher), orphaned)
    elif ranks > 1 or rendezvous is not None:
        end = asyncio.run(_launch(ranks, shutdown_s, rendezvous, orphaned))
        if end.reason:
            log.error("ranks_ended", code=end.code, reason=end.reason)
            print(f"error: {end.reason}", file=sys.stderr)
        sys.exit(end.code)


async def _launch(
    ranks: int, shutdown_s: float, rendezvous: Rendezvous | None, orphaned: signal.Signals
) -> NodesEnd:
    """Meet the other nodes, start the ranks, and wait until they or another node end.

    Takes: SIGTERM. Gives: the end, to the other nodes too. Waits for: ranks, other nodes. Woken by: any of them.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    stopped = asyncio.create_task(stop.wait())
    node: Node | None = None
    if rendezvous is not None:
        node = Member(rendezvous) if rendezvous.node_rank else Host(rendezvous, stop)
    seating = asyncio.create_task(_seat(node))
    await asyncio.wait({seating, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not seating.done():
        seating.cancel()
        return NodesEnd(1, "asked to stop before all nodes had come")
    processes = [await _start(seating.result(), local, ranks, orphaned) for local in range(ranks)]
    try:
        end = await _end(processes, node, stopped, shutdown_s)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):  # those that have ended
                process.kill()
            await process.wait()
    if node is not None:
        await node.close(end)
    return end


async def _seat(node: Node | None) -> Seat:
    return Seat(0, 1, LOOPBACK, free_port(LOOPBACK)) if node is None else await node.seat()


async def _end(
    processes: Sequence[Process],
    node: Node | None,
    stopped: "asyncio.Task[bool]",
    shutdown_s: float,
) -> NodesEnd:
    """Wait for the first end of a rank or of another node, pass SIGTERM on meanwhile, and say what happened."""
    ours = asyncio.create_task(_ranks_end(processes))
    # Without other nodes there is nothing that would ever set it.
    theirs: asyncio.Future[NodesEnd] = (
        asyncio.Future() if node is None else asyncio.create_task(node.ended())
    )
    news: set[asyncio.Future[NodesEnd]] = {ours, theirs}
    first: set[asyncio.Future[Any]] = {*news, stopped}
    await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
    if stopped.done() and not (ours.done() or theirs.done()):
        if isinstance(node, Member):
            node.leave()  # rank 0 decides when all end, and its node is told
        else:
            for process in processes:
                process.send_signal(signal.SIGTERM)
        await asyncio.wait(news, timeout=shutdown_s, return_when=asyncio.FIRST_COMPLETED)
    well = ours.done() and ours.result().code == 0
    if node is not None and not (well and isinstance(node, Host)):
        # The one loss explains the other: ours says which rank, theirs which machine.
        await asyncio.wait(news, timeout=GOODBYE_S if well else AFTERMATH_S)
    ends = [task.result() for task in (theirs, ours) if task.done()]
    for task in news:
        task.cancel()
    if not ends:
        return NodesEnd(
            1,
            f"the ranks have not ended within learner.shutdown_s = {shutdown_s:g} s of SIGTERM: they were killed",
        )
    if node is None or isinstance(node, Member) or not well:
        code = max(end.code for end in ends)
        if isinstance(node, Member) and not theirs.done():
            code = max(code, 1)
        if node is None and stopped.done() and well:
            # As a learner of one process: its pod must not count as finished.
            code = 128 + signal.SIGTERM
        return NodesEnd(code, "; ".join(end.reason for end in ends if end.reason))
    # A supervisor starts a node again unless it ends with 0: all of them have to come back, or none.
    return (
        NodesEnd(1, "stopped before the last step: the next start resumes")
        if stopped.done()
        else NodesEnd(0, "")
    )


async def _ranks_end(processes: Sequence[Process]) -> NodesEnd:
    """Wait until all ranks have ended well, or for the first that has not."""
    for ending in asyncio.as_completed(
        [_wait_for_end(local, process) for local, process in enumerate(processes)]
    ):
        local, code = await ending
        if code:
            # At least 1, since the code of a rank that a signal ended is negative.
            return NodesEnd(max(1, code), f"rank {local} of this machine ended with code {code}")
    return NodesEnd(0, "")


async def _wait_for_end(local: int, process: Process) -> tuple[int, int]:
    return local, await process.wait()


async def _start(seat: Seat, local: int, ranks: int, orphaned: signal.Signals) -> Process:
    """Start one rank with the environment that torch.distributed and DeepSpeed read; it is torchrun's."""
    network = interface_towards(seat.address, seat.port)
    environment = {
        "RANK": seat.position * ranks + local,
        "WORLD_SIZE": seat.nodes * ranks,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": ranks,
        "LOCAL_SIZE": ranks,
        "MASTER_ADDR": seat.address,
        "MASTER_PORT": seat.port,
        LAUNCHER: os.getpid(),
    }
    # gloo and NCCL would else take the interface of this machine's name, which may be one that no other node reaches.
    fallback = {
        "GLOO_SOCKET_IFNAME": network,
        "NCCL_SOCKET_IFNAME": network,
        "OMP_NUM_THREADS": "1",
    }
    return await asyncio.create_subprocess_exec(
        *horizonrl_command(*sys.argv[1:]),
        env=fallback | os.environ | {name: str(value) for name, value in environment.items()},
        preexec_fn=bound(orphaned),
    )


def interface_towards(address: str, port: int) -> str:
    """Return the name of the network interface that reaches `address`, or that has it. Raises RunFailed without one."""
    (family, *_, target), *_ = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing: the kernel only looks the route up
            source = probe.getsockname()[0]
    except OSError as error:
        raise RunFailed(
            f"this machine has no route to {address} ({error.strerror}): look at its network"
        ) from None
    for name, addresses in psutil.net_if_addrs().items():
        if any(interface.address.partition("%")[0] == source for interface in addresses):
            return name
    # 127.0.0.2 is served by the loopback interface without being listed.
    return "lo"


def free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
