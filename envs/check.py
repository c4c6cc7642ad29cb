"""The conformance test of an environment: it plays real episodes and checks what the rest of the system relies on.

`horizonrl envs check ID` prints the report, and `tests/contracts/test_environment.py` runs it for every registered
environment. An environment that passes is ready for training. A failed check names the line of the environment's code
and the text that caused the failure.
"""

import asyncio
import inspect
import sys
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from horizonrl.common.errors import ConfigError, EnvironmentFailure
from horizonrl.common.types import MAX_TURNS
from horizonrl.envs import registry
from horizonrl.envs.api import Environment, Step, expert_of
from horizonrl.envs.bounds import readable
from horizonrl.envs.odd_texts import odd_texts

MAX_OBSERVATION_CHARS = 1 << 18
"""The longest observation that an episode's record holds. An environment's `max_observation_chars` takes precedence."""
TASKS_TRIED = 20
CHECK_S = 120.0
"""Time limit of one check."""
BABBLED = 30
"""Number of texts sent to an environment that has no expert."""
MAX_SHOWN = 160
"""Characters shown of a text that caused a failure."""


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    passed: bool
    detail: str
    """What was measured, or why the check failed."""
    place: str = ""
    """If the check failed: `file:line, function` in the environment's code."""
    last_call: str = ""
    """If the check failed: the last call before the failure, with its text."""


@dataclass(frozen=True, slots=True)
class CheckReport:
    env_id: str
    version: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


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
    step_times_s: list[float] = field(default_factory=list)
    made: list[Environment] = field(default_factory=list)

    @property
    def has_expert(self) -> bool:
        return registry.has_expert(self.env_id)

    def make(self) -> Environment:
        self.made.append(registry.make(self.env_id, self.options))
        return self.made[-1]

    async def close(self) -> None:
        """Close every instance that a check has made. An instance left open would stay on its server."""
        made, self.made = self.made, []
        for environment in made:
            with suppress(Exception):  # the check has already reported what is wrong with the environment
                await environment.close()

    async def reset(self, environment: Environment, task_id: str) -> str:
        self.last_call = f"reset({task_id!r})"
        text = (await environment.reset(task_id)).text
        self._measure(text)
        return text

    async def step(self, environment: Environment, text: str) -> Step:
        self.last_call = f"step({shown(text)})"
        began = time.perf_counter()
        # Cut as rollouts and servers cut: nobody ever sends an environment more.
        step = await environment.step(readable(text))
        self.step_times_s.append(time.perf_counter() - began)
        self._measure(step.observation)
        return step

    def _measure(self, observation: str) -> None:
        if len(observation) > self.longest_chars:
            self.longest_chars, self.longest_call = len(observation), self.last_call

    async def play(self, environment: Environment, task_id: str) -> tuple[str, list[Step]]:
        """Let the expert play a task to its end; return the first observation and the steps.

        Without an expert, BABBLED texts are sent one after another. They may or may not end the episode.
        """
        first = observation = await self.reset(environment, task_id)
        act = expert_of(environment).act if self.has_expert else self._babble(first)
        steps: list[Step] = []
        while len(steps) < MAX_TURNS:
            text = act(observation)
            if text is None:
                return first, steps
            steps.append(await self.step(environment, text))
            if steps[-1].terminated or steps[-1].truncated:
                return first, steps
            observation = steps[-1].observation
        raise Violation(f"the expert has not finished task {task_id!r} after {MAX_TURNS} turns", "expert")

    def _babble(self, first: str) -> Callable[[str], str | None]:
        texts = iter(odd_texts(first)[:BABBLED])
        return lambda _: next(texts, None)

    def place_of(self, method: str) -> str:
        """Return `file:line, Class.method` of a method of the environment."""
        environment = registry.load(self.env_id)
        function = inspect.unwrap(getattr(environment, method, environment))
        try:
            return f"{inspect.getsourcefile(function)}:{inspect.getsourcelines(function)[1]}, {function.__qualname__}"
        except (OSError, TypeError):  # no source file: a compiled module, or a class created at run time
            return f"{environment.__module__}, {method}"

    def raised_at(self, error: Exception) -> str:
        """Return `file:line, function` of the innermost frame in the environment's own module or package."""
        module = sys.modules[registry.load(self.env_id).__module__]
        file = str(module.__file__)
        own = str(Path(file).parent) if module.__package__ else file
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
        found = ([frame for frame in frames if frame.filename.startswith(own)] or frames)[-1:]
        return "".join(f"{frame.filename}:{frame.lineno}, {frame.name}" for frame in found)


def shown(text: str) -> str:
    """Return the repr of a text, cut after MAX_SHOWN characters."""
    return repr(text) if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]!r}... of {len(text):,} characters"


Trial = Callable[[Subject], Awaitable[str]]
"""One check. It returns what it measured, or raises Violation or whatever the environment raised."""


async def check(
    env_id: str, options: Mapping[str, Any] | None = None, task_ids: Sequence[str] | None = None
) -> CheckReport:
    """Run every check, by default on up to TASKS_TRIED tasks spread evenly over the list.

    Raises ConfigError or MissingDependency if the environment cannot be created at all.
    """
    environment = registry.make(env_id, options)
    await environment.close()
    listed = registry.tasks(env_id, options)
    spread = [task.task_id for task in listed[:: max(1, len(listed) // TASKS_TRIED)]][:TASKS_TRIED]
    subject = Subject(env_id, options or {}, task_ids or spread)
    checks = [await _try(name, trial, subject) for name, trial in TRIALS.items()]
    return CheckReport(env_id, environment.version, tuple(checks))


async def _try(name: str, trial: Trial, subject: Subject) -> Check:
    subject.last_call = ""
    limit = asyncio.timeout(CHECK_S)
    try:
        async with limit:
            return Check(name, True, await trial(subject))
    except Violation as violation:
        detail, place = str(violation), subject.place_of(violation.method)
    except Exception as error:  # noqa: BLE001 - the boundary: whatever an environment raises is the finding
        # Our own limit, and not a TimeoutError that the environment raised.
        detail = f"took longer than {CHECK_S:.0f} s" if limit.expired() else f"{type(error).__name__}: {error}"
        place = subject.raised_at(error)
    finally:
        await subject.close()
    return Check(name, False, detail, place, subject.last_call)


async def _tasks_are_listed(subject: Subject) -> str:
    first, second = (list(registry.tasks(subject.env_id, subject.options)) for _ in range(2))
    if first != second:
        differing = next((pair for pair in zip(first, second, strict=False) if pair[0] != pair[1]), None)
        raise Violation(
            f"two listings differ: {len(first)} and {len(second)} tasks, the first difference is {differing}", "tasks"
        )
    counts = Counter(task.task_id for task in first)
    if not first or len(counts) < len(first):
        repeated = [task_id for task_id, count in counts.items() if count > 1][:3]
        raise Violation(f"{len(first)} tasks with {len(counts)} different ids; repeated: {repeated}", "tasks")
    return f"{len(first)} tasks"


async def _unknown_task_is_refused(subject: Subject) -> str:
    environment = subject.make()
    try:
        await subject.reset(environment, "no such task \N{SNOWMAN}")
    except ConfigError as error:
        return str(error)
    finally:
        await environment.close()
    raise Violation("reset of a task that does not exist raised no ConfigError", "reset")


async def _expert_solves(subject: Subject) -> str:
    if not subject.has_expert:
        return "skipped: without an expert, nothing here shows that the tasks can be solved"
    environment, turns = subject.make(), []
    for task_id in subject.task_ids:
        _, steps = await subject.play(environment, task_id)
        # A success without a reward is a task from which RL learns nothing.
        if not (steps[-1].success and sum(step.reward for step in steps) > 0):
            raise Violation(
                f"the expert ended task {task_id!r} after {len(steps)} turns without success; the last observation: "
                f"{shown(steps[-1].observation)}"
            )
        turns.append(len(steps))
    await environment.close()
    mean_ms = 1e3 * sum(subject.step_times_s) / len(subject.step_times_s)
    return f"{len(turns)} tasks in {sum(turns) / len(turns):.1f} turns on average, {mean_ms:.3f} ms per step"


async def _episodes_repeat(subject: Subject) -> str:
    # Advantages compare the episodes of one task: instances that differ would add noise to every baseline.
    one, other = subject.make(), subject.make()
    for task_id in subject.task_ids:
        (first, steps), (again, repeated) = [await subject.play(each, task_id) for each in (one, other)]
        if first != again:
            raise Violation(
                f"task {task_id!r} begins with {shown(first)} in one instance and with {shown(again)} in another",
                "reset",
            )
        for turn, (step, repeat) in enumerate(zip(steps, repeated, strict=False), 1):
            if step != repeat:
                raise Violation(
                    f"in turn {turn} of task {task_id!r} two instances answer the same reply with {step} and {repeat}"
                )
        if len(steps) != len(repeated):
            raise Violation(f"task {task_id!r} took {len(steps)} turns in one instance and {len(repeated)} in another")
    await one.close()
    await other.close()
    return f"{len(subject.task_ids)} tasks, twice"


async def _an_episode_ends_once(subject: Subject) -> str:
    environment = subject.make()
    await _expect_failure(subject, environment, "before the first reset")
    _, steps = await subject.play(environment, subject.task_ids[0])
    ended = bool(steps) and (steps[-1].terminated or steps[-1].truncated)
    if ended:
        await _expect_failure(subject, environment, "after the end")
    await environment.close()
    if not ended:
        return "a step before reset is refused; no episode ended here, so a step after the end was not tried"
    return "a step before reset or after the end is refused"


async def _expect_failure(subject: Subject, environment: Environment, when: str) -> None:
    try:
        step = await subject.step(environment, "look")
    except EnvironmentFailure:
        return
    raise Violation(f"a step {when} raised no EnvironmentFailure, but was answered: {shown(step.observation)}")


async def _no_text_breaks_it(subject: Subject) -> str:
    environment = subject.make()
    for task_id in subject.task_ids[:3]:
        observation = await subject.reset(environment, task_id)
        sensible = expert_of(environment).act(observation) if subject.has_expert else observation
        texts = odd_texts(sensible)
        for text in texts:
            step = await subject.step(environment, text)
            if step.terminated or step.truncated:
                await subject.reset(environment, task_id)
    await environment.close()
    return f"{len(texts)} odd texts"


async def _a_cancelled_step_leaves_it_usable(subject: Subject) -> str:
    environment, task_id = subject.make(), subject.task_ids[0]
    first = await subject.reset(environment, task_id)
    text = expert_of(environment).act(first) if subject.has_expert else first
    subject.last_call = f"step({shown(text)}), cancelled"
    step = asyncio.ensure_future(environment.step(text))
    await asyncio.sleep(0)  # Let the step begin, so that it is cancelled at its first wait.
    # What a rollout does at `step_timeout_s`, and a drained actor at any time.
    step.cancel()
    await asyncio.gather(step, return_exceptions=True)
    if await subject.reset(environment, task_id) != first:
        raise Violation("the reset after a cancelled step began a different episode", "reset")
    _, steps = await subject.play(environment, task_id)
    await environment.close()
    if subject.has_expert and not steps[-1].success:
        raise Violation("the expert could not solve the task after a cancelled step and a reset")
    return f"cancelled, reset, {'solved' if subject.has_expert else 'played'}"


async def _close_is_idempotent(subject: Subject) -> str:
    unused, used = subject.make(), subject.make()
    await subject.reset(used, subject.task_ids[0])
    for environment in (unused, used, unused, used):
        await environment.close()
    return "closed twice, with and without an episode"


async def _observations_are_bounded(subject: Subject) -> str:
    limit = subject.options.get("max_observation_chars", MAX_OBSERVATION_CHARS)
    if subject.longest_chars > limit:
        raise Violation(
            f"an observation had {subject.longest_chars} characters, after {subject.longest_call}; the limit is {limit}"
        )
    return f"the longest observation had {subject.longest_chars} characters; the limit is {limit}"


TRIALS: Mapping[str, Trial] = {
    "tasks are listed in a stable order with unique ids": _tasks_are_listed,
    "an unknown task is a ConfigError": _unknown_task_is_refused,
    "the expert solves the tasks": _expert_solves,
    "a task is the same episode in every instance": _episodes_repeat,
    "an episode ends once": _an_episode_ends_once,
    "no text raises": _no_text_breaks_it,
    "a cancelled step leaves it usable": _a_cancelled_step_leaves_it_usable,
    "close is idempotent": _close_is_idempotent,
    "observations are bounded": _observations_are_bounded,  # last: it judges the observations of all other checks
}
