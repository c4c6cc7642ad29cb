"""The shell around every role: signals, the HTTP port, the way it ends.

/healthz  the event loop beats (never the broker: a restart would not mend it)
/readyz   the role can do its work now
/metrics  Prometheus
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import uvloop
from aiohttp import web

from horizonrl.common.errors import ConfigError, HorizonError
from horizonrl.common.logs import get_logger
from horizonrl.common.metrics import Metrics

log = get_logger()


@dataclass
class Service:
    """What a role shares with its shell: it sets `ready`, watches `stopping`, counts in `metrics`."""

    metrics: Metrics = field(default_factory=Metrics)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by SIGTERM and SIGINT: finish what is in hand, then return."""
    ready: bool = False
    port: int = 0

    @contextlib.asynccontextmanager
    async def open(self, host: str, port: int, refresh: Callable[[], None] = lambda: None) -> AsyncIterator["Service"]:
        """Answer signals and HTTP while the body runs; `refresh` is called before each reading of the metrics."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stopping.set)
        runner = web.AppRunner(self._application(refresh), access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            await runner.cleanup()
            raise ConfigError(
                f"metrics.port {port} on {host} cannot be opened ({error.strerror}): "
                "choose another, or 0 for a free one"
            ) from None
        self.port = runner.addresses[0][1]
        log.info("service_opened", metrics=f"http://{host}:{self.port}/metrics")
        try:
            yield self
        finally:
            self.ready = False
            await runner.cleanup()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _application(self, refresh: Callable[[], None]) -> web.Application:
        async def healthz(_: web.Request) -> web.Response:
            return web.Response(text="alive\n")

        async def readyz(_: web.Request) -> web.Response:
            ready = self.ready and not self.stopping.is_set()
            return web.Response(text="ready\n" if ready else "not ready\n", status=200 if ready else 503)

        async def metrics(_: web.Request) -> web.Response:
            refresh()
            return web.Response(body=self.metrics.exposition(), headers={"Content-Type": "text/plain; version=0.0.4"})

        application = web.Application()
        application.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)])
        return application


async def until_stopped(work: Awaitable[None], stopping: asyncio.Event) -> None:
    """Run `work` until it returns or `stopping` is set; then cancel it and wait for it to end."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(_awaited(work))
        stop = group.create_task(_awaited(stopping.wait()))
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        task.cancel()
        stop.cancel()


async def _awaited(awaitable: Awaitable[object]) -> None:
    await awaitable


def run_role(role: Callable[[], Awaitable[None]]) -> int:
    """Run a role's main coroutine on uvloop and return the exit code; an expected error is one clear message."""
    code = 0
    try:
        uvloop.run(_awaited(role()))
    except* HorizonError as errors:
        code = 1
        for error in _leaves(errors):
            log.error("role_failed", error=type(error).__name__, reason=str(error))
            print(f"error: {error}", file=sys.stderr)
    return code


def _leaves(errors: BaseExceptionGroup[HorizonError]) -> list[HorizonError]:
    found: list[HorizonError] = []
    for error in errors.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found


def die_with_parent() -> None:
    """Ask Linux to end this process when its parent dies, so that killing a console leaves no orphan behind."""
    if sys.platform == "linux":
        parent = os.getppid()
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the call
            os.kill(os.getpid(), signal.SIGTERM)
