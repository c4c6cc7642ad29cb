"""MiniWoB++: small tasks on real web pages in a headless Chromium, read as accessibility trees.

The reward is 1 if the page gives its full reward, else 0. All waiting is asynchronous, for the browser's process.
"""

import asyncio
import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import validate_call

from horizonrl.common.errors import EnvironmentFailure
from horizonrl.envs.api import Observation, Step, TaskSpec
from horizonrl.envs.bounds import MAX_OBSERVATION_CHARS, Chars, clip, whole
from horizonrl.envs.formats import ActionFormat, Unreadable, WrittenFormat, explain, read_action
from horizonrl.envs.worlds.miniwob.expert import PageExpert
from horizonrl.envs.worlds.miniwob.pages import find_chromium, find_pages, load_tasks, page_path
from horizonrl.envs.worlds.webnav.actions import COMMANDS as WEB_COMMANDS
from horizonrl.envs.worlds.webnav.actions import read_command
from horizonrl.envs.worlds.webnav.browser import Refused

if TYPE_CHECKING:
    from horizonrl.envs.worlds.miniwob.chromium import Played, Reading, SharedChromium

COMMANDS = tuple(
    command
    for command in WEB_COMMANDS
    if command.name in ("click", "type", "hover", "press", "scroll")
)
_FULL = """\
You do a task on a web page, which you see as an accessibility tree. Each turn you take one action:
{actions}
{reply}

OBJECTIVE: {query}

{page}"""
_COMPACT = "Actions: click [id] | type [id] [text] [0]"
_COMPACT_REPLY = {"plain": "", "react": "Reply in two lines:\nThought: why\nAction: action"}


class MiniWob:
    """One page at a time, in a browser that all instances share.

    format: how the agent names its action (envs/formats.py)
    style: `full` explains every action, `compact` the two that suffice
    max_observation_chars: bound of every observation; a first observation that does not fit is a ConfigError
    """

    env_id: ClassVar[str] = "miniwob"
    version: str = "1"

    @validate_call
    def __init__(
        self,
        *,
        format: WrittenFormat = "react",
        style: Literal["full", "compact"] = "full",
        max_observation_chars: Chars = MAX_OBSERVATION_CHARS,
    ) -> None:
        self._executable = find_chromium()
        self._folder = find_pages()
        self._format: ActionFormat = format
        self._style = style
        self._max_chars = max_observation_chars
        self._chromium: SharedChromium | None = None
        self._played: Played | None = None
        self._query = ""
        self._page = ""

    @classmethod
    def tasks(cls) -> Sequence[TaskSpec]:
        """Return the tasks, page by page."""
        return load_tasks()

    async def reset(self, task_id: str) -> Observation:
        """Open a page in its own context and begin the episode of the task's seed."""
        page = page_path(task_id)
        await asyncio.to_thread(importlib.import_module, "horizonrl.envs.worlds.miniwob.chromium")
        # Playwright takes most of a second.
        from horizonrl.envs.worlds.miniwob.chromium import Played, shared_chromium

        await self._leave()
        if self._chromium is None:
            self._chromium = shared_chromium(self._executable)
            self._chromium.enter()
        self._played = Played(await self._chromium.open((self._folder / f"{page}.html").as_uri()))
        reading = await self._played.start(task_id)
        self._page, self._query = page, reading["query"]
        return Observation(self._first(task_id, reading))

    async def step(self, text: str) -> Step:
        """Take the one action that the text names."""
        played = self._current()
        match read_action(text, self._format, COMMANDS):
            case Unreadable(reason):
                return Step(clip(reason, self._max_chars), 0.0, terminated=False)
            case str(action):
                command = read_command(action, COMMANDS)
        if command is None:
            answer = (
                f"There is no such action. The actions are: {', '.join(c.words for c in COMMANDS)}."
            )
            return Step(clip(answer, self._max_chars), 0.0, terminated=False)
        try:
            await played.act(*command)
        except Refused as refused:
            return Step(clip(str(refused), self._max_chars), 0.0, terminated=False)
        return await self._after(await played.read())

    def expert(self) -> PageExpert:
        """Return an expert that plays from the beginning of the page."""
        self._current()
        return PageExpert(self._page, self._query, self._format, COMMANDS)

    async def close(self) -> None:
        """Close the page, and the browser if no other environment uses it."""
        await self._leave()
        chromium, self._chromium = self._chromium, None
        if chromium is not None:
            await chromium.leave()

    async def _after(self, reading: "Reading") -> Step:
        if not reading["done"]:
            return Step(clip(_show(reading), self._max_chars), 0.0, terminated=False)
        await self._leave()
        # Only the full reward: a page's partial one is information, so that a return is a success rate.
        success = reading["reward"] == 1
        info: dict[str, str | int | float | bool] = {"page_reward": reading["reward"]}
        return Step(
            "The page's task is over.", float(success), terminated=True, success=success, info=info
        )

    async def _leave(self) -> None:
        played, self._played = self._played, None
        if played is not None:
            await played.close()

    def _current(self) -> "Played":
        if self._played is None:
            raise EnvironmentFailure(
                "no episode has begun or it is over: reset before step and expert"
            )
        return self._played

    def _first(self, task_id: str, reading: "Reading") -> str:
        reply = explain(self._format, COMMANDS)
        if self._style == "full":
            actions = "\n".join(
                f"{c.words.replace('{', '').replace('}', '')}: {c.meaning}" for c in COMMANDS
            )
            text = _FULL.format(
                actions=actions, reply=reply, query=reading["query"], page=_show(reading)
            )
        else:
            reply = _COMPACT_REPLY.get(self._format, reply)
            text = "\n".join(
                filter(None, (_COMPACT, reply, f"Task: {reading['query']}", _show(reading)))
            )
        return whole(text, task_id, self._max_chars)


def _show(reading: "Reading") -> str:
    return "\n".join(reading["lines"]) or "The page is empty."
