"""A small environment that keeps its contract, and one for each way of breaking it. `test_check.py` installs them."""

import asyncio
import itertools
import math
import time
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from horizonrl.common.errors import ConfigError, EnvironmentFailure
from horizonrl.envs.api import Observation, Reply, Step, TaskSpec, ToolCall, Tools


class Parrot:
    """The expert: says the task's id."""

    def __init__(self, task_id: str) -> None:
        self._task_id = task_id

    def act(self, observation: str) -> str:
        return self._task_id


class World:
    """Say the task's id to win."""

    env_id: ClassVar[str] = "small"
    version: ClassVar[str] = "1"

    def __init__(self, *, max_observation_chars: int = 100) -> None:
        self.task_id: str | None = None

    @classmethod
    def tasks(cls) -> Sequence[TaskSpec]:
        return [TaskSpec(task_id, "train", "all") for task_id in ("a", "b")]

    async def reset(self, task_id: str) -> Observation:
        if task_id not in ("a", "b"):
            raise ConfigError("no such task")
        self.task_id = task_id
        return Observation(f"Say {task_id}.")

    async def step(self, text: str) -> Step:
        task_id = self.begun()
        await asyncio.sleep(0)
        if text != task_id:
            return Step("No.", 0.0, terminated=False)
        self.task_id = None
        return Step("Well said.", 1.0, terminated=True, success=True)

    def begun(self) -> str:
        if self.task_id is None:
            raise EnvironmentFailure("nothing has begun")
        return self.task_id

    def expert(self) -> Parrot:
        return Parrot(self.begun())

    async def close(self) -> None:
        self.task_id = None


class ListsATaskTwice(World):
    @classmethod
    def tasks(cls) -> Sequence[TaskSpec]:
        return [*super().tasks(), *super().tasks()]


class ListsATaskInTwoSplits(World):
    @classmethod
    def tasks(cls) -> Sequence[TaskSpec]:
        return [*super().tasks(), TaskSpec("a", "test", "all")]


class AcceptsAnyTask(World):
    async def reset(self, task_id: str) -> Observation:
        self.task_id = task_id
        return Observation(f"Say {task_id}.")


class NeverSucceeds(World):
    async def step(self, text: str) -> Step:
        step = await super().step(text)
        return Step(step.observation, 0.0, terminated=step.terminated)


class CountsItsResets(World):
    resets = itertools.count()

    async def reset(self, task_id: str) -> Observation:
        return Observation((await super().reset(task_id)).text + f" Reset {next(self.resets)}.")


class PaysTwice(World):
    async def step(self, text: str) -> Step:
        won = text == self.task_id
        return Step("", float(won), terminated=won, success=won)


class Chokes(World):
    async def step(self, text: str) -> Step:
        if not text.isascii():
            raise UnicodeError("what is that?")
        return await super().step(text)


class BreaksWhenCancelled(World):
    broken = False

    async def reset(self, task_id: str) -> Observation:
        if self.broken:
            raise EnvironmentFailure("left half way")
        return await super().reset(task_id)

    async def step(self, text: str) -> Step:
        self.broken = True
        step = await super().step(text)
        self.broken = False
        return step


class ClosesOnce(World):
    closed = False

    async def close(self) -> None:
        if self.closed:
            raise EnvironmentFailure("closed already")
        self.closed = True


class HasAnotherId(World):
    env_id = "another"


class PaysNaN(World):
    pay = math.nan

    async def step(self, text: str) -> Step:
        step = await super().step(text)
        return Step(
            step.observation,
            self.pay if step.success else 0.0,
            step.terminated,
            success=step.success,
        )


class PaysInfinity(PaysNaN):
    pay = math.inf


class Exits(World):
    async def step(self, text: str) -> Step:
        self.begun()
        raise SystemExit(3)


class TalksAtLength(World):
    async def step(self, text: str) -> Step:
        step = await super().step(text)
        return Step(step.observation * 100, step.reward, step.terminated, success=step.success)


class AnswersNumpys(World):
    async def step(self, text: str) -> Step:
        step = await super().step(text)
        return Step(
            step.observation, np.float32(step.reward), step.terminated, success=step.success
        )  # type: ignore[arg-type]


class AnswersATuple(World):
    async def step(self, text: str) -> Step:
        step = await super().step(text)
        return step.observation, step.reward, step.terminated, False, {}  # type: ignore[return-value]


class StepsWithoutAsync(World):
    def step(self, text: str) -> Step:  # type: ignore[override]
        return Step("Well said.", reward=1.0, terminated=True, success=True)


class BeginsWithAText(World):
    async def reset(self, task_id: str) -> Observation:
        return (await super().reset(task_id)).text  # type: ignore[return-value]


class HasNoTasks(World):
    @classmethod
    def tasks(cls) -> list[TaskSpec]:
        return []


class Hangs(World):
    async def step(self, text: str) -> Step:
        await super().step(text)
        return await asyncio.sleep(60)  # type: ignore[return-value]


class Blocks(World):
    async def step(self, text: str) -> Step:
        time.sleep(60)  # noqa: ASYNC251
        return await super().step(text)


class ParrotThatCalls(Parrot):
    def reply(self, observation: str) -> Reply:
        return Reply("", (ToolCall("say", self.act(observation)),))


class OffersATool(World):
    """Say it by a call."""

    native = True

    def tools(self) -> Tools:
        return (
            {"type": "function", "function": {"name": "say", "parameters": {"type": "object"}}},
        )

    async def call(self, call: ToolCall) -> Step:
        return await self.step(call.arguments)

    def expert(self) -> Parrot:
        return ParrotThatCalls(self.begun())


class DescribesNoTool(OffersATool):
    def tools(self) -> Tools:
        return ({"name": "say"},)


class Unguided:
    """A world without an expert, which is a whole environment as well."""

    env_id: ClassVar[str] = "unguided"
    version: ClassVar[str] = "1"

    def __init__(self, *, max_observation_chars: int = 100) -> None:
        self._world = World()

    tasks = World.tasks

    async def reset(self, task_id: str) -> Observation:
        return await self._world.reset(task_id)

    async def step(self, text: str) -> Step:
        return await self._world.step(text)

    async def close(self) -> None:
        await self._world.close()


class UnguidedChokes(Unguided):
    async def step(self, text: str) -> Step:
        if "\0" in text:
            raise ValueError("a null")
        return await super().step(text)


class UnguidedForgets(Unguided):
    resets = itertools.count()

    async def reset(self, task_id: str) -> Observation:
        return Observation((await super().reset(task_id)).text + f" Reset {next(self.resets)}.")
