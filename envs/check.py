"""The conformance test of an environment: what the rest of the system relies on, tried on the real thing.

`horizonrl envs check ID` prints the report; `tests/contracts/test_environment.py` runs it for every environment that is
registered. A new environment that passes can be trained on.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

from horizonrl.common.errors import ConfigError, EnvironmentFailure
from horizonrl.common.types import MAX_TURNS
from horizonrl.envs import registry
from horizonrl.envs.api import Environment, Step

MAX_OBSERVATION_CHARS = 1 << 18
"""What an episode's record holds of one observation; an environment's own `max_observation_chars` goes before it."""
TASKS_TRIED = 20
CHECK_S = 120.0
"""The deadline of one check."""


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    passed: bool
    detail: str
    """What was measured, or why it failed."""


@dataclass(frozen=True, slots=True)
class CheckReport:
    env_id: str
    version: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


class Violation(Exception):
    """The environment does not keep its contract; the message says how."""


@dataclass(slots=True)
class Subject:
    """The environment under test."""

    env_id: str
    options: Mapping[str, Any]
    task_ids: Sequence[str]
    longest_chars: int = 0
    """Length of the longest observation that any check has seen."""
    step_times_s: list[float] = field(default_factory=list)
    made: list[Environment] = field(default_factory=list)

    def make(self) -> Environment:
        self.made.append(registry.make(self.env_id, self.options))
        return self.made[-1]

    async def close(self) -> None:
        """Free what a check has made, however it ended: on a server it would stay."""
        made, self.made = self.made, []
        for environment in made:
            with suppress(Exception):  # the check has told what is wrong with it
                await environment.close()

    async def reset(self, environment: Environment, task_id: str) -> str:
        text = (await environment.reset(task_id)).text
        self.longest_chars = max(self.longest_chars, len(text))
        return text

    async def step(self, environment: Environment, text: str) -> Step:
        began = time.perf_counter()
        step = await environment.step(text)
        self.step_times_s.append(time.perf_counter() - began)
        self.longest_chars = max(self.longest_chars, len(step.observation))
        return step

    async def play(self, environment: Environment, task_id: str) -> tuple[str, list[Step]]:
        """Let the expert play a task to its end; return the first observation and the steps."""
        first = observation = await self.reset(environment, task_id)
        expert = environment.expert()
        steps: list[Step] = []
        while len(steps) < MAX_TURNS:
            steps.append(await self.step(environment, expert.act(observation)))
            if steps[-1].terminated or steps[-1].truncated:
                return first, steps
            observation = steps[-1].observation
        raise Violation(f"the expert has not ended task {task_id!r} after {MAX_TURNS} turns")


Trial = Callable[[Subject], Awaitable[str]]
"""One check: returns what it measured, raises Violation (or whatever the environment raised)."""


async def check(
    env_id: str, options: Mapping[str, Any] | None = None, task_ids: Sequence[str] | None = None
) -> CheckReport:
    """Try everything the contract promises; by default on tasks spread evenly over the list.

    Raises ConfigError or MissingDependency when the environment cannot be made at all.
    """
    environment = registry.make(env_id, options)
    await environment.close()
    listed = registry.tasks(env_id, options)
    spread = [task.task_id for task in listed[:: max(1, len(listed) // TASKS_TRIED)]][:TASKS_TRIED]
    subject = Subject(env_id, options or {}, task_ids or spread)
    checks = [await _try(name, trial, subject) for name, trial in TRIALS.items()]
    return CheckReport(env_id, environment.version, tuple(checks))


async def _try(name: str, trial: Trial, subject: Subject) -> Check:
    try:
        async with asyncio.timeout(CHECK_S):
            return Check(name, True, await trial(subject))
    except Violation as violation:
        return Check(name, False, str(violation))
    except Exception as error:  # noqa: BLE001 - the boundary: whatever an environment raises is the finding
        return Check(name, False, f"{type(error).__name__}: {error}")
    finally:
        await subject.close()


async def _tasks_are_listed(subject: Subject) -> str:
    first, second = (list(registry.tasks(subject.env_id, subject.options)) for _ in range(2))
    if first != second:
        raise Violation("two listings differ")
    if not first or len({task.task_id for task in first}) < len(first):
        raise Violation(f"{len(first)} tasks with {len({task.task_id for task in first})} different ids")
    return f"{len(first)} tasks"


async def _unknown_task_is_refused(subject: Subject) -> str:
    environment = subject.make()
    try:
        await environment.reset("no such task \N{SNOWMAN}")
    except ConfigError as error:
        return str(error)
    finally:
        await environment.close()
    raise Violation("reset of a task that does not exist raised no ConfigError")


async def _expert_solves(subject: Subject) -> str:
    environment, turns = subject.make(), []
    for task_id in subject.task_ids:
        _, steps = await subject.play(environment, task_id)
        if not (steps[-1].success and sum(step.reward for step in steps) > 0):
            raise Violation(f"the expert ended task {task_id!r} after {len(steps)} turns without success")
        turns.append(len(steps))
    await environment.close()
    mean_ms = 1e3 * sum(subject.step_times_s) / len(subject.step_times_s)
    return f"{len(turns)} tasks in {sum(turns) / len(turns):.1f} turns on average, {mean_ms:.3f} ms a step"


async def _episodes_repeat(subject: Subject) -> str:
    one, other = subject.make(), subject.make()
    for task_id in subject.task_ids:
        if await subject.play(one, task_id) != await subject.play(other, task_id):
            raise Violation(f"two instances answered the same actions on task {task_id!r} differently")
    await one.close()
    await other.close()
    return f"{len(subject.task_ids)} tasks, twice"


async def _an_episode_ends_once(subject: Subject) -> str:
    environment = subject.make()
    await _expect_failure(environment, "before the first reset")
    await subject.play(environment, subject.task_ids[0])
    await _expect_failure(environment, "after the end")
    await environment.close()
    return "a step before reset or after the end is refused"


async def _expect_failure(environment: Environment, when: str) -> None:
    try:
        await environment.step("look")
    except EnvironmentFailure:
        return
    raise Violation(f"a step {when} raised no EnvironmentFailure")


async def _no_text_breaks_it(subject: Subject) -> str:
    environment = subject.make()
    for task_id in subject.task_ids[:3]:
        observation = await subject.reset(environment, task_id)
        texts = odd_texts(environment.expert().act(observation))
        for text in texts:
            step = await subject.step(environment, text)
            if step.terminated or step.truncated:
                await subject.reset(environment, task_id)
    await environment.close()
    return f"{len(texts)} odd texts"


def odd_texts(sensible: str) -> list[str]:
    """Return texts that no agent should write but some will: damaged, huge, binary, of every script."""
    draw = Random(0)  # The same texts every time.
    noise = ["".join(chr(draw.randrange(0xD800)) for _ in range(draw.randrange(200))) for _ in range(20)]
    cuts = [sensible[: draw.randrange(len(sensible) + 1)] for _ in range(10)]
    shuffled = ["".join(draw.sample(sensible, len(sensible))) for _ in range(10)]
    fixed = ["", " ", "\n\n", "\0", "Action:", "Action: Action:", "9" * 5_000, "٣ get ٣ \U0001f642", "{}[]()\\" * 50]
    changed = [sensible * 2, f"{sensible}\n{sensible}", sensible.upper(), sensible * 5_000]
    return [*fixed, *changed, *noise, *cuts, *shuffled]


async def _a_cancelled_step_leaves_it_usable(subject: Subject) -> str:
    environment, task_id = subject.make(), subject.task_ids[0]
    first = await subject.reset(environment, task_id)
    step = asyncio.ensure_future(environment.step(environment.expert().act(first)))
    await asyncio.sleep(0)  # Let the step begin, so that it is cancelled at its first wait.
    step.cancel()
    await asyncio.gather(step, return_exceptions=True)
    if await subject.reset(environment, task_id) != first:
        raise Violation("the reset after a cancelled step began a different episode")
    _, steps = await subject.play(environment, task_id)
    await environment.close()
    if not steps[-1].success:
        raise Violation("after a cancelled step and a reset the expert could not solve the task")
    return "cancelled, reset, solved"


async def _close_is_idempotent(subject: Subject) -> str:
    unused, used = subject.make(), subject.make()
    await subject.reset(used, subject.task_ids[0])
    for environment in (unused, used, unused, used):
        await environment.close()
    return "closed twice, with and without an episode"


async def _observations_are_bounded(subject: Subject) -> str:
    limit = subject.options.get("max_observation_chars", MAX_OBSERVATION_CHARS)
    if subject.longest_chars > limit:
        raise Violation(f"an observation had {subject.longest_chars} characters; the limit is {limit}")
    return f"the longest of all checks had {subject.longest_chars} characters; the limit is {limit}"


TRIALS: Mapping[str, Trial] = {
    "tasks are listed in a stable order with unique ids": _tasks_are_listed,
    "an unknown task is a ConfigError": _unknown_task_is_refused,
    "the expert solves the tasks": _expert_solves,
    "a task is the same episode in every instance": _episodes_repeat,
    "an episode ends once": _an_episode_ends_once,
    "no text raises": _no_text_breaks_it,
    "a cancelled step leaves it usable": _a_cancelled_step_leaves_it_usable,
    "close is idempotent": _close_is_idempotent,
    "observations are bounded": _observations_are_bounded,  # Last: it judges what the others saw.
}
