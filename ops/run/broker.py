"""The broker of a run, as a process of this one: for `horizonrl broker` alone, or for all of `horizonrl train`."""

import asyncio
import signal
import socket
from pathlib import Path
from urllib.parse import urlsplit

from horizonrl.broker.api import Role
from horizonrl.broker.connect import connect
from horizonrl.broker.nats.key_folder import KeyFolder
from horizonrl.broker.nats.server import EmbeddedServer
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import ConfigError, RunFailed
from horizonrl.common.logs import get_logger
from horizonrl.common.service import until_stopped
from horizonrl.ops.run.directory import read_address
from horizonrl.ops.run.supervision import Restarts, RunProgress

log = get_logger()


async def serve_broker(config: RunConfig) -> None:
    """Run a nats-server with the run's streams until SIGTERM, at `broker.url` (127.0.0.1:4222 by default).

    On SIGHUP the server reads its keys again.
    """
    address = urlsplit(config.broker.url or "nats://127.0.0.1:4222")
    keys = KeyFolder(config.broker.nats.keys) if config.broker.nats.keys else None
    if keys and config.run.name not in keys.runs():
        raise ConfigError(
            f"broker.nats.keys is {keys.folder}, which holds no keys of run {config.run.name}: make them with "
            f"`horizonrl broker keys --out {keys.folder} --run {config.run.name} --host NAME`"
        )
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    async with EmbeddedServer(
        config.run_dir / "nats",
        config.broker.nats.durability,
        host=address.hostname or "127.0.0.1",
        port=address.port or 4222,
        extra=keys.included(config.run_dir / "nats") if keys else "",
    ) as server:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, server.reload)
        own = {"nkey_seed": keys.seed(config.run.name, Role.CONTROLLER), "ca_file": keys.authority} if keys else {}
        nats = config.broker.nats.model_copy(update=own)
        # Only a controller may make the streams. With them in place, learner and actors may start before it does.
        transport = await connect(config.run.name, config.broker.model_copy(update={"url": server.url, "nats": nats}))
        await transport.close()
        log.info("broker_started", url=server.url)
        scheme = "tls" if keys else "nats"
        print(f"broker of run {config.run.name} listens at {scheme}://{server.host}:{server.port}", flush=True)
        await until_stopped(_alive(server), stopping)


async def _alive(server: EmbeddedServer) -> None:
    """Raise RunFailed when the server ends: the supervisor of this process restarts both, on the same files."""
    async with asyncio.TaskGroup() as group:
        curing = group.create_task(end_when_curable(server))
        code = await server.wait()
        curing.cancel()
    raise RunFailed(f"the nats-server of {server.directory} ended with code {code}; start the same command again")


async def restart_broker(server: EmbeddedServer, restarts: Restarts, run: RunProgress) -> None:
    """Restart the broker on the same files and port whenever it ends. The other processes wait for it."""
    while True:
        await restarts.wait(await server.wait(), run)
        await server.start()


async def end_when_curable(server: EmbeddedServer) -> None:
    """End a broker that a restart would cure; whoever supervises it starts it again."""
    while True:
        await server.curable()
        # Not `stop`, which also releases the lock on the directory: another server could take the store meanwhile.
        # What the server has acknowledged is on disk.
        await server.kill()


def earlier_port(run_dir: Path) -> int | None:
    """Return the port of the run's last broker if it is free, so that actors started by hand find their run again."""
    port = urlsplit(read_address(run_dir) or "").port
    if port is None:
        return None
    with socket.socket() as probe:
        # The last broker's connections may linger in TIME_WAIT. nats-server binds in spite of them, and so must the
        # probe.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            log.warning("broker_moved", taken=port)
            return None
    return port
