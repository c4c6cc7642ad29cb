"""Runs a function as a program: `python -m horizonrl.envs.program.function WHAT NAME`, in the scratch directory.

    import                                             only its module is imported
    play     function(task) -> answer                  the answer goes to ANSWER
    grade    function(task, answer) -> verdict         the answer is in ANSWER_FILE, the verdict goes to VERDICT

A function may be async. The task is the JSON object in the file that TASK_FILE names.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from horizonrl.envs.program.files import write_new
from horizonrl.envs.program.functions import load_function

ANSWER, VERDICT = "answer.json", "verdict.json"


def main() -> None:
    what, name = sys.argv[1:]
    function = load_function(name)
    if what != "import":
        call(what, function)


def call(what: str, function: Callable[..., Any]) -> None:
    """Let a function play or grade the task in the working directory."""
    task = json.loads(Path(os.environ["TASK_FILE"]).read_text(encoding="utf-8"))
    if what == "play":
        _write(ANSWER, _call(function, task))
    else:
        answer = json.loads(Path(os.environ["ANSWER_FILE"]).read_text(encoding="utf-8"))
        _write(VERDICT, _call(function, task, answer))


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    result = function(*arguments)
    if not hasattr(result, "__await__"):
        return result
    import asyncio  # a third of the time that a synchronous program takes to start

    return asyncio.run(result)


def _write(name: str, value: Any) -> None:
    try:
        text = json.dumps(value)
    except TypeError as error:  # as text, an object would be graded by its address
        raise TypeError(f"return a text, a number, a list or a dict instead: {error}") from None
    # An agent with a shell may have made something of this name.
    with contextlib.suppress(FileNotFoundError):
        Path(name).unlink()
    write_new(Path(name), text)


if __name__ == "__main__":
    main()
