"""An MCP server's tools as an environment. The agent's reply without a call is its answer; a function grades it.

The server is asked for its tools once per process. After that, an episode starts it with its first call.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from mcp_types import Tool
from pydantic import validate_call

from horizonrl.common.errors import ConfigError, EnvironmentFailure
from horizonrl.common.plugins import load_function
from horizonrl.envs.api import Observation, Step, TaskSpec, ToolCall, Tools
from horizonrl.envs.game import refuse_move
from horizonrl.envs.mcp.session import Server, Session, select_tools
from horizonrl.envs.mcp.tasks import (
    Answered,
    MadeCall,
    McpTask,
    grade_answer,
    load_tasks,
)
from horizonrl.envs.text_limits import MAX_OBSERVATION_CHARS, Chars, clip, readable, whole

MAX_ARGUMENT_CHARS = 10_000
MAX_INTEGER = 1 << 63
"""Servers in other languages read no larger ones."""


class McpTools:
    """One task at a time, played by calling the tools of an MCP server.

    path: the tasks, one JSON object per line, with `task_id`, `prompt`, and optionally `split` and `category`
    grader: MODULE:FUNCTION that takes an `Answered` and returns the reward; 1 or more is a success
    command: the program that serves MCP on stdin and stdout; one is started for each episode and ends with it
    url: the address of a server that speaks streamable HTTP, instead of a command
    variables: names of environment variables that the command gets; of a url one, whose value is its bearer token
    show: names of the tools that the agent may call; default: all
    directory: where the command runs; default: a new directory for each episode
    max_observation_chars: bound of every observation
    """

    env_id: ClassVar[str] = "mcp"
    version: str = "1"
    native: bool = True
    _listed: ClassVar[dict[tuple[Server, tuple[str, ...]], list[Tool]]] = {}

    @validate_call
    def __init__(
        self,
        *,
        path: Path | None = None,
        grader: str = "",
        command: tuple[str, ...] = (),
        url: str | None = None,
        variables: tuple[str, ...] = (),
        show: tuple[str, ...] = (),
        directory: Path | None = None,
        max_observation_chars: Chars = MAX_OBSERVATION_CHARS,
    ) -> None:
        file = load_tasks(path)
        if bool(command) == bool(url):
            raise ConfigError(
                "an mcp environment needs options.command or options.url, and not both"
            )
        if url and len(variables) > 1:
            raise ConfigError(
                f"options.url takes one bearer token, and options.variables has {len(variables)} names"
            )
        if missing := [name for name in variables if not os.environ.get(name)]:
            raise ConfigError(
                f"options.variables: the environment variable {missing[0]!r} is not set here"
            )
        self.version = f"{self.version} sha256:{file.digest[:16]}"
        self._tasks = file.tasks
        self._grader = load_function("options.grader", grader, "answered")
        self._server = Server(command, url, directory, variables)
        self._show = show
        self._max_chars = max_observation_chars
        self._session: Session | None = None
        self._task: McpTask | None = None
        self._calls: list[MadeCall] = []

    @classmethod
    @validate_call
    def tasks(cls, *, path: Path | None = None) -> Sequence[TaskSpec]:
        """Return the tasks of the file, in its order."""
        return [
            TaskSpec(task.task_id, task.split, task.category)
            for task in load_tasks(path).tasks.values()
        ]

    async def reset(self, task_id: str) -> Observation:
        """Begin a task."""
        if (task := self._tasks.get(task_id)) is None:
            raise ConfigError(f"the file of tasks ({self.version}) has no task {task_id[:80]!r}")
        prompt = whole(task.prompt, task_id, self._max_chars)
        await self.close()
        if (self._server, self._show) not in self._listed:
            session = await self._running()
            self._listed[self._server, self._show] = select_tools(await session.tools(), self._show)
        self._task, self._calls = task, []
        return Observation(prompt)

    def tools(self) -> Tools:
        """Return the server's tools, or those that `show` names."""
        return tuple(
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": {"type": "object"} | tool.input_schema,
                },
            }
            for tool in self._listed.get((self._server, self._show), ())
        )

    async def call(self, call: ToolCall) -> Step:
        """Pass a call on to the server."""
        self._current()
        names = [tool.name for tool in self._listed[self._server, self._show]]
        if call.name not in names:
            return refuse_move(
                f"There is no tool {clip(readable(call.name))!r}. There are: {', '.join(names)}."
            )
        arguments = parse_arguments(call)
        if arguments is None:
            return refuse_move(
                f"The arguments of {call.name} are a JSON object of at most {MAX_ARGUMENT_CHARS} characters."
            )
        result = await (await self._running()).call(call.name, arguments)
        self._calls.append(MadeCall(call.name, arguments, result))
        return refuse_move(clip(readable(result), self._max_chars))

    async def step(self, text: str) -> Step:
        """Take the text as the answer, which ends the task."""
        task = self._current()
        answered = Answered(task, text, tuple(self._calls), self._look)
        try:
            reward = await grade_answer(self._grader, answered)
        except EnvironmentFailure:
            raise
        except Exception as error:
            raise EnvironmentFailure(
                f"the grader failed: {type(error).__name__}: {error}"
            ) from error
        await self.close()
        return Step("", reward=reward, terminated=True, success=reward >= 1)

    async def close(self) -> None:
        """End the episode, and its server with it."""
        self._task = None
        session, self._session = self._session, None
        if session is not None:
            await session.stop()

    async def _look(self, name: str, arguments: Mapping[str, Any]) -> str:
        return await (await self._running()).call(name, arguments)

    async def _running(self) -> Session:
        """Return the episode's session; start it if nothing has been called yet."""
        if self._session is None:
            # Kept before it is started, so that `close` ends what a cancelled start leaves.
            self._session = Session(self._server)
            await self._session.start()
        return self._session

    def _current(self) -> McpTask:
        if self._task is None:
            raise EnvironmentFailure(
                "no episode has begun, or it is over: reset before the next step"
            )
        return self._task


def parse_arguments(call: ToolCall) -> dict[str, Any] | None:
    """Return a call's arguments as every server can read them, or None if they are no JSON object or too large."""
    if len(call.arguments) > MAX_ARGUMENT_CHARS:
        return None
    try:
        arguments = json.loads(
            call.arguments or "{}", parse_int=_parse_bounded_int, parse_constant=_refuse
        )
    except (ValueError, RecursionError):
        return None
    return _write_value(arguments) if isinstance(arguments, dict) else None


def _parse_bounded_int(digits: str) -> int:
    if len(digits) > 20 or abs(number := int(digits)) >= MAX_INTEGER:
        raise ValueError(f"{digits[:20]} is too large")
    return number


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


def _write_value(value: Any) -> Any:
    """Return the value with `?` for each half of a character, which no encoding takes."""
    match value:
        case str():
            return readable(value)
        case dict():
            return {readable(key): _write_value(part) for key, part in value.items()}
        case list():
            return [_write_value(part) for part in value]
    return value
