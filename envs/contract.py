"""What an environment must answer, held wherever one is played: rollouts, servers, and `horizonrl envs check`.

Place in the flow: environment → **Observation, Step**. An answer of another form raises ContractBroken, which says what
the method returned and what it returns by contract. A failure inside an environment is traced to the line of its code.
"""

import inspect
import math
import sys
import traceback
from collections.abc import Awaitable, Iterator
from dataclasses import replace
from numbers import Integral, Real
from pathlib import Path
from traceback import FrameSummary
from typing import Any

from horizonrl.common.errors import ContractBroken
from horizonrl.common.plugins import source_line
from horizonrl.envs.api import Environment, Observation, OffersTools, Step, ToolCall

MAX_ANSWER_CHARS = 1 << 18
"""The longest observation that an episode's record holds."""
FLAGS = ("terminated", "truncated", "success")
DEFECTS = (TypeError, AttributeError, NameError, NotImplementedError)
"""Errors of an environment's code that no retry mends; ContractBroken is one."""
NUMPY_BOOLS = ("bool", "bool_")
"""Names of NumPy's bool, which is no number to `numbers`."""


async def reset(environment: Environment, task_id: str) -> Observation:
    """Begin a task. Raises ContractBroken for an answer that is no Observation."""
    first = await await_answer(environment, "reset", environment.reset(task_id))
    if not isinstance(first, Observation):
        raise _broken(environment, "reset", f"returned {_kind(first)}", "an Observation(text)")
    _check_text(environment, "reset", first.text)
    return first


async def step(environment: Environment, text: str) -> Step:
    """Answer an agent's text. Raises ContractBroken for an answer that is no Step, or whose fields are not."""
    return check_step(
        environment, "step", await await_answer(environment, "step", environment.step(text))
    )


async def call(environment: OffersTools, tool_call: ToolCall) -> Step:
    """Answer an agent's call of a tool. Raises ContractBroken as `step` does."""
    return check_step(
        environment, "call", await await_answer(environment, "call", environment.call(tool_call))
    )


def describe(error: BaseException, environment: object) -> str:
    """Return an error's kind and message, and the line of the environment's code that raised it.

    Of a defect that our code met, such as an answer of another form, the line of the method or the class.
    """
    where = raised_at(error, type(environment).__module__)
    if not where and isinstance(error, DEFECTS):
        where = _defined_at(type(environment), getattr(error, "method", ""))
    at = f" at {where}" if where else ""
    return f"{type(error).__name__}: {error}{at}"


def _defined_at(kind: type, method: str) -> str:
    """Return `FILE:LINE` of a class, or of a method in the module of the class."""
    function = getattr(kind, method, None)
    inherited = getattr(function, "__module__", None) != kind.__module__
    return source_line(kind if inherited or function is None else function) or ""


def raised_at(error: BaseException, module_name: str) -> str:
    """Return `FILE:LINE in FUNCTION` of the innermost frame in a module or its package; empty if there is none.

    What a deadline cancelled is found too: where it waited.
    """
    frame = find_frame(error, module_name)
    return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}" if frame else ""


def find_frame(error: BaseException, module_name: str) -> FrameSummary | None:
    """Return the innermost frame in a module or its package, of an error or of what it came from."""
    module = sys.modules.get(module_name)
    file = getattr(module, "__file__", None)
    if module is None or file is None:
        return None
    source = f"{Path(file).parent}/" if module.__package__ else file
    for link in causes(error):
        frames = traceback.extract_tb(link.__traceback__)
        if inside := [frame for frame in frames if frame.filename.startswith(source)]:
            return inside[-1]
    return None


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what it came from. A timeout comes from the cancellation of what was waited for."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


async def await_answer(environment: object, method: str, answer: Awaitable[Any]) -> Any:
    """Await an answer. Raises ContractBroken for a method without `async`."""
    if not inspect.isawaitable(answer):
        got = f"is no `async def`: it returned {_kind(answer)}, which cannot be awaited"
        raise _broken(environment, method, got)
    return await answer


def require_step(environment: object, method: str, answer: object) -> Step:
    """Return the answer. Raises ContractBroken if it is no Step."""
    if not isinstance(answer, Step):
        form = "a Step(observation, reward, terminated)"
        raise _broken(environment, method, f"returned {_kind(answer)}", form)
    return answer


def check_step(environment: object, method: str, answer: Any) -> Step:
    """Return an answer as a Step of Python's own types. Raises ContractBroken if it is none."""
    step = require_step(environment, method, answer)
    if not isinstance(step.reward, Real):
        raise _broken(
            environment,
            method,
            f"gave a Step whose reward is {_kind(step.reward)}",
            "a float",
        )
    if not math.isfinite(step.reward):
        raise _broken(environment, method, f"gave the reward {step.reward}", "a finite number")
    flags = {name: getattr(step, name) for name in FLAGS}
    for name, value in flags.items():
        if not isinstance(value, (bool, Integral)) and type(value).__name__ not in NUMPY_BOOLS:
            raise _broken(
                environment, method, f"gave a Step whose {name} is {_kind(value)}", "a bool"
            )
    info = {name: _plain(environment, method, name, value) for name, value in step.info.items()}
    _check_text(environment, method, step.observation)
    # NumPy's numbers are taken, and become Python's own: JSON has no others.
    flags = {name: bool(value) for name, value in flags.items()}
    return replace(step, reward=float(step.reward), info=info, **flags)


def _plain(environment: object, method: str, name: str, value: Any) -> str | int | float:
    """Return a value of `info` as one of Python's own types."""
    if isinstance(value, (str, bool)):
        return value
    if not isinstance(value, Real):
        kinds = "a str, int, float or bool"
        raise _broken(environment, method, f"gave info[{name!r}], which is {_kind(value)}", kinds)
    return int(value) if isinstance(value, Integral) else float(value)


def _check_text(environment: object, method: str, text: Any) -> None:
    if not isinstance(text, str):
        raise _broken(environment, method, f"gave an observation that is {_kind(text)}", "a str")
    if len(text) > MAX_ANSWER_CHARS:
        got = f"gave an observation of {len(text):,} characters"
        raise _broken(environment, method, got, f"at most {MAX_ANSWER_CHARS:,}")


def _broken(environment: object, method: str, got: str, expected: str = "") -> ContractBroken:
    contract = f"; by contract it is {expected}" if expected else ""
    error = ContractBroken(f"{type(environment).__name__}.{method} {got}{contract}")
    error.method = method
    return error


def _kind(value: object) -> str:
    kind = type(value)
    name = (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )
    return "None" if value is None else f"a {name}"
