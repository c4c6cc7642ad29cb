"""Any program as an environment (docs/bring-your-own-agent.md).

A command or a Python function plays one task in a process of its own. It calls the policy as any OpenAI client does; a
grader says what the result is worth. What the program does between its calls is its own business.
"""

import asyncio
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, validate_call

from horizonrl.common.errors import (
    ConfigError,
    EnvironmentFailure,
    EnvironmentTimeout,
    did_you_mean,
)
from horizonrl.common.scratch import scratch
from horizonrl.envs.api import Endpoint, Outcome, Split, TaskSpec
from horizonrl.envs.program.files import LARGEST_BYTES, read_regular, write_new
from horizonrl.envs.program.function import ANSWER, VERDICT
from horizonrl.envs.program.functions import absolute, load_function, require_function
from horizonrl.envs.program.process import Ended, Limits, clean_environment, run_program
from horizonrl.envs.program.warm import Function, run_function

EXAMPLE = (
    'options = { program = "agent.py:solve", tasks = "tasks.jsonl", grader = "agent.py:grade" }'
)
GRADE_S = 120.0
MOST_TASKS = 1_000_000
TASK, OUTPUT = "task.json", "output.txt"
Command = Annotated[tuple[str, ...], Field(min_length=1)]


class TaskFields(BaseModel):
    """What a task's JSON object says to HorizonRL; the rest is the program's."""

    model_config = ConfigDict(frozen=True, extra="allow")

    id: Annotated[str, Field(min_length=1, max_length=256, coerce_numbers_to_str=True)]
    split: Split = "train"
    category: Annotated[str, Field(min_length=1)] = "program"


class Verdict(BaseModel):
    """What a grader says; a number alone is the reward."""

    model_config = ConfigDict(frozen=True)

    reward: Annotated[float, Field(ge=-1e9, le=1e9, allow_inf_nan=False)]
    success: bool | None = None
    """None: whether the reward is at least 1."""


class ProgramEnvironment:
    """One run of a program.

    program: a command as a list, or a Python function (`module:function`, `file.py:function`) that gets the task
    tasks: a file with one JSON object per line, or a function that returns them; keys `id`, `split`, `category`
    grader: a function that gets the task and the answer, a command, or the name of a JSON file that the program writes
    hidden: keys of a task that the grader gets, and the program does not
    timeout_s: the longest run; timeout_truncates: grade a run that takes longer instead of calling it broken
    memory_mib: the most private memory that a process may ask for
    environment: further environment variables of the program
    """

    env_id: ClassVar[str] = "program"
    version: str = "1"

    @validate_call
    def __init__(
        self,
        *,
        program: Command | str | None = None,
        tasks: str | None = None,
        grader: Command | str = "reward.json",
        hidden: tuple[str, ...] = (),
        timeout_s: Annotated[float, Field(gt=0)] = 600.0,
        timeout_truncates: bool = False,
        memory_mib: Annotated[int, Field(ge=64)] = 8192,
        environment: dict[str, str] | None = None,
    ) -> None:
        if program is None:
            raise ConfigError(f"which program? For example: {EXAMPLE}")
        _require_functions(program, grader)
        listed = load_tasks(tasks)
        listed.require_keys(hidden)
        # Without the folders, which differ between machines and between a recipe and what a run has recorded.
        names = [_without_folder(program), _without_folder(grader)]
        parts = [listed.digest, *names, *([hidden] if hidden else [])]
        digest = sha256(json.dumps(parts, sort_keys=True).encode())
        self.version = f"{self.version} sha256:{digest.hexdigest()[:16]}"
        self._tasks = listed.tasks
        self._variables = environment or {}
        self._play = self._runnable("play", program)
        self._prints = not isinstance(program, str)
        """A command's answer is what it prints."""
        self._grader = grader
        self._hidden = hidden
        self._limits = Limits(timeout_s, memory_mib << 20)
        self._timeout_truncates = timeout_truncates
        self._held = ExitStack()
        self._task: dict[str, Any] = {}
        self._directory: Path | None = None
        self._truncated = False

    @classmethod
    @validate_call
    def tasks(
        cls,
        *,
        tasks: str | None = None,
        program: Command | str | None = None,
        grader: Command | str = "reward.json",
        hidden: tuple[str, ...] = (),
    ) -> Sequence[TaskSpec]:
        """Return the tasks of the file or function, in its order. Raises ConfigError also for what plays or grades."""
        _require_functions(program, grader)
        load_tasks(tasks).require_keys(hidden)
        fields = (TaskFields.model_validate(task) for task in load_tasks(tasks).tasks.values())
        return [TaskSpec(field.id, field.split, field.category) for field in fields]

    async def drive(self, task_id: str, endpoint: Endpoint) -> None:
        """Play the task to the program's own end; cancelling this kills the program."""
        if task_id not in self._tasks:
            raise ConfigError(
                f"{self.env_id} ({self.version}) has no task {task_id!r}: every machine reads the same"
            )
        self._task = self._tasks[task_id]
        shown = {key: value for key, value in self._task.items() if key not in self._hidden}
        directory = self._directory = self._scratch()
        write_new(directory / TASK, json.dumps(shown))
        model = {
            "OPENAI_BASE_URL": endpoint.base_url,
            "OPENAI_API_KEY": endpoint.key,
            "ANTHROPIC_BASE_URL": endpoint.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": endpoint.key,
        }
        try:
            ended = await self._run(self._play, directory, model, self._limits)
        except EnvironmentTimeout:
            if not self._timeout_truncates:
                raise
            self._truncated = True
            return
        if ended.code:
            raise EnvironmentFailure(f"the program {await _end(ended)}")

    async def grade(self, finished: bool) -> Outcome:
        """Return what the run is worth. One that was cut may have left nothing to grade: a reward of 0.

        Raises EnvironmentFailure when the grader fails.
        """
        if self._directory is None:
            raise EnvironmentFailure("the program has not been run")
        verdict = await self._verdict(self._directory, finished and not self._truncated)
        success = verdict.reward >= 1.0 if verdict.success is None else verdict.success
        return Outcome(verdict.reward, success, self._truncated)

    async def rehearse(self, task_id: str) -> str:
        """Return what the grader makes of an episode without an answer, once the program is known to start.

        Raises ConfigError or EnvironmentFailure.
        """
        self._task, self._directory = self._tasks[task_id], self._scratch()
        if isinstance(self._play, Function):
            argv = replace(self._play, what="import").command()
            environment = clean_environment(self._directory) | self._variables
            ended = await run_program(
                argv, self._directory, environment, self._directory / OUTPUT, self._limits
            )
            if ended.code:
                raise EnvironmentFailure(f"importing the program {await _end(ended)}")
        elif shutil.which(self._play[0], path=clean_environment(self._directory)["PATH"]) is None:
            raise ConfigError(f"there is no command {self._play[0]!r} on this machine")
        outcome = await self.grade(finished=False)
        return f"reward {outcome.reward:g} without an answer"

    async def close(self) -> None:
        await asyncio.to_thread(self._held.close)  # a program may leave a thousand files

    async def _verdict(self, directory: Path, finished: bool) -> Verdict:
        if isinstance(self._grader, str) and ":" not in self._grader:
            text = await asyncio.to_thread(read_regular, directory / self._grader)
            if text is None and not finished:
                return Verdict(reward=0.0)
            if text is None:
                raise EnvironmentFailure(
                    f"there is no verdict: the program has not written {self._grader}"
                )
            return _parse_verdict(text, f"{self._grader}, which the program writes,")
        court = await asyncio.to_thread(self._court, directory)
        limits = Limits(GRADE_S, self._limits.memory_bytes)
        more = {"ANSWER_FILE": str(court / ANSWER), "PROGRAM_DIRECTORY": str(directory)}
        ended = await self._run(self._runnable("grade", self._grader), court, more, limits)
        if ended.code:
            raise EnvironmentFailure(f"the grader {await _end(ended)}")
        if isinstance(self._grader, str):
            text = await asyncio.to_thread(read_regular, court / VERDICT)
            return _parse_verdict(text or "", "the grader")
        words = await asyncio.to_thread(ended.last_words)
        return _parse_verdict(words.rpartition("\n")[2], "the last line of the grader")

    def _court(self, directory: Path) -> Path:
        """Return a new directory for the grader, with the whole task and the answer. The program has ended."""
        if self._prints:
            answer = json.dumps(read_regular(directory / OUTPUT, tail_bytes=LARGEST_BYTES) or "")
        else:
            answer = read_regular(directory / ANSWER) or "null"
        court = self._scratch()
        write_new(court / TASK, json.dumps(self._task))
        write_new(court / ANSWER, answer)
        return court

    def _scratch(self) -> Path:
        return self._held.enter_context(scratch()).resolve()

    async def _run(
        self,
        what: Command | Function,
        directory: Path,
        more: Mapping[str, str],
        limits: Limits,
    ) -> Ended:
        output = directory / OUTPUT
        task = {"TASK_FILE": str(directory / TASK)}
        environment = clean_environment(directory) | self._variables | task | dict(more)
        if isinstance(what, Function):
            return await run_function(what, directory, environment, output, limits)
        return await run_program(what, directory, environment, output, limits)

    def _runnable(self, what: str, command: Command | str) -> Command | Function:
        if isinstance(command, str):
            return Function(what, absolute(command), tuple(sorted(self._variables.items())))
        return _with_whole_paths(command)


def _without_folder(command: Command | str) -> list[str] | str:
    if isinstance(command, str):
        source, colon, function = command.rpartition(":")
        return f"{Path(source).name}{colon}{function}" if source.endswith(".py") else command
    return [Path(word).name if os.path.isfile(word) else word for word in command]


def _with_whole_paths(command: Command) -> Command:
    """Give arguments that name a file their whole path: programs run in another directory."""
    # Absolute, not resolved: the `python` of a virtual environment is a link to one that has none of its packages.
    # `os.path.isfile`, since `Path.is_file` raises for a word that is too long for a name.
    return tuple(str(Path(word).absolute()) if os.path.isfile(word) else word for word in command)


async def _end(ended: Ended) -> str:
    words = await asyncio.to_thread(ended.last_words)
    return f"ended with exit code {ended.code}: {words[-800:]}"


def _parse_verdict(text: str, whose: str) -> Verdict:
    try:
        value = json.loads(text)
        # True and False are verdicts too: 1 and 0.
        return (
            Verdict(reward=value)
            if isinstance(value, int | float)
            else Verdict.model_validate(value)
        )
    except (ValueError, RecursionError):
        wanted = 'a number up to a billion, or {"reward": 0.5, "success": true}'
        raise EnvironmentFailure(
            f"{whose} says {text[:200]!r}, which is no verdict: write {wanted}"
        ) from None


def _require_functions(program: Command | str | None, grader: Command | str) -> None:
    """Raise ConfigError if a function that plays or grades is not there, or takes other arguments."""
    if isinstance(program, str):
        require_function(absolute(program), 1)
    if isinstance(grader, str) and ":" in grader:
        require_function(absolute(grader), 2)


class TaskList(BaseModel):
    model_config = ConfigDict(frozen=True)

    tasks: dict[str, dict[str, Any]]
    digest: str

    def require_keys(self, keys: Iterable[str]) -> None:
        """Raise ConfigError for a key that no task has."""
        fields = {key for task in self.tasks.values() for key in task}
        for key in keys:
            if key not in fields:
                raise ConfigError(f"hidden: no task has the key {key!r}{did_you_mean(key, fields)}")


@cache
def load_tasks(source: str | None) -> TaskList:
    """Return the tasks by id; read once per process. Raises ConfigError."""
    if source is None:
        raise ConfigError(f"which tasks? For example: {EXAMPLE}")
    listed = load_function(absolute(source))() if ":" in source else _lines(Path(source))
    tasks: dict[str, dict[str, Any]] = {}
    for number, task in enumerate(listed, 1):
        if number > MOST_TASKS:
            raise ConfigError(f"{source} lists more than {MOST_TASKS:,} tasks: does it end?")
        try:
            fields = TaskFields.model_validate(task)
        except ValidationError as error:
            wrong = error.errors()[0]
            raise ConfigError(
                f"{source}, task {number}: {'.'.join(map(str, wrong['loc']))}: {wrong['msg']}"
            ) from None
        if fields.id in tasks:
            raise ConfigError(f"{source}, task {number}: the id {fields.id!r} is taken")
        tasks[fields.id] = TypeAdapter(dict[str, Any]).validate_python(task)
    if not tasks:
        raise ConfigError(f"{source} holds no task")
    return TaskList(
        tasks=tasks,
        digest=sha256(json.dumps(list(tasks.values()), sort_keys=True).encode()).hexdigest(),
    )


def _lines(file: Path) -> list[Any]:
    if not file.is_file():
        raise ConfigError(f"no tasks at {file}: a relative path starts at {Path.cwd()}")
    try:
        return [
            json.loads(line)
            for line in file.read_text(encoding="utf-8").split("\n")
            if line.strip()
        ]
    except ValueError as error:
        raise ConfigError(f"{file} is no file with one JSON object per line: {error}") from None
