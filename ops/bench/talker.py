"""The programs and the environment of `horizonrl bench gateway`: both say the same things to the model."""

import json
import os
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from horizonrl.envs.api import Observation, Step, TaskSpec

TALKERS, CALLS = 32, 4
READY, GO = "READY_FOLDER", "GO_FILE"
"""Variables of a program: where it says that it is up, and the file that it waits for."""


def text(talker: int, call: int) -> str:
    return f"Talker {talker}, question {call}: name {call + 2} things that you would take on a journey, and say why."


def talks() -> list[dict[str, Any]]:
    return [{"id": f"talk-{number}", "number": number} for number in range(TALKERS)]


def talk(task: dict[str, Any]) -> None:
    """Hold one conversation, with the standard library's client: it starts in no time."""
    number, messages = task["number"], []
    Path(os.environ[READY], str(number)).touch()
    go = Path(os.environ[GO])
    while not go.exists():
        time.sleep(0.005)
    for call in range(CALLS):
        messages.append({"role": "user", "content": text(number, call)})
        request = urllib.request.Request(
            f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
            json.dumps({"messages": messages}).encode(),
            {
                "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
                "Content-Type": "application/json",
            },
        )
        with urllib.request.urlopen(request) as answer:
            messages.append(json.load(answer)["choices"][0]["message"])
    # A grader would start next to programs that are still timed.
    Path("reward.json").write_text("1", encoding="utf-8")


class Talk:
    """The same conversation as an environment."""

    env_id: ClassVar[str] = "talk"
    version: str = "1"

    def __init__(self) -> None:
        self._number = self._call = 0

    @classmethod
    def tasks(cls) -> Sequence[TaskSpec]:
        return [TaskSpec(task["id"], "train", "talk") for task in talks()]

    async def reset(self, task_id: str) -> Observation:
        self._number, self._call = int(task_id.removeprefix("talk-")), 0
        return Observation(text(self._number, 0))

    async def step(self, reply: str) -> Step:
        self._call += 1
        return Step(text(self._number, self._call), reward=0.0, terminated=self._call == CALLS)

    async def close(self) -> None: ...
