"""The browser: one Chromium for all episodes of an event loop, with a separate context for each episode.

The first episode starts it, and it stops when the last environment closes. A browser that has died is replaced.
"""

import asyncio
import os
import re
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from typing import Any, TypedDict
from weakref import WeakKeyDictionary

from playwright.async_api import Browser, BrowserContext, Page, Playwright, Route, async_playwright
from playwright.async_api import Error as BrowserError
from playwright.async_api import TimeoutError as BrowserTimeout

from horizonrl.common.errors import EnvironmentFailure, EnvironmentTimeout
from horizonrl.envs.game import words
from horizonrl.envs.worlds.webnav.browser import Refused

START_S = 60.0
LOAD_S = 30.0
ACTION_S = 5.0
KEYS = words("Enter Tab Escape Backspace Space ArrowUp ArrowDown ArrowLeft ArrowRight")
MAX_TEXT_CHARS = 500
_SCROLL_PX = 150
"""About three quarters of a page of MiniWoB."""
_NUMBER = re.compile(r"[0-9]{1,4}")


class Reading(TypedDict):
    query: str
    lines: list[str]
    done: bool
    reward: float
    """From -1 to 1, without the page's penalty for taking long."""


@dataclass(frozen=True, slots=True)
class _Running:
    playwright: Playwright
    browser: Browser


@dataclass
class SharedChromium:
    """The one browser of an event loop. `enter` and `leave` count the environments that use it."""

    executable: str
    _users: int = 0
    _starting: asyncio.Task[_Running] | None = field(default=None)

    def enter(self) -> None:
        self._users += 1

    async def leave(self) -> None:
        """Stop the browser when nobody uses it any more."""
        self._users -= 1
        if self._users == 0:
            await self._stop()

    async def open(self, url: str) -> Page:
        """Return a page in its own context. Raises EnvironmentFailure if no browser can be started."""
        try:
            context = await self._context()
            try:
                await context.add_init_script(script=_script())
                await context.route("**/*", partial(_stay, url))
                page = await context.new_page()
                context.on("page", Page.close)  # a window that the page opens
                await page.goto(url, timeout=LOAD_S * 1e3)
            except BaseException:
                # Including a cancelled reset, which must not leave a context behind.
                await context.close()
                raise
        except BrowserTimeout as error:
            raise EnvironmentTimeout(f"{url} was not loaded in {LOAD_S:.0f} s") from error
        except BrowserError as error:
            raise EnvironmentFailure(
                f"the browser {self.executable} cannot open {url}: {_short(error)}"
            ) from error
        return page

    async def _context(self) -> BrowserContext:
        browser = (await self._running()).browser
        try:
            return await browser.new_context(viewport={"width": 400, "height": 300}, offline=True)
        except BrowserError:
            # The browser or its driver has died; the next reset starts another one.
            await self._stop()
            raise

    async def _running(self) -> _Running:
        """Return the browser; start it if there is none or it has died. Cancelling a caller does not stop the start."""
        starting = self._starting
        if starting is not None and starting.done() and not _alive(starting):
            await self._stop()
        if self._starting is None:
            self._starting = asyncio.create_task(_start(self.executable), name="chromium")
        return await asyncio.shield(self._starting)

    async def _stop(self) -> None:
        starting, self._starting = self._starting, None
        if starting is None:
            return
        with suppress(BrowserError):  # the start may have failed
            running = await starting
            with suppress(BrowserError):  # the browser may be dead while its driver still runs
                await running.browser.close()
            await running.playwright.stop()


_SHARED: WeakKeyDictionary[asyncio.AbstractEventLoop, SharedChromium] = WeakKeyDictionary()


def shared_chromium(executable: str) -> SharedChromium:
    """Return the browser of the running event loop."""
    return _SHARED.setdefault(asyncio.get_running_loop(), SharedChromium(executable))


class Played:
    """A page with its episode."""

    def __init__(self, page: Page) -> None:
        self._page = page

    async def start(self, seed: str) -> Reading:
        """Begin the episode with a seed, and wait until the page is ready."""
        try:
            if not await self._page.evaluate("seed => agent.start(seed)", seed):
                await self._page.wait_for_function("WOB_TASK_READY", timeout=LOAD_S * 1e3)
        except BrowserTimeout as error:
            raise EnvironmentTimeout(f"the page was not ready in {LOAD_S:.0f} s") from error
        except BrowserError as error:
            raise EnvironmentFailure(f"the page's episode cannot begin: {_short(error)}") from error
        return await self.read()

    async def read(self) -> Reading:
        """Return what the page shows. Raises EnvironmentFailure if the browser is gone."""
        reading: Reading = await self._evaluate("() => agent.read()")
        return reading

    async def act(self, name: str, arguments: dict[str, str]) -> None:
        """Take an action with a real mouse and keyboard. Raises Refused if it cannot be taken."""
        try:
            async with asyncio.timeout(ACTION_S):
                await self._act(name, arguments)
        except TimeoutError:
            raise Refused(f"The page has not answered for {ACTION_S:.0f} seconds.") from None
        except BrowserError as error:
            raise EnvironmentFailure(f"the browser failed: {_short(error)}") from error

    async def close(self) -> None:
        """Close the context, if it still exists."""
        with suppress(BrowserError):
            await self._page.context.close()

    async def _act(self, name: str, arguments: dict[str, str]) -> None:
        match name, *arguments.values():
            case "click", number:
                await self._click(number)
            case "hover", number:
                if point := await self._aim(number):
                    await self._page.mouse.move(*point)
            case "type", number, text, enter:
                await self._type(number, text, enter)
            case "press", key:
                if key not in KEYS:
                    raise Refused(f"There is no key {key[:20]!r}. There are: {', '.join(KEYS)}.")
                await self._page.keyboard.press(key)
            case "scroll", ("down" | "up") as direction:
                await self._page.mouse.move(80, 130)  # The middle of a MiniWoB page.
                await self._page.mouse.wheel(0, _SCROLL_PX if direction == "down" else -_SCROLL_PX)
            case _:
                raise Refused("Scroll [down] or [up].")

    async def _click(self, number: str) -> None:
        if point := await self._aim(number):
            await self._page.mouse.click(*point)

    async def _type(self, number: str, text: str, enter: str) -> None:
        if len(text) > MAX_TEXT_CHARS or enter not in ("0", "1"):
            raise Refused(
                f"A text has at most {MAX_TEXT_CHARS} characters; the last argument is 0 or 1."
            )
        await self._click(number)
        if await self._evaluate("number => agent.select(number)", int(number)):
            await self._page.keyboard.type(text)
        if enter == "1":
            await self._page.keyboard.press("Enter")

    async def _aim(self, number: str) -> tuple[float, float] | None:
        """Return the position of an element, or None if it has already been selected."""
        if not _NUMBER.fullmatch(number):
            raise Refused(f"There is no element [{number[:20]}] on the page.")
        aimed: tuple[float, float] | str | None = await self._evaluate(
            "number => agent.aim(number)", int(number)
        )
        if isinstance(aimed, str):
            raise Refused(aimed)
        return aimed

    async def _evaluate(self, script: str, *argument: Any) -> Any:
        try:
            async with asyncio.timeout(LOAD_S):
                return await self._page.evaluate(script, *argument)
        except TimeoutError as error:
            raise EnvironmentTimeout(f"the page has not answered for {LOAD_S:.0f} s") from error
        except BrowserError as error:
            raise EnvironmentFailure(f"the browser failed: {_short(error)}") from error


async def _start(executable: str) -> _Running:
    playwright = await async_playwright().start()
    try:
        browser = await playwright.chromium.launch(
            executable_path=executable,
            # A container's /dev/shm is often 64 MiB, and Chromium crashes when it is full.
            args=["--disable-gpu", "--disable-dev-shm-usage"],
            chromium_sandbox=os.geteuid() != 0,  # Chromium refuses its sandbox to root.
            timeout=START_S * 1e3,
        )
    except BaseException:
        await playwright.stop()
        raise
    return _Running(playwright, browser)


async def _stay(url: str, route: Route) -> None:
    """Let a page load its own parts and nothing else. A click that leads to another page does nothing."""
    request = route.request
    # The pages' folder and those of their scripts.
    beside = url.rpartition("/")[0].rpartition("/")[0]
    wanted = request.url.partition("#")[0]
    if (
        wanted == url
        if request.is_navigation_request()
        else wanted.startswith((f"{beside}/", "data:", "blob:"))
    ):
        await route.continue_()
    else:
        # With any other error code the browser shows its own error page.
        await route.abort("aborted")


def _alive(started: "asyncio.Task[_Running]") -> bool:
    failed = started.cancelled() or started.exception() is not None
    return not failed and started.result().browser.is_connected()


def _short(error: BrowserError) -> str:
    """Return what an error says, without the browser's log."""
    return error.message.partition("\n")[0]


def _script() -> str:
    return resources.files(__package__).joinpath("page.js").read_text(encoding="utf-8")
