"""The broker of a run, as a process of this one: for `horizonrl broker` alone, or for all of `horizonrl train`."""

import asyncio
import signal
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from horizonrl.broker.api import Role
from horizonrl.broker.connect import connect
from horizonrl.broker.nats.cluster import EmbeddedCluster, member_folder
from horizonrl.broker.nats.key_folder import KeyFolder
from horizonrl.broker.nats.server import LOG_FILE, EmbeddedServer
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import ConfigError, RunFailed
from horizonrl.common.logs import configure_logs, get_logger
from horizonrl.common.restarts import Restarts
from horizonrl.common.service import run_role, until_stopped
from horizonrl.ops.launch.supervision import RunProgress
from horizonrl.ops.rundir.directory import read_address

log = get_logger()

DEFAULT_URL = "nats://127.0.0.1:4222"


def run_broker(config: RunConfig, cluster: int, key_folder: Path | None) -> int:
    """Serve a run's broker to its end, with the keys of a folder, and return the exit code."""
    configure_logs(run=config.run.name, role="broker")
    return run_role(lambda: serve_broker(config, cluster, key_folder), config.run_dir)


async def serve_broker(config: RunConfig, cluster: int, key_folder: Path | None) -> None:
    """Run `cluster` nats-servers with the run's streams until SIGTERM, at `broker.url` (127.0.0.1:4222 by default).

    On SIGHUP the servers read their keys again.
    """
    addresses = _addresses(config, cluster)
    keys = KeyFolder(key_folder) if key_folder else None
    if keys and config.run.name not in keys.runs():
        raise ConfigError(
            f"--keys is {keys.folder}, which holds no keys of run {config.run.name}: make them with "
            f"`horizonrl broker keys --out {keys.folder} --run {config.run.name} --host NAME`"
        )
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    directory, durability = config.run_dir / "nats", config.broker.nats.durability
    _refuse_other_size(directory, cluster)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: {error.strerror}: give a run.root that the broker may write to"
        ) from None
    server: EmbeddedServer | EmbeddedCluster
    if cluster > 1:
        extra = keys.included(member_folder(directory, 0)) if keys else ""
        server = EmbeddedCluster(directory, durability, addresses=addresses, extra=extra)
    else:
        extra = keys.included(directory) if keys else ""
        server = EmbeddedServer(
            directory, durability, host=addresses[0][0], port=addresses[0][1], extra=extra
        )
    async with server:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, server.reload)
        login: dict[str, Any] = {}
        if keys:
            login = {
                "nkey_seed": keys.seed(config.run.name, Role.CONTROLLER),
                "ca_file": keys.authority,
            }
        # A copy on each server is what a cluster is for.
        if cluster > 1 and config.broker.nats.replicas is None:
            login["replicas"] = cluster
        nats = config.broker.nats.model_copy(update=login)
        # Only a controller may make the streams. With them in place, learner and actors may start before it does.
        transport = await connect(
            config.run.name, config.broker.model_copy(update={"url": server.url, "nats": nats})
        )
        await transport.close()
        log.info("broker_started", url=server.url)
        scheme = "tls" if keys else "nats"
        listening = ",".join(f"{scheme}://{host}:{port}" for host, port in addresses)
        print(f"broker of run {config.run.name} listens at {listening}", flush=True)
        alive = server.supervise() if isinstance(server, EmbeddedCluster) else _alive(server)
        await until_stopped(alive, stopping)


def _addresses(config: RunConfig, cluster: int) -> list[tuple[str, int]]:
    """Return host and port of each server: those of `broker.url`, or the ports that follow the only one there."""
    addresses = [urlsplit(server) for server in config.broker.servers] or [urlsplit(DEFAULT_URL)]
    endpoints = [(address.hostname or "127.0.0.1", address.port or 4222) for address in addresses]
    if len(endpoints) not in (1, cluster):
        raise ConfigError(
            f"broker.url names {len(endpoints)} servers, but `horizonrl broker` is to start {cluster}: give --cluster "
            f"{len(endpoints)}, or the address of the first server alone"
        )
    if len(endpoints) == 1:
        endpoints = [(endpoints[0][0], endpoints[0][1] + number) for number in range(cluster)]
    return endpoints


def _refuse_other_size(directory: Path, cluster: int) -> None:
    """Raise ConfigError if a broker of another size has its files there: this one would begin without its streams."""
    earlier = len(list(directory.glob("server-*"))) or int((directory / "jetstream").exists())
    if earlier not in (0, cluster):
        raise ConfigError(
            f"the broker of this run had {earlier} server{'s' if earlier > 1 else ''}; its streams are in {directory}: "
            f"start it {f'with --cluster {earlier}' if earlier > 1 else 'without --cluster'}, or give this run another "
            "run.name"
        )


async def _alive(server: EmbeddedServer) -> None:
    """Raise RunFailed when the server ends: the supervisor of this process restarts both, on the same files."""
    async with asyncio.TaskGroup() as group:
        curing = group.create_task(server.end_when_curable())
        code = await server.wait()
        curing.cancel()
    raise RunFailed(
        f"the nats-server of {server.directory} ended with code {code}; start the same command again"
    )


async def restart_broker(server: EmbeddedServer, run: RunProgress) -> None:
    """Restart the broker on the same files and port whenever it ends. The other processes wait for it."""
    restarts = Restarts("broker", server.directory / LOG_FILE)
    while True:
        await restarts.wait(await server.wait(), run.reached)
        await server.restart()


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
