"""The expert: follows a task's plan and finds the elements that it names on the page, scrolling if necessary."""

import re
from collections.abc import Iterator

from horizonrl.common.errors import EnvironmentFailure
from horizonrl.envs.game import Move
from horizonrl.envs.worlds.webnav.browser import HOME
from horizonrl.envs.worlds.webnav.task import Home, Task, Type

_NODE = re.compile(
    r"^\t*\[(\d+)\] (link|button|menuitem|textbox) '(.*?)'(?: required: False)?(?: value: .*)?$",
    re.M,
)
_MORE = re.compile(r"^\(\d+ lines below: scroll \[down\]\)$", re.M)
SCROLL = "scroll [down]"


class WebExpert:
    """Starts where the task does, and knows the page only from the observation."""

    def __init__(self, task: Task) -> None:
        self._answer = task.answer.value if task.answer else "done"
        self._steps: Iterator[str | Type | Home] = iter(task.plan)
        self._step = next(self._steps, None)

    def advise(self, observation: str) -> Move:
        """Return the move that takes the plan's next step."""
        move = self._choose(observation)
        if move.action != SCROLL:
            self._step = next(self._steps, None)
        return move

    def _choose(self, observation: str) -> Move:
        match self._step:
            case None:
                return Move(f"stop [{self._answer}]", "The task is done.")
            case Home():
                return Move(f"goto [{HOME}]", "I need another site.")
            case str(name):
                if number := _find(observation, name, textbox=False):
                    return Move(f"click [{number}]", f"I click {name}.")
            case Type(name, words, enter):
                if number := _find(observation, name, textbox=True):
                    action = f"type [{number}] [{words}] [{int(enter)}]"
                    return Move(action, f"I fill in {name}.")
        if not _MORE.search(observation):
            raise EnvironmentFailure(
                f"the expert finds no {name!r} on the page: let it play from the task's begin"
            )
        return Move(SCROLL, f"I look for {name}.")


def _find(observation: str, name: str, *, textbox: bool) -> str | None:
    """Return the number of the first element of this name that can be clicked, or that can be filled in."""
    for number, role, label in _NODE.findall(observation):
        if label == name and (role == "textbox") == textbox:
            return str(number)
    return None
