"""Programs and graders that the tests run, as a user would write them."""

import itertools
import json
import os
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def ask(messages: list[dict[str, Any]]) -> str:
    """Call the model with the standard library alone: clients take a second to import."""
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps({"messages": messages}).encode(),
        {
            "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def solve(task: dict[str, Any]) -> str:
    return ask([{"role": "user", "content": task["question"]}])


async def solve_later(task: dict[str, Any]) -> str:
    return solve(task)


def grade(task: dict[str, Any], answer: str | None) -> float:
    return float(answer == task["answer"])


def half(task: dict[str, Any], answer: str | None) -> dict[str, Any]:
    return {"reward": 0.5, "success": True}


def nonsense(task: dict[str, Any], answer: str | None) -> str:
    return "good"


def crash(task: dict[str, Any]) -> None:
    solve(task)
    raise RuntimeError("the kitchen is on fire")


def unwritable(task: dict[str, Any]) -> object:
    solve(task)
    return object()


def hang(task: dict[str, Any]) -> None:
    solve(task)
    time.sleep(600)


def silent(task: dict[str, Any]) -> None: ...


def endless(task: dict[str, Any]) -> None:
    while True:
        solve(task)


def writes(task: dict[str, Any]) -> None:
    solve(task)
    Path("reward.json").write_text('{"reward": 0.25}')


def looks(task: dict[str, Any]) -> list[Any]:
    solve(task)
    return [dict(os.environ), os.getcwd(), sorted(os.listdir()), task]


def listed() -> list[dict[str, Any]]:
    return [{"id": 1, "question": "1 + 1"}, {"id": "b", "split": "test", "category": "hard"}]


def for_ever() -> Iterator[dict[str, Any]]:
    yield from ({"id": number} for number in itertools.count())


if __name__ == "__main__":
    print("thinking")
    print(solve(json.loads(Path(os.environ["TASK_FILE"]).read_text())))
    sys.exit(int(os.environ.get("CODE", "0")))
