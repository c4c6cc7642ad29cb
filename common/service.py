"""The shell around every role: signals, the HTTP port, and how it ends.

/healthz  the event loop runs (says nothing of the broker, which a restart of the role would not mend)
/readyz   the role can do its work now: started, connected, not draining
/metrics  Prometheus

A role ends with 0 when it is done, 1 when it failed, and 70 when its own watch ended it: stalled, or too slow to stop.
One that a signal has stopped ends with 128 and the signal's number, 143 for SIGTERM: its work may not be done.
"""

import asyncio
import contextlib
import faulthandler
import math
import os
import resource
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

import uvloop
from aiohttp import web

from horizonrl.common.errors import DISK_FULL, ConfigError, HorizonError
from horizonrl.common.logs import get_logger
from horizonrl.common.metrics import BrokerLink, Metrics
from horizonrl.common.texts import printable

log = get_logger()

WATCH_TICKS = 40
"""Looks at the event loop within `stall_limit_s`: a process that was paused (SIGSTOP) loses one of them, not all."""
BLOCKED_TICKS = 2
"""Looks in a row that find the loop blocked, 6 s, after which the log says by what."""
STANDARD_LIBRARY = sysconfig.get_path("stdlib")
LOCKED_LIMITS = 4
"""Stall limits after which faulthandler ends the process with code 1. It needs no Python, and is for C code that keeps
Python's lock, such as a regular expression; unlike the watch it takes a pause of that length for a stall."""
LAST_READING_S = 150.0
"""Longest time for which the end of a role waits for Prometheus: two readings, a minute apart, and a late one."""
CLOSE_S = 30.0
"""Longest time from the end of a role's work to the end of its event loop, which waits for its threads."""
REPORT_S = 5.0
"""Longest time to say why the process ends: the log itself may be what hangs."""
IDLE_S = 20.0
"""A connection to the port without a complete request for this long is closed."""
MAX_DESCRIPTORS = 1 << 16
"""File descriptors that a role asks for, at most: some programs loop over all that they may have."""


@dataclass
class Service:
    """What a role shares with its shell: the role sets `ready`, watches `stopping` and counts in `metrics`."""

    metrics: Metrics = field(default_factory=Metrics)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by SIGTERM and SIGINT: finish what is in hand, then return."""
    stop_within_s: float | None = None
    """Longest time from SIGTERM or SIGINT to the end of the process, whatever hangs. None sets no limit."""
    stall_limit_s: float = 120.0
    """An event loop that has not run for this long is stalled, and the process ends."""
    _read: asyncio.Event = field(default_factory=asyncio.Event)
    _read_at: float = -math.inf
    """When the metrics were last read, by the clock of `time.monotonic`."""
    _read_every_s: float = math.inf
    """Time between the last two readings of the metrics."""
    routes: Sequence[web.AbstractRouteDef] = ()
    """Further routes of the port."""
    refresh: Callable[[], None] = lambda: None
    """Called before each reading of the metrics."""
    ready: bool = False
    port: int = 0
    stopped_by: int = 0
    """The number of the first signal that asked the role to stop."""

    @contextlib.asynccontextmanager
    async def open(
        self, host: str, port: int, link: BrokerLink | None = None
    ) -> AsyncIterator["Service"]:
        """Answer signals and HTTP while the body runs; `link` is read for readiness and at each reading of metrics."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            # Through the loop: a plain handler would run between any two bytecodes, where asyncio's Event is not safe.
            loop.add_signal_handler(number, self._stop, number)
        runner = web.AppRunner(self._application(link), access_log=None, keepalive_timeout=IDLE_S)
        await runner.setup()
        try:
            server = await loop.create_server(_door(runner), host, port)
        except OSError as error:
            await runner.cleanup()
            raise ConfigError(
                f"port {port} on {host} (--port, or metrics.port of a role) cannot be opened ({error.strerror}): "
                "choose another, or 0 for a free one"
            ) from None
        self.port = server.sockets[0].getsockname()[1]
        log.info("service_opened", metrics=f"http://{host}:{self.port}/metrics")
        try:
            with _watched(loop, self.stall_limit_s):
                yield self
        finally:
            # First, so that nobody is told "ready" while the rest closes.
            self.ready = False
            server.close()
            await runner.cleanup()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _stop(self, number: signal.Signals) -> None:
        """Set `stopping`. The timer is never cancelled: what closes after the body may hang as well."""
        # A second signal does not begin a second grace period.
        if self.stop_within_s is not None and not self.stopping.is_set():
            _deadline(self.stop_within_s, "stop_overdue", f"of {number.name}").start()
        self.stopped_by = self.stopped_by or number
        self.stopping.set()

    @property
    def exit_code(self) -> int:
        """What a role that did not fail ends with: not with 0 after a signal, which a Job would take for its end."""
        return 128 + self.stopped_by if self.stopped_by else 0

    def _application(self, link: BrokerLink | None) -> web.Application:
        async def healthz(_: web.Request) -> web.Response:
            return web.Response(text="alive\n")

        async def readyz(_: web.Request) -> web.Response:
            # A role that drains is not ready, but it is healthy: a restart would only lose what it is finishing.
            ready = self.ready and not self.stopping.is_set() and (link is None or link.connected)
            return web.Response(
                text="ready\n" if ready else "not ready\n", status=200 if ready else 503
            )

        async def metrics(request: web.Request) -> web.Response:
            self.refresh()
            if link is not None:
                self.metrics.mirror_broker(link)
            now = time.monotonic()
            self._read_every_s, self._read_at = now - self._read_at, now
            self._read.set()
            body, content_type = self.metrics.exposition(request.headers.get("Accept", ""))
            return web.Response(body=body, headers={"Content-Type": content_type})

        application = web.Application()
        application.add_routes(
            [web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)]
        )
        application.add_routes(self.routes)
        return application

    async def last_reading(self) -> None:
        """Wait until the metrics are read once more, if somebody reads them regularly: for two intervals at most.

        Values that were set at the end of a role would otherwise end with it, and no alert could know of them.
        """
        wait_s = self._read_at + 2 * self._read_every_s - time.monotonic()
        if 0 < wait_s < LAST_READING_S:
            self._read.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await until_stopped(self._read.wait(), self.stopping)


def _door(runner: web.AppRunner) -> Callable[[], asyncio.Protocol]:
    """Return what answers each new connection: the runner, or nobody while half of the file descriptors are in use.

    The other half is for the role itself: a checkpoint that cannot open its files would end it.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2

    def enter() -> asyncio.Protocol:
        assert runner.server is not None
        return runner.server() if len(runner.server.connections) < most else _Refusal()

    return enter


class _Refusal(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not `close`: nothing is owed, and the descriptor should be free at once.
        cast(asyncio.Transport, transport).abort()


@contextlib.contextmanager
def _watched(loop: asyncio.AbstractEventLoop, limit_s: float) -> Iterator[None]:
    """Log what blocks `loop` in the body, and end the process when it has not run for `limit_s`.

    The watch counts its own ticks and reads no clock: while a process is paused, a clock goes on and its ticks do not.
    """
    # Threading's events, because the watch is a thread: a blocked loop cannot watch itself.
    beat, closed, tick_s = threading.Event(), threading.Event(), limit_s / WATCH_TICKS
    thread = threading.current_thread()

    async def beating() -> None:
        while True:
            beat.set()
            await asyncio.sleep(tick_s)

    def allow_lock() -> None:
        faulthandler.dump_traceback_later(
            limit_s * LOCKED_LIMITS, exit=True, file=sys.__stderr__ or 2
        )

    def watching() -> None:
        missed = 0
        while not closed.wait(tick_s):
            # Each tick puts the alarm off. It goes off only if this thread could not run either.
            allow_lock()
            missed = 0 if beat.is_set() else missed + 1
            beat.clear()
            if missed == BLOCKED_TICKS:
                _in_time(partial(_tell_blocked, loop, thread, missed * tick_s))
            if missed == WATCH_TICKS:
                reason = f"the event loop has not run for {limit_s:g} s: {_running(loop)} blocks it"
                end_process("loop_stalled", reason, thread)

    # A daemon thread, so that a watch that is stuck does not keep the process alive.
    beats, watch = loop.create_task(beating()), threading.Thread(target=watching, daemon=True)
    allow_lock()
    watch.start()
    try:
        yield
    finally:
        closed.set()
        beats.cancel()
        watch.join()
        faulthandler.cancel_dump_traceback_later()


def _running(loop: asyncio.AbstractEventLoop) -> str:
    """Return the name of the task that the loop runs: of an episode, its environment and task."""
    task = asyncio.current_task(loop)
    return "something" if task is None else task.get_name()


def _tell_blocked(
    loop: asyncio.AbstractEventLoop, thread: threading.Thread, blocked_s: float
) -> None:
    stack = traceback.extract_stack(sys._current_frames()[thread.ident or 0])
    # The call that blocks is often the standard library's: who called it is the one to mend.
    callers = [frame for frame in stack if not _is_standard(frame.filename)] or stack
    line = f"{callers[-1].filename}:{callers[-1].lineno} in {callers[-1].name}"
    log.warning(
        "loop_blocked",
        reason=f"{_running(loop)} has held up everything else for {blocked_s:g} s at {line}: "
        "await what takes long, or do it in a thread",
        traceback="".join(stack.format()),
    )


def _is_standard(file: str) -> bool:
    return file.startswith(STANDARD_LIBRARY) and "site-packages" not in file


def _deadline(limit_s: float, event: str, since: str) -> threading.Timer:
    """Return a timer that ends the process `limit_s` after its start, unless it is cancelled."""
    timer = threading.Timer(
        limit_s, end_process, (event, f"this process has not ended within {limit_s:g} s {since}")
    )
    timer.daemon = True
    return timer


def end_process(event: str, reason: str, culprit: threading.Thread | None = None) -> None:
    """Report the reason and the stack of a thread, by default the main one, and end the process, whatever it does."""
    thread = culprit or threading.main_thread()

    def report() -> None:
        frame = sys._current_frames()[thread.ident or 0]
        log.error(event, reason=reason)
        stack = "".join(traceback.format_stack(frame))
        print(
            f"error: {reason}; thread {thread.name} stands at:\n{stack}",
            file=sys.stderr,
            flush=True,
        )

    _in_time(report)
    # Not `sys.exit`, which would only end this thread and leave the blocked one running.
    os._exit(os.EX_SOFTWARE)


def _in_time(report: Callable[[], None]) -> None:
    """Report in a thread, and do not wait longer than REPORT_S: writing the log may be what hangs."""
    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    reporter.join(REPORT_S)


async def until_stopped(work: Awaitable[object], stopping: asyncio.Event) -> None:
    """Run `work` until it returns or `stopping` is set; then cancel it and wait for it to end."""
    # The group raises what `work` raised, and waits until both tasks have really ended.
    async with asyncio.TaskGroup() as group:
        task = group.create_task(_await(work))
        stop = group.create_task(_await(stopping.wait()))
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        task.cancel()
        stop.cancel()


async def _await(awaitable: Awaitable[object]) -> None:
    # `create_task` takes a coroutine, and `work` may be any awaitable.
    await awaitable


def run_role(role: Callable[[], Awaitable[None]], run_dir: Path | None = None) -> int:
    """Run a role's main coroutine on uvloop and return its exit code: not 0 if it raises, which is logged."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError):  # macOS grants fewer than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(now, min(most, MAX_DESCRIPTORS)), most))
    # Started when the work ends: closing the loop waits for its threads, and one that is stuck would hold the process.
    closing = _deadline(CLOSE_S, "close_overdue", "after its work: a thread of it is stuck")
    try:
        return uvloop.run(_run_and_report(role, run_dir, closing))
    finally:
        closing.cancel()


async def _run_and_report(
    role: Callable[[], Awaitable[None]], run_dir: Path | None, closing: threading.Timer
) -> int:
    """Run the role. Report an expected error in one message and a defect with its traceback, before the loop closes."""
    try:
        await role()
    except Exception as error:  # noqa: BLE001 - the end of the role: whatever it is, it is reported, and the code is not 0
        messages = [(leaf, _message(leaf, run_dir)) for leaf in _leaves(error)]
        for leaf, message in messages:
            log.error("role_failed", error=type(leaf).__name__, reason=message or str(leaf))
            if message is not None:
                print(f"error: {printable(message)}", file=sys.stderr)
        if any(message is None for _, message in messages):
            traceback.print_exception(error)
        # The highest code wins: 2 tells the supervisor not to start this role again.
        return max(leaf.exit_code if isinstance(leaf, HorizonError) else 1 for leaf, _ in messages)
    finally:
        closing.start()
    return 0


def _leaves(error: BaseException) -> Iterator[BaseException]:
    # Every loop runs in a TaskGroup, so that even a single error arrives wrapped.
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from _leaves(part)
    else:
        yield error


def _message(error: BaseException, run_dir: Path | None) -> str | None:
    """Return the message of an expected error; None for a defect, whose traceback says more."""
    if isinstance(error, HorizonError):
        return str(error)
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        path = error.filename or run_dir or "the run directory or the folder of temporary files"
        return f"{error.strerror}: {path}; free some space and start the same command again, the run will resume"
    return None
