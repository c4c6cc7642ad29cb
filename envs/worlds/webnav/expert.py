"""The expert: follows a task's plan and finds the elements that it names on the page, scrolling if necessary."""

import re
from collections.abc import Iterator

from horizonrl.common.errors import EnvironmentFailure
from horizonrl.envs.formats import ActionFormat, write_action
from horizonrl.envs.worlds.webnav.actions import COMMANDS
from horizonrl.envs.worlds.webnav.browser import HOME
from horizonrl.envs.worlds.webnav.task import Click, Home, Task, Type

_NODE = re.compile(
    r"^\t*\[(\d+)\] (link|button|menuitem|textbox) '(.*?)'(?: required: False)?(?: value: .*)?$",
    re.M,
)
_MORE = re.compile(r"^\(\d+ lines below: scroll \[down\]\)$", re.M)
SCROLL = "scroll [down]"


class WebExpert:
    """Starts where the task does, and knows the page only from the observation."""

    def __init__(self, task: Task, action_format: ActionFormat) -> None:
        self._format = action_format
        self._answer = task.answer.value if task.answer else "done"
        self._steps: Iterator[Click | Type | Home] = iter(task.plan)
        self._step = next(self._steps, None)

    def act(self, observation: str) -> str:
        """Return the reply that takes the plan's next step."""
        action, thought = self._choose(observation)
        if action != SCROLL:
            self._step = next(self._steps, None)
        return write_action(action, thought, self._format, COMMANDS)

    def _choose(self, observation: str) -> tuple[str, str]:
        match self._step:
            case None:
                return f"stop [{self._answer}]", "The task is done."
            case Home():
                return f"goto [{HOME}]", "I need another site."
            case Click(name):
                number = _find(observation, name, textbox=False)
                return (
                    (f"click [{number}]", f"I click {name}.")
                    if number
                    else self._scroll(observation, name)
                )
            case Type(name, words, enter):
                number = _find(observation, name, textbox=True)
                action = f"type [{number}] [{words}] [{int(enter)}]"
                return (action, f"I fill in {name}.") if number else self._scroll(observation, name)

    def _scroll(self, observation: str, name: str) -> tuple[str, str]:
        if not _MORE.search(observation):
            raise EnvironmentFailure(
                f"the expert finds no {name!r} on the page: let it play from the task's begin"
            )
        return SCROLL, f"I look for {name}."


def _find(observation: str, name: str, *, textbox: bool) -> str | None:
    """Return the number of the first element of this name that can be clicked, or that can be filled in."""
    for number, role, label in _NODE.findall(observation):
        if label == name and (role == "textbox") == textbox:
            return str(number)
    return None
