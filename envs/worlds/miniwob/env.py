"""MiniWoB++: small tasks on real web pages in a headless Chromium, read as accessibility trees.

The reward is 1 if the page gives its full reward, else 0. All waiting is asynchronous, for the browser's process.
"""

import asyncio
import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import validate_call

from horizonrl.envs.api import Step, TaskSpec
from horizonrl.envs.formats import WrittenFormat
from horizonrl.envs.game import MoveExpert, refuse_move
from horizonrl.envs.text_limits import MAX_OBSERVATION_CHARS, Chars
from horizonrl.envs.worlds.miniwob.expert import PageExpert
from horizonrl.envs.worlds.miniwob.pages import find_chromium, find_pages, load_tasks, page_path
from horizonrl.envs.worlds.webnav.actions import COMMANDS as WEB_COMMANDS
from horizonrl.envs.worlds.webnav.base import WebEnvironment

if TYPE_CHECKING:
    from horizonrl.envs.worlds.miniwob.chromium import Played, Reading, SharedChromium

COMMANDS = tuple(
    command
    for command in WEB_COMMANDS
    if command.name in ("click", "type", "hover", "press", "scroll")
)


class MiniWob(WebEnvironment["Played"]):
    """One page at a time, in a browser that all instances share.

    format: how the agent names its action (envs/formats.py)
    style: `full` explains every action, `compact` the two that suffice
    max_observation_chars: bound of every observation; a first observation that does not fit is a ConfigError
    """

    env_id = "miniwob"
    version = "1"
    commands = COMMANDS
    rules = "You do a task on a web page, which you see as an accessibility tree. Each turn you take one action:"
    brief = "Actions: click [id] | type [id] [text] [0]"

    @validate_call
    def __init__(
        self,
        *,
        format: WrittenFormat = "react",
        style: Literal["full", "compact"] = "full",
        max_observation_chars: Chars = MAX_OBSERVATION_CHARS,
    ) -> None:
        super().__init__(format, style, max_observation_chars)
        self._executable = find_chromium()
        self._folder = find_pages()
        self._chromium: SharedChromium | None = None
        self._query = ""
        self._page = ""

    @classmethod
    def tasks(cls) -> Sequence[TaskSpec]:
        """Return the tasks, page by page."""
        return load_tasks()

    async def start(self, task_id: str) -> tuple[str, "Played"]:
        """Open a page in its own context and begin the episode of the task's seed."""
        page = page_path(task_id)
        await asyncio.to_thread(importlib.import_module, "horizonrl.envs.worlds.miniwob.chromium")
        # Playwright takes most of a second.
        from horizonrl.envs.worlds.miniwob.chromium import Played, shared_chromium

        await self._leave()
        if self._chromium is None:
            self._chromium = shared_chromium(self._executable)
            self._chromium.enter()
        opened = await self._chromium.open((self._folder / f"{page}.html").as_uri())
        # Here, so that a reset that is cancelled leaves no page open.
        self._game = played = Played(opened)
        reading = await played.start(task_id)
        self._page, self._query = page, reading["query"]
        return self.introduce(self._query, _show(reading)), played

    async def act(self, game: "Played", name: str, arguments: dict[str, str], action: str) -> Step:
        """Take an action in the browser."""
        await game.act(name, arguments)
        reading = await game.read()
        if not reading["done"]:
            return refuse_move(_show(reading))
        await self._leave()
        # Only the full reward: a page's partial one is information, so that a return is a success rate.
        success = reading["reward"] == 1
        return Step(
            "The page's task is over.",
            float(success),
            terminated=True,
            success=success,
            info={"page_reward": reading["reward"]},
        )

    def expert(self) -> MoveExpert:
        """Return an expert that plays from the beginning of the page."""
        self._current()
        return self._expert(PageExpert(self._page, self._query).advise)

    async def close(self) -> None:
        """Close the page, and the browser if no other environment uses it."""
        await self._leave()
        chromium, self._chromium = self._chromium, None
        if chromium is not None:
            await chromium.leave()

    async def _leave(self) -> None:
        game, self._game = self._game, None
        if game is not None:
            await game.close()


def _show(reading: "Reading") -> str:
    return "\n".join(reading["lines"]) or "The page is empty."
