"""The conformance test of an environment: it plays real episodes and checks what the rest of the system relies on.

`horizonrl envs check ID` prints the report, and `tests/contracts/test_environment.py` runs it for every registered
environment. An environment that passes is ready for training. A failed check names the line of the environment's code
and the text that caused the failure.
"""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from threading import Timer
from typing import Any, TypeVar

from horizonrl.common.errors import ConfigError, EnvironmentFailure, HorizonError
from horizonrl.envs import registry
from horizonrl.envs.api import Environment, Reply, Split, TaskSpec, tool_user
from horizonrl.envs.contract import MAX_ANSWER_CHARS
from horizonrl.envs.odd_texts import odd_calls, odd_texts
from horizonrl.envs.subject import Subject, Violation, show

TASKS_TRIED = 20
CHECK_S = 120.0
"""Time limit of one check."""
BLOCKED_S = 10.0
"""Longer than its limit, a check takes only if a call blocks the event loop: then the process ends with its stack."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    passed: bool
    detail: str
    """What was measured, or why the check failed."""
    source: str = ""
    """If the check failed: `file:line, function` in the environment's code."""
    last_call: str = ""
    """If the check failed: the last call before the failure, with its text."""
    skipped: bool = False
    """Whether there was nothing to try; `detail` has the reason."""


@dataclass(frozen=True, slots=True)
class CheckReport:
    env_id: str
    version: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


Trial = Callable[[Subject], Awaitable[str]]
"""One check. It returns what it measured, or raises Violation, Skipped or whatever the environment raised."""


class Skipped(Exception):
    """There is nothing to try, for the reason that the message has."""


async def check(
    env_id: str, options: Mapping[str, Any] | None = None, task_ids: Sequence[str] | None = None
) -> CheckReport:
    """Run every check, by default on up to TASKS_TRIED tasks spread evenly over the list.

    Raises ConfigError or MissingDependency if the environment cannot be created at all.
    """
    with registry.attributed(env_id, "cannot be created and closed"):
        environment = registry.make(env_id, options)
        await environment.close()
    listed = registry.tasks(env_id, options)
    if registry.drives_itself(env_id):
        rehearsed = await _rehearse(env_id, options, listed[0].task_id)
        tasks = Check("its tasks are listed", True, _counted(listed))
        return CheckReport(env_id, environment.version, (tasks, *rehearsed))
    spread = [task.task_id for task in listed[:: max(1, len(listed) // TASKS_TRIED)]][:TASKS_TRIED]
    subject = Subject(env_id, options or {}, task_ids or spread)
    checks: list[Check] = []
    for name, trial in TRIALS.items():
        checks.append(await _try(name, trial, subject))
        # Each of the others would wait as long, or has no task to try.
        if subject.is_hung or not (checks[-1].passed or subject.task_ids):
            checks.append(Check("the other checks", False, "not tried: mend this first"))
            break
    return CheckReport(env_id, environment.version, tuple(checks))


async def _rehearse(env_id: str, options: Mapping[str, Any] | None, task_id: str) -> list[Check]:
    """Check what can be checked of an environment that drives itself without a model."""
    environment = registry.make(env_id, options)
    rehearse = getattr(environment, "rehearse", None)
    if rehearse is None:
        return []
    name = "its program starts, and its grader judges an episode without an answer"
    try:
        return [Check(name, True, await rehearse(task_id))]
    except HorizonError as error:
        return [Check(name, False, str(error))]
    finally:
        await environment.close()


async def _try(name: str, trial: Trial, subject: Subject) -> Check:
    subject.last_call = ""
    limit = asyncio.timeout(CHECK_S)
    try:
        async with limit, _watched(subject):
            return Check(name, True, await _without_exit(trial(subject)))
    except Skipped as reason:
        return Check(name, True, str(reason), skipped=True)
    except Violation as violation:
        detail, source = str(violation), subject.locate(violation.method)
    except Exception as error:  # noqa: BLE001 - the boundary: whatever an environment raises is the finding
        # Our own limit, and not a TimeoutError that the environment raised.
        subject.is_hung = limit.expired()
        detail = (
            f"took longer than {CHECK_S:.0f} s"
            if subject.is_hung
            else f"{type(error).__name__}: {error}"
        )
        source = subject.raised_at(error)
    finally:
        await subject.close()
    return Check(name, False, detail, source, subject.last_call)


@asynccontextmanager
async def _watched(subject: Subject) -> AsyncIterator[None]:
    """End the process, with the line at which it stands, if a call blocks the event loop in the body."""
    # With a web server, which nothing else here needs.
    from horizonrl.common.service import end_process

    reason = f"{subject.env_id} blocks the event loop for more than {CHECK_S + BLOCKED_S:.0f} s: await what takes long"
    timer = Timer(
        CHECK_S + BLOCKED_S, end_process, ("environment_stuck", reason, threading.main_thread())
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


async def _without_exit(call: Awaitable[T]) -> T:
    """Await a call. An environment that exits is a finding, and must not end the check before it is reported."""
    try:
        return await call
    except SystemExit as error:
        raise RuntimeError(f"{error!r} would end the actor").with_traceback(
            error.__traceback__
        ) from None


async def _its_id_is_its_entry_points(subject: Subject) -> str:
    environment = registry.load(subject.env_id)
    declared = getattr(environment, "env_id", None)
    if declared != subject.env_id:
        raise Violation(
            f"{environment.__name__}.env_id is {declared!r}, and its entry point is {subject.env_id!r}",
            "class",
        )
    return subject.env_id


async def _tasks_are_listed(subject: Subject) -> str:
    first, second = (list(registry.tasks(subject.env_id, subject.options)) for _ in range(2))
    if first != second:
        differing = next(
            (pair for pair in zip(first, second, strict=False) if pair[0] != pair[1]), None
        )
        raise Violation(
            f"two listings differ: {len(first)} and {len(second)} tasks, the first difference is {differing}",
            "tasks",
        )
    splits: dict[str, list[Split]] = {}
    for task in first:
        splits.setdefault(task.task_id, []).append(task.split)
    if not first or len(splits) < len(first):
        repeated = [
            f"{task_id!r} ({', '.join(named)})"
            for task_id, named in splits.items()
            if len(named) > 1
        ]
        raise Violation(
            f"{len(first)} tasks with {len(splits)} different ids; repeated: "
            f"{', '.join(repeated[:3]) or 'none'}",
            "tasks",
        )
    return _counted(first)


def _counted(tasks: Sequence[TaskSpec]) -> str:
    """Say how many tasks each split has, and what follows without one to choose by."""
    counts = Counter(task.split for task in tasks)
    by_split = ", ".join(f"{counts[split]} {split}" for split in registry.SPLITS)
    remark = "" if counts["validation"] else "; without validation, eval.split has to be test"
    return f"{len(tasks)} tasks: {by_split}{remark}"


async def _unknown_task_is_refused(subject: Subject) -> str:
    environment = subject.make()
    try:
        await subject.reset(environment, "no such task \N{SNOWMAN}")
    except ConfigError as error:
        return str(error)
    raise Violation("reset of a task that does not exist raised no ConfigError", "reset")


async def _expert_solves(subject: Subject) -> str:
    if not subject.has_expert:
        raise Skipped("without an expert, nothing here shows that the tasks can be solved")
    environment, turns = subject.make(), []
    for task_id in subject.task_ids:
        await subject.reset(environment, task_id)
        if subject.expert(environment) is None:
            continue
        _, steps = await subject.play(environment, task_id)
        # A success without a reward is a task from which RL learns nothing.
        if not (steps[-1].success and sum(step.reward for step in steps) > 0):
            raise Violation(
                f"the expert ended task {task_id!r} after {len(steps)} turns without success; the last observation: "
                f"{show(steps[-1].observation)}"
            )
        turns.append(len(steps))
    if not turns:
        raise Violation(
            f"expert() raised EnvironmentFailure after the reset of each of {len(subject.task_ids)} tasks",
            "expert",
        )
    mean_ms = 1e3 * sum(subject.step_times_s) / len(subject.step_times_s)
    without = len(subject.task_ids) - len(turns)
    without_expert = f"; {without} have no expert" if without else ""
    turns_mean = sum(turns) / len(turns)
    return f"{len(turns)} tasks in {turns_mean:.1f} turns on average, {mean_ms:.3f} ms per step{without_expert}"


async def _episodes_repeat(subject: Subject) -> str:
    # Advantages compare the episodes of one task: instances that differ would add noise to every baseline.
    one, other = subject.make(), subject.make()
    for task_id in subject.task_ids:
        (first, steps), (again, repeated) = [
            await subject.play(environment, task_id) for environment in (one, other)
        ]
        if first != again:
            raise Violation(
                f"task {task_id!r} begins with {show(first)} in one instance and with {show(again)} in another",
                "reset",
            )
        for turn, (step, repeat) in enumerate(zip(steps, repeated, strict=False), 1):
            if step != repeat:
                raise Violation(
                    f"in turn {turn} of task {task_id!r} two instances answer the same reply with {step} and {repeat}"
                )
        if len(steps) != len(repeated):
            raise Violation(
                f"task {task_id!r} took {len(steps)} turns in one instance and {len(repeated)} in another"
            )
    return f"{len(subject.task_ids)} tasks, twice"


async def _an_episode_ends_once(subject: Subject) -> str:
    environment = subject.make()
    await _expect_failure(subject, environment, "before the first reset")
    _, steps = await subject.play(environment, subject.task_ids[0])
    ended = bool(steps) and (steps[-1].terminated or steps[-1].truncated)
    if ended:
        await _expect_failure(subject, environment, "after the end")
    if not ended:
        return "a step before reset is refused; no episode ended here, so a step after the end was not tried"
    return "a step before reset or after the end is refused"


async def _expect_failure(subject: Subject, environment: Environment, when: str) -> None:
    try:
        step = await subject.step(environment, "look")
    except EnvironmentFailure:
        return
    raise Violation(
        f"a step {when} raised no EnvironmentFailure, but was answered: {show(step.observation)}"
    )


async def _no_text_breaks_it(subject: Subject) -> str:
    environment = subject.make()
    for task_id in subject.task_ids[:3]:
        observation = await subject.reset(environment, task_id)
        sensible = subject.ask_expert(environment, observation)
        texts = odd_texts(sensible.text)
        replies = [Reply(text) for text in texts]
        if (user := tool_user(environment)) is not None:
            replies += [Reply("", (call,)) for call in odd_calls(user.tools(), sensible.calls)]
        for reply in replies:
            step = await subject.answer(environment, reply)
            if step.terminated or step.truncated:
                await subject.reset(environment, task_id)
    return f"{len(replies)} odd replies"


async def _a_cancelled_step_leaves_it_usable(subject: Subject) -> str:
    environment, task_id = subject.make(), subject.task_ids[0]
    first = await subject.reset(environment, task_id)
    expert = subject.expert(environment)
    step = asyncio.ensure_future(
        _without_exit(subject.answer(environment, subject.ask_expert(environment, first)))
    )
    await asyncio.sleep(0)  # Let the step begin, so that it is cancelled at its first wait.
    subject.last_call += ", cancelled"
    # What a rollout does at `step_timeout_s`, and a drained actor at any time.
    step.cancel()
    await asyncio.gather(step, return_exceptions=True)
    if await subject.reset(environment, task_id) != first:
        raise Violation("the reset after a cancelled step began a different episode", "reset")
    _, steps = await subject.play(environment, task_id)
    if expert and not steps[-1].success:
        raise Violation("the expert could not solve the task after a cancelled step and a reset")
    return f"cancelled, reset, {'solved' if expert else 'played'}"


async def _close_is_idempotent(subject: Subject) -> str:
    unused, used = subject.make(), subject.make()
    await subject.reset(used, subject.task_ids[0])
    for environment in (unused, used, unused, used):
        await environment.close()
    return "closed twice, with and without an episode"


async def _observations_are_bounded(subject: Subject) -> str:
    limit = subject.options.get("max_observation_chars", MAX_ANSWER_CHARS)
    if subject.longest_chars > limit:
        raise Violation(
            f"an observation had {subject.longest_chars} characters, after {subject.longest_call}; the limit is {limit}"
        )
    return f"the longest observation had {subject.longest_chars} characters; the limit is {limit}"


async def _steps_have_their_types(subject: Subject) -> str:
    if subject.mistyped:
        raise Violation(f"{subject.mistyped}: records and JSON take str, float, bool and int")
    return f"{len(subject.step_times_s)} steps"


async def _tools_are_described(subject: Subject) -> str:
    environment = subject.make()
    user = tool_user(environment)
    if user is None:
        raise Skipped("it is played in words")
    await subject.reset(environment, subject.task_ids[0])
    tools = user.tools()
    for tool in tools:
        match tool:
            case {
                "type": "function",
                "function": {"name": str(), "parameters": {"type": "object"}},
            }:
                json.dumps(tool)  # the chat template writes it
            case _:
                raise Violation(
                    f"a tool has not the form that chat templates read: {show(str(tool))}", "tools"
                )
    names = [tool["function"]["name"] for tool in tools]
    if not names or len(set(names)) < len(names):
        raise Violation(f"the tools have no different names: {names}", "tools")
    return f"{len(names)} tools"


TRIALS: Mapping[str, Trial] = {
    "its id is that of its entry point": _its_id_is_its_entry_points,
    "tasks are listed in a stable order with unique ids": _tasks_are_listed,
    "an unknown task is a ConfigError": _unknown_task_is_refused,
    "the expert solves the tasks": _expert_solves,
    "a task is the same episode in every instance": _episodes_repeat,
    "an episode ends once": _an_episode_ends_once,
    "its tools are described": _tools_are_described,
    "no text raises": _no_text_breaks_it,
    "a cancelled step leaves it usable": _a_cancelled_step_leaves_it_usable,
    "close is idempotent": _close_is_idempotent,
    # Last, since they judge the steps of all other checks.
    "observations are bounded": _observations_are_bounded,
    "steps have Python's own types": _steps_have_their_types,
}
