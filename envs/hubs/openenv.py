"""OpenEnv: any server that speaks its WebSocket protocol, which also `horizonrl envs serve` does at `/ID`.

A task is `seed-NUMBER`: the seed that `reset` gets. Needs no package of theirs. A failure of the server or of the
connection breaks the episode.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from aiohttp import (
    ClientError,
    ClientSession,
    ClientTimeout,
    ClientWebSocketResponse,
    ClientWSTimeout,
    WSMessage,
    WSMsgType,
)
from pydantic import Field, validate_call

from horizonrl.common.errors import ConfigError, EnvironmentFailure, EnvironmentTimeout
from horizonrl.common.texts import read_object
from horizonrl.envs.api import Observation, Step, TaskSpec
from horizonrl.envs.hubs.hub import TaskCount, read_number
from horizonrl.envs.splits import hashed_split
from horizonrl.envs.text_limits import Chars, clip, readable, whole

MOST_BYTES = 1 << 24
"""The longest message of a server."""
CLOSE_S = 5.0
TEXTS = ("text", "prompt", "message", "result", "output", "response", "echoed_message")
"""Fields of an observation that hold its text, in the order in which they are looked for."""


class OpenEnv:
    """Plays one episode at a time on a server.

    url: the server's address, such as http://127.0.0.1:8000
    action: the field of their action that takes the agent's reply, such as `message`, `code` or `action`
    constants: further fields of every action
    observation: the field of their observation that is its text; the first of `TEXTS` by default, else all as JSON
    success: the return from which on an episode that has ended counts as solved
    tasks: how many seeds are listed
    instructions: the rules that the agent reads before the first observation
    timeout_s: the longest wait for an answer, in seconds
    max_observation_chars: bound of every observation
    """

    env_id: ClassVar[str] = "openenv"
    version: str = "1"

    @validate_call
    def __init__(
        self,
        *,
        url: str | None = None,
        action: str = "message",
        constants: dict[str, str | int | float | bool] | None = None,
        observation: str | None = None,
        success: float = 1.0,
        tasks: TaskCount = 100,
        instructions: str = "",
        timeout_s: Annotated[float, Field(gt=0)] = 300.0,
        max_observation_chars: Chars = 32_768,
    ) -> None:
        self._address = _address(url)
        self._action, self._constants, self._field = action, constants or {}, observation
        self._success, self._instructions = success, instructions
        self._timeout_s, self._max_chars = timeout_s, max_observation_chars
        self.version = f"{type(self).version} tasks:{tasks}"
        self._http: ClientSession | None = None
        self._channel: ClientWebSocketResponse | None = None
        self._answers: asyncio.Queue[WSMessage] = asyncio.Queue()
        self._reader: asyncio.Task[None] | None = None
        self._playing = self._paid = False
        self._total = 0.0

    @classmethod
    @validate_call
    def tasks(cls, *, tasks: TaskCount = 100) -> Sequence[TaskSpec]:
        """Return the first seeds."""
        return tuple(
            TaskSpec(task, hashed_split(task), "all")
            for task in (f"seed-{n}" for n in range(tasks))
        )

    async def reset(self, task_id: str) -> Observation:
        """Begin an episode with the task's seed, on a connection of its own."""
        if (number := read_number(task_id, ("seed",))) is None:
            raise ConfigError(
                f"openenv has no task {task_id[:80]!r}: a task is seed-0, seed-1 and so on"
            )
        await self.close()
        answer = await self._ask("reset", {"seed": number[1]})
        text = "\n\n".join(filter(None, (self._instructions, self._read_answer(answer))))
        text = whole(text, task_id, self._max_chars)
        self._playing, self._paid, self._total = not answer.get("done"), False, 0.0
        return Observation(text)

    async def step(self, text: str) -> Step:
        """Send the whole reply as one action."""
        if not self._playing:
            raise EnvironmentFailure(
                "openenv: no episode is in progress: reset before the next step"
            )
        self._playing = False  # stays False if the server does not answer
        answer = await self._ask("step", {**self._constants, self._action: readable(text)})
        reward, done = self._reward(answer), bool(answer.get("done"))
        self._playing, self._total = not done, self._total + reward
        success = done and self._total >= self._success
        return Step(
            clip(self._read_answer(answer), self._max_chars),
            reward,
            terminated=done,
            success=success,
        )

    async def close(self) -> None:
        """Close the connection, and with it the server's episode."""
        self._playing = False
        reader, self._reader = self._reader, None
        channel, self._channel = self._channel, None
        http, self._http = self._http, None
        if reader is not None:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
        if channel is not None:
            await channel.close()
        if http is not None:
            await http.close()

    def _reward(self, answer: Mapping[str, Any]) -> float:
        """Return the reward of a step. An episode that never paid one has none, and is broken."""
        reward = answer.get("reward")
        if isinstance(reward, bool | int | float):
            self._paid = True
            return float(reward)
        if answer.get("done") and not self._paid:
            raise EnvironmentFailure(
                f"openenv: the episode ended with reward {reward!r}, and no step paid one"
            )
        return 0.0

    def _read_answer(self, answer: Mapping[str, Any]) -> str:
        """Return the text of an observation."""
        observation = answer.get("observation")
        if not isinstance(observation, dict):
            return str(observation)
        if self._field is not None and self._field not in observation:
            raise EnvironmentFailure(
                f"openenv: an observation has no field {self._field!r}, but {', '.join(observation)}: set "
                "options.observation to one of them"
            )
        fields = (self._field,) if self._field is not None else TEXTS
        value = next((observation[key] for key in fields if key in observation), observation)
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a message and return the data of its answer."""
        try:
            async with asyncio.timeout(self._timeout_s):
                channel = await self._connect()
                await channel.send_json({"type": kind, "data": data})
                message = await self._answers.get()
        except TimeoutError:
            raise EnvironmentTimeout(
                f"openenv: no answer to {kind} within {self._timeout_s:g} s"
            ) from None
        except (ClientError, OSError) as error:
            raise EnvironmentFailure(
                f"openenv: {self._address} does not answer ({error!r})"
            ) from error
        if message.type is not WSMsgType.TEXT:
            raise EnvironmentFailure(
                f"openenv: the server closed the connection at {kind} ({message.data!r})"
            )
        return _data(message.data, kind)

    async def _connect(self) -> ClientWebSocketResponse:
        if self._channel is None:
            self._http = self._http or ClientSession(
                timeout=ClientTimeout(total=None, sock_connect=self._timeout_s)
            )
            waits = ClientWSTimeout(ws_close=CLOSE_S)
            self._channel = await self._http.ws_connect(
                self._address, max_msg_size=MOST_BYTES, timeout=waits
            )
            self._answers = asyncio.Queue()
            self._reader = asyncio.create_task(_read(self._channel, self._answers))
        return self._channel


async def _read(channel: ClientWebSocketResponse, answers: "asyncio.Queue[WSMessage]") -> None:
    """Pass on messages until the server closes, and answer its pings while the model thinks: aiohttp does so only
    while somebody receives, and servers close a connection that is silent for 30 s.
    """
    while True:
        message = await channel.receive()
        answers.put_nowait(message)
        if message.type in (WSMsgType.CLOSE, WSMsgType.CLOSING, WSMsgType.CLOSED, WSMsgType.ERROR):
            return


def _data(text: str, kind: str) -> Mapping[str, Any]:
    """Return the data of an answer. Raises EnvironmentFailure for an error or for anything else."""
    answer = read_object(text)
    if answer is None or not isinstance(data := answer.get("data"), dict):
        raise EnvironmentFailure(
            f"openenv: the answer to {kind} is no message of the protocol: {clip(text)!r}"
        )
    if answer.get("type") != "observation":
        raise EnvironmentFailure(
            f"openenv: the server answered {kind} with {clip(json.dumps(data), 300)}"
        )
    return data


def _address(url: str | None) -> str:
    """Return the address of a server's WebSocket."""
    if not url or not url.startswith(("http://", "https://")):
        raise ConfigError(
            f"openenv needs the address of a server and got {url!r}: set options.url, such as http://127.0.0.1:8000"
        )
    return f"ws{url.removeprefix('http').rstrip('/')}/ws"
