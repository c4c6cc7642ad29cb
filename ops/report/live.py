"""`horizonrl report --watch`: the page of a run that goes on, served to this machine alone and kept up to date.

The page is that of `page.py`. Its script asks for the facts every two seconds, and for the index of the episodes when
there are new ones; a chunk of bodies is asked for when somebody reads in it. Reads the run directory only.
"""

import asyncio
import shlex
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import ConfigError
from horizonrl.ops.report.compare import is_evaluation
from horizonrl.ops.report.episodes import Episodes
from horizonrl.ops.report.page import (
    Shown,
    assemble,
    inert_json,
    packed_index,
    run_episodes,
    run_facts,
)
from horizonrl.ops.rundir.directory import read_config
from horizonrl.ops.rundir.files import JournalReader
from horizonrl.ops.rundir.view import RunView

ADDRESS = "127.0.0.1"
NAMES = (ADDRESS, "localhost")
"""Hosts that a browser may ask for. Another one is a page whose own name was made to point here (DNS rebinding)."""
LOOK_S = 1.0
"""Shortest time between two looks at the run directory."""
EPISODES_S = 5.0
"""Shortest time between two readings of the episodes."""
EPISODES_SHARE = 0.05
"""Largest share of the time that goes into reading episodes: those of a long run take seconds."""
GONE_S = 10.0
"""A page that has not asked for this long is closed or hidden."""
SAID_S = 20.0
"""Longest time for which open pages are told that the run has ended."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class RunWatch:
    """What the server knows of a run: read when a page asks, and not more often than it may change."""

    run_dir: Path
    config: RunConfig
    edition: int = 0
    """Number of the present episodes. The page asks for chunks of the edition that its index is of."""
    ended: bool = False
    asked_at: float = 0.0
    told: bool = False
    """Whether a page has all that the run left at its end."""
    _facts: dict[str, Any] = field(default_factory=dict)
    _editions: dict[int, Episodes] = field(default_factory=dict)
    _ledger: int = -1
    """Length of the ledger that the episodes are of."""
    _looked_at: float = -LOOK_S
    _next_reading: float = 0.0
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self._journal = JournalReader(self.run_dir)

    @property
    def written_by(self) -> str:
        """The command that writes the run's page to a file."""
        return f"horizonrl report {shlex.quote(str(self.run_dir))}"

    async def look(self) -> None:
        """Read what is new; in a thread, since the run may be long."""
        async with self._lock:
            if not self.ended and time.monotonic() - self._looked_at >= LOOK_S:
                await asyncio.to_thread(self._read)
                self._looked_at = time.monotonic()

    def _read(self) -> None:
        files = self._journal.read()
        view = RunView.read(self.run_dir, self.config, files)
        self.ended = view.ended
        began = time.monotonic()
        if self.ended or (len(files.ledger) != self._ledger and began >= self._next_reading):
            self.edition, self._ledger = self.edition + 1, len(files.ledger)
            episodes = run_episodes(self.run_dir, self.config, files)
            # The edition before stays: a page may be about to ask for a chunk of it.
            self._editions = {
                self.edition: episodes,
                self.edition - 1: self._editions.get(self.edition - 1, episodes),
            }
            took_s = time.monotonic() - began
            self._next_reading = began + max(EPISODES_S, took_s / EPISODES_SHARE)
        self._facts = run_facts(view, self.config, self.episodes)

    @property
    def episodes(self) -> Episodes:
        return self._editions[self.edition]

    async def page(self, _: web.Request) -> web.Response:
        await self.look()
        text = assemble(Shown({**self._facts, "edition": self.edition}, self.episodes), live=True)
        return web.Response(text=text, content_type="text/html")

    async def facts(self, request: web.Request) -> web.Response:
        await self.look()
        self.asked_at = time.monotonic()
        self._tell(request)
        answer = {"facts": self._facts, "edition": self.edition, "ended": self.ended}
        return web.Response(text=inert_json(answer), content_type="application/json")

    async def index(self, request: web.Request) -> web.Response:
        self._tell(request)
        return web.Response(text=packed_index(self._find_edition(request)))

    async def chunk(self, request: web.Request) -> web.Response:
        chunks, number = self._find_edition(request).chunks, int(request.match_info["number"])
        if number >= len(chunks):
            raise web.HTTPNotFound(text=f"there are {len(chunks)} chunks\n")
        return web.Response(text=chunks[number])

    def _tell(self, request: web.Request) -> None:
        """Note whether this page has, or now gets, the last episodes of a run that has ended."""
        self.told = self.told or (self.ended and _edition(request) == self.edition)

    def _find_edition(self, request: web.Request) -> Episodes:
        episodes = self._editions.get(_edition(request))
        if episodes is None:
            raise web.HTTPGone(text="newer episodes have replaced these: ask for the facts again\n")
        return episodes


def _edition(request: web.Request) -> int:
    return int(request.query.get("edition", "-1"))


def application(watch: RunWatch) -> web.Application:
    served = web.Application(middlewares=[only_here])
    served.router.add_get("/", watch.page)
    served.router.add_get("/facts", watch.facts)
    served.router.add_get("/index", watch.index)
    served.router.add_get(r"/chunk-{number:\d{1,9}}", watch.chunk)
    return served


@web.middleware
async def only_here(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer this machine's own pages only, and let nobody keep or embed the answer."""
    name = (
        request.host.rpartition(":")[0]
        if request.host.rpartition(":")[2].isdecimal()
        else request.host
    )
    if name not in NAMES:
        raise web.HTTPMisdirectedRequest(
            text=f"this server is {' or '.join(NAMES)}, not {name!r}\n"
        )
    answer = await handler(request)
    answer.headers.update(
        {
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
        }
        | {"Cross-Origin-Resource-Policy": "same-origin", "Referrer-Policy": "no-referrer"}
    )
    return answer


def watch_run(run_dir: Path, port: int, overrides: tuple[str, ...] = ()) -> int:
    """Serve a run's page until Ctrl-C, SIGTERM or the end of the run. Raises ConfigError unless a run goes on."""
    if is_evaluation(run_dir):
        raise ConfigError(
            f"--watch follows runs only, and {run_dir} is an evaluation: leave --watch out"
        )
    watch = RunWatch(run_dir, read_config(run_dir, overrides))
    return asyncio.run(_serve(watch, port))


async def _serve(watch: RunWatch, port: int) -> int:
    await watch.look()
    if watch.ended:
        raise ConfigError(
            f"nobody trains in {watch.run_dir}: write its page with `{watch.written_by}`"
        )
    runner = web.AppRunner(application(watch), access_log=None)
    await runner.setup()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        site = web.TCPSite(runner, ADDRESS, port)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(
                f"port {port} cannot be opened ({error.strerror}): choose another, or 0"
            ) from None
        (address,) = runner.addresses
        print(
            f"http://{ADDRESS}:{address[1]}/ shows {watch.run_dir} to this machine; Ctrl-C ends it",
            flush=True,
        )
        if await _until_ended(watch, stop):
            print(f"the run has ended: `{watch.written_by}` writes its page", flush=True)
    finally:
        await runner.cleanup()
    return 0


async def _until_ended(watch: RunWatch, stop: asyncio.Event) -> bool:
    """Return True once the run has ended and open pages know it; False when somebody ends the server."""
    ended_at = None
    while True:
        try:
            async with asyncio.timeout(LOOK_S):
                await stop.wait()
            return False
        except TimeoutError:
            await watch.look()
        now = time.monotonic()
        if watch.ended and ended_at is None:
            ended_at = now
        if ended_at is not None and (
            watch.told or now - watch.asked_at > GONE_S or now - ended_at > SAID_S
        ):
            return True
