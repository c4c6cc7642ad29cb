"""Tool use: weather, movie, academia, sheet and todo. The reward is the share of the sub-goals reached.

The sub-goals are the calls that reveal the answer, or the fields of the store that have to change, and last the right
end: `finish` with the right answer or with the right store. That end is the success and earns the rest of the reward.
"""

import json
import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

from horizonrl.common.texts import read_object
from horizonrl.envs.api import Step, TaskSpec, ToolCall
from horizonrl.envs.formats import Unreadable, bound_length, write_value
from horizonrl.envs.game import GameEnvironment, Move, random_for, refuse_move
from horizonrl.envs.splits import lowest_hashes, split_tasks
from horizonrl.envs.text_limits import clip
from horizonrl.envs.worlds.tools.domains import ACADEMIA, MOVIE, SHEET, TODO, WEATHER
from horizonrl.envs.worlds.tools.toolbox import Call, Domain, Problem, Store, ToolError

_TRIAL = """\
Now new trial starts.
You should perform actions to accomplish the goal: {goal}
Give me one action."""
_CALL = re.compile(r"(\w+)(?:\s+with\s+Action\s+Input\s*:)?\s*(\{.*\})?", re.IGNORECASE)


class Errand:
    """One problem, until `finish`."""

    def __init__(self, problem: Problem, domain: Domain) -> None:
        self._problem = problem
        self._tools = {tool.name: tool for tool in domain.tools}
        self._store = deepcopy(problem.store)
        self._wanted = deepcopy(problem.store)
        # The solution's calls only define the goal: any others that lead to the same store are as good.
        for wanted in problem.calls:
            self._tools[wanted.tool].call(self._wanted, wanted.arguments)
        self._changes = _changes(problem.store, self._wanted)
        self._made: list[Call] = []
        self._paid = 0.0

    def follow(self, action: str) -> Step:
        """Run a tool, or judge the end."""
        match = _CALL.fullmatch(action.strip())
        arguments = _arguments(match[2]) if match else None
        if match is None or arguments is None:
            return refuse_move(
                'Write a tool and its arguments as JSON, such as finish {"answer": "12"}.'
            )
        if match[1].lower() == "check_valid_actions":
            return refuse_move(f"You can use following valid actions: {self._list_tools()}")
        if match[1].lower() == "finish":
            return self._finish(arguments.get("answer", ""))
        tool = self._tools.get(match[1].lower())
        if tool is None:
            return refuse_move(
                f"There is no tool {clip(match[1])!r}. There are: {', '.join(self._tools)}, finish."
            )
        if set(arguments) != set(tool.arguments):
            return refuse_move(
                f"The arguments of {tool.name} are: {', '.join(tool.arguments) or 'none'}."
            )
        try:
            observation = tool.call(self._store, arguments)
        except ToolError as error:
            return refuse_move(f"Error: {error}.")
        self._made.append(Call(tool.name, arguments))
        return Step(observation, reward=self._pay(self._share()), terminated=False)

    def _list_tools(self) -> str:
        return ", ".join(
            [
                *(f"{tool.name}({', '.join(tool.arguments)})" for tool in self._tools.values()),
                "finish(answer)",
            ]
        )

    def _finish(self, answer: str) -> Step:
        right = (
            _plain(answer) == _plain(self._problem.answer)
            if self._problem.answer
            else self._store == self._wanted
        )
        reward = self._pay(1.0 if right else self._share())
        return Step("Right." if right else "Wrong.", reward=reward, terminated=True, success=right)

    def _share(self) -> float:
        """Return the share of the sub-goals that are reached now. The right end counts as not reached."""
        if self._problem.answer:
            reached = [wanted in self._made for wanted in self._problem.calls]
        else:
            reached = [
                self._store.get(key, {}).get(field) == value for key, field, value in self._changes
            ]
        return sum(reached) / (len(reached) + 1)

    def _pay(self, share: float) -> float:
        """Return the increase over the best share so far, so that all rewards add up to the best share."""
        earned = max(0.0, share - self._paid)
        self._paid += earned
        return earned

    def advise(self) -> Move:
        """Make the calls that are not made yet, then finish."""
        for wanted in self._problem.calls:
            if wanted not in self._made:
                return Move(
                    f"{wanted.tool} {json.dumps(wanted.arguments)}", f"I need {wanted.tool}."
                )
        answer = self._problem.answer or "done"
        return Move(f"finish {json.dumps({'answer': answer})}", "That is all.")


class AgentGymErrand(Errand):
    """One problem, answered in AgentGym's words."""

    def follow(self, action: str) -> Step:
        """Run a tool, or judge the end."""
        step = super().follow(action)
        return replace(step, observation=f"Observation: {step.observation}\nGive me one action.")


class ToolEnvironment(GameEnvironment[Errand]):
    """One problem at a time.

    format: how the agent names its action (envs/formats.py); `function` suits tools best
    style: `compact` omits the meanings of the tools
    max_observation_chars: bound of every observation
    """

    domain: ClassVar[Domain]
    version = "1"

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        cls.commands = cls.domain.commands

    @classmethod
    def tasks(cls) -> Sequence[TaskSpec]:
        """Return the environment's problems, in alternating categories."""
        return tuple(_tasks(cls.env_id, cls.domain).values())

    def read_call(self, call: ToolCall) -> str | Unreadable:
        """Return the tool's name and its arguments, in which quotes stay what they are."""
        action = super().read_call(call)
        if isinstance(action, Unreadable):
            return action
        return bound_length(
            f"{call.name} {json.dumps(json.loads(call.arguments or '{}'), ensure_ascii=False)}"
        )

    def begin(self, task_id: str) -> tuple[str, Errand]:
        """Return the goal."""
        task = self.find(_tasks(self.env_id, self.domain), task_id)
        problem = self.domain.make(task.category, random_for(task_id))
        if self._style == "agentgym":
            return _TRIAL.format(goal=problem.goal), AgentGymErrand(problem, self.domain)
        rules = "Reach a goal with tools; call one a turn."
        return self.introduce(rules, f"Goal: {problem.goal}"), Errand(problem, self.domain)


class Weather(ToolEnvironment):
    env_id, domain = "weather", WEATHER


class Movie(ToolEnvironment):
    env_id, domain = "movie", MOVIE


class Academia(ToolEnvironment):
    env_id, domain = "academia", ACADEMIA


class Sheet(ToolEnvironment):
    env_id, domain = "sheet", SHEET


class Todo(ToolEnvironment):
    env_id, domain = "todo", TODO


@cache
def _tasks(env_id: str, domain: Domain) -> dict[str, TaskSpec]:
    count, kinds = domain.train + domain.test, domain.categories
    categories = {f"{env_id}-{number:03d}": kinds[number % len(kinds)] for number in range(count)}
    test = lowest_hashes(categories, domain.test)
    return {task.task_id: task for task in split_tasks(categories, test)}


def _arguments(text: str | None) -> dict[str, str] | None:
    """Return a call's arguments as texts, or None if they are not a JSON object of texts and numbers."""
    if (parsed := read_object(text or "{}")) is None:
        return None
    arguments = {name: write_value(value) for name, value in parsed.items()}
    texts = {name: text for name, text in arguments.items() if text is not None}
    return texts if len(texts) == len(arguments) else None


def _changes(before: Store, after: Store) -> list[tuple[str, str, str | None]]:
    """Return (key, field, value) of every field that differs. The value is None if the row is gone."""
    keys = dict.fromkeys([*before, *after])
    fields = [
        (key, field)
        for key in keys
        for field in dict.fromkeys([*before.get(key, {}), *after.get(key, {})])
    ]
    return [
        (key, field, after.get(key, {}).get(field))
        for key, field in fields
        if before.get(key, {}).get(field) != after.get(key, {}).get(field)
    ]


def _plain(answer: str) -> str:
    return " ".join(answer.lower().split()).strip(" .'\"")
