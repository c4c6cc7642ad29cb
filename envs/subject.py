"""The environment that a conformance test tries: it is played, and every call is measured and remembered."""

import inspect
import time
import traceback
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from horizonrl.common.errors import ContractBroken, EnvironmentFailure
from horizonrl.common.plugins import source_line
from horizonrl.common.types import MAX_TURNS
from horizonrl.envs import contract, registry
from horizonrl.envs.api import (
    CallsTools,
    Environment,
    Expert,
    Reply,
    Step,
    ToolCall,
    make_expert,
    tool_user,
)
from horizonrl.envs.odd_texts import odd_texts
from horizonrl.envs.text_limits import readable

BABBLED = 30
"""Number of texts sent to an environment that has no expert."""
TYPES: Mapping[str, Any] = {
    "observation": str,
    "reward": (int, float),
    "terminated": bool,
    "truncated": bool,
    "success": bool,
}
"""Of the fields of a step, but for `info`."""
MAX_SHOWN = 160
"""Characters shown of a text that caused a failure."""


class Violation(Exception):
    """The environment breaks its contract. The message says how; `method` names the method to look at."""

    def __init__(self, message: str, method: str = "step") -> None:
        super().__init__(message)
        self.method = method


@dataclass(slots=True)
class Subject:
    """The environment under test."""

    env_id: str
    options: Mapping[str, Any]
    task_ids: Sequence[str]
    last_call: str = ""
    """The most recent call, reported with a failure."""
    longest_chars: int = 0
    """Length of the longest observation in any check so far."""
    longest_call: str = ""
    """The call that returned the longest observation."""
    mistyped: str = ""
    """The first field of a step in any check that has another type than `api.Step` says, and the call."""
    is_hung: bool = False
    """Whether a check reached its time limit."""
    step_times_s: list[float] = field(default_factory=list)
    made: list[Environment] = field(default_factory=list)

    @property
    def has_expert(self) -> bool:
        return registry.has_expert(self.env_id, self.options)

    def make(self) -> Environment:
        self.made.append(registry.make(self.env_id, self.options))
        return self.made[-1]

    async def close(self) -> None:
        """Close every instance that a check has made. An instance left open would stay on its server."""
        made, self.made = self.made, []
        for environment in made:
            # The check has already reported what is wrong with the environment.
            with suppress(Exception):
                await environment.close()

    async def reset(self, environment: Environment, task_id: str) -> str:
        self.last_call = f"reset({task_id!r})"
        with _judging("reset"):
            first = await contract.reset(environment, task_id)
        self._measure(first.text)
        return first.text

    async def step(self, environment: Environment, text: str) -> Step:
        self.last_call = f"step({show(text)})"
        # Cut as rollouts and servers cut: nobody ever sends an environment more.
        return await self._await_step(environment, "step", environment.step(readable(text)))

    async def answer(self, environment: Environment, reply: Reply) -> Step:
        """Send a reply: its one call if it has one, else its text."""
        user = tool_user(environment)
        if user is None or not reply.calls:
            return await self.step(environment, reply.text)
        name, arguments = reply.calls[0].name, readable(reply.calls[0].arguments)
        self.last_call = f"call({show(name)}, {show(arguments)})"
        return await self._await_step(environment, "call", user.call(ToolCall(name, arguments)))

    async def _await_step(
        self, environment: Environment, method: str, answer: Awaitable[Step]
    ) -> Step:
        began = time.perf_counter()
        with _judging(method):
            step: Step = await contract.await_answer(environment, method, answer)
            self.step_times_s.append(time.perf_counter() - began)
            contract.check_step(environment, method, step)
        self._judge(step)
        return step

    def ask_expert(
        self, environment: Environment, observation: str, expert: Expert | None = None
    ) -> Reply:
        """Return what the expert of the task replies; the observation itself if there is no expert."""
        expert = expert or self.expert(environment)
        if expert is None:
            return Reply(observation)
        if tool_user(environment) is None:
            return Reply(expert.act(observation))
        if not isinstance(expert, CallsTools):
            raise Violation(
                "the expert of an environment that offers tools has no `reply`", "expert"
            )
        return expert.reply(observation)

    def _judge(self, step: Step) -> None:
        self._measure(step.observation)
        values = {name: getattr(step, name) for name in TYPES} | {
            f"info[{k!r}]": v for k, v in step.info.items()
        }
        for name, value in values.items():
            if not self.mistyped and not isinstance(value, TYPES.get(name, (str, int, float))):
                kind = type(value)
                self.mistyped = (
                    f"{name} is a {kind.__module__}.{kind.__qualname__}, after {self.last_call}"
                )

    def _measure(self, observation: str) -> None:
        if len(observation) > self.longest_chars:
            self.longest_chars, self.longest_call = len(observation), self.last_call

    async def play(self, environment: Environment, task_id: str) -> tuple[str, list[Step]]:
        """Let the expert play a task to its end; return the first observation and the steps.

        Without an expert for the task, BABBLED texts are sent one after another. They may or may not end the episode.
        """
        first = observation = await self.reset(environment, task_id)
        expert, babble = self.expert(environment), iter(odd_texts(first)[:BABBLED])
        steps: list[Step] = []
        while len(steps) < MAX_TURNS:
            text = None if expert else next(babble, None)
            if text is None and expert is None:
                return first, steps
            reply = (
                self.ask_expert(environment, observation, expert) if text is None else Reply(text)
            )
            steps.append(await self.answer(environment, reply))
            if steps[-1].terminated or steps[-1].truncated:
                return first, steps
            observation = steps[-1].observation
        raise Violation(
            f"the expert has not finished task {task_id!r} after {MAX_TURNS} turns", "expert"
        )

    def expert(self, environment: Environment) -> Expert | None:
        """Return the expert, or None if the environment has none, or none for the task that has begun."""
        if not self.has_expert:
            return None
        try:
            return make_expert(environment)
        except EnvironmentFailure:
            return None

    def locate(self, method: str) -> str:
        """Return `file:line, Class.method` of a method of the environment."""
        environment = registry.load(self.env_id)
        function = inspect.unwrap(getattr(environment, method, environment))
        line = source_line(function)
        return f"{line}, {function.__qualname__}" if line else f"{environment.__module__}, {method}"

    def raised_at(self, error: Exception) -> str:
        """Return `file:line, function` of the innermost frame in the environment's own module or package."""
        frame = contract.find_frame(error, registry.load(self.env_id).__module__)
        frame = frame or traceback.extract_tb(error.__traceback__)[-1]
        return f"{frame.filename}:{frame.lineno}, {frame.name}"


@contextmanager
def _judging(method: str) -> Iterator[None]:
    """Report an answer of another form as what it is: a violation of the contract by `method`."""
    try:
        yield
    except ContractBroken as error:
        raise Violation(str(error), method) from None


def show(text: str) -> str:
    """Return the repr of a text, cut after MAX_SHOWN characters."""
    return (
        repr(text)
        if len(text) <= MAX_SHOWN
        else f"{text[:MAX_SHOWN]!r}... of {len(text):,} characters"
    )
