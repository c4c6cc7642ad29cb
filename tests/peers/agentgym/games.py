"""Whole episodes of our experts, with replies in the form that AgentGym's prompts ask for."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from horizonrl.common.errors import EnvironmentFailure
from horizonrl.common.types import MAX_TURNS
from horizonrl.envs import registry
from horizonrl.envs.agentgym.dialects import Dialect
from horizonrl.envs.agentgym.doors import TOOLS, Door, make_door, task_named
from horizonrl.envs.api import Environment, Step, make_expert
from horizonrl.envs.formats import Unreadable

_CALL = re.compile(r"Action: (\w+) (\{.*\})")


@dataclass(frozen=True, slots=True)
class Game:
    """One episode of an expert: its replies, and our environment's answers."""

    number: int
    first: str
    replies: tuple[str, ...]
    answers: tuple[Step, ...]

    @property
    def solved(self) -> bool:
        return self.answers[-1].success


def door(env_id: str) -> Door:
    """Return the door that AgentGym's clients take into an environment of ours."""
    found = make_door(env_id, {})
    if found is None:
        raise EnvironmentFailure(f"AgentGym has no counterpart of {env_id}")
    return found


def make(env_id: str) -> Environment:
    """Return the environment that AgentGym's clients play on our server."""
    return registry.make(env_id, door(env_id).options)


async def play(env_id: str, number: int) -> Game | None:
    """Let the expert play the task with this number; return None if it finds no way.

    That happens where AgentGym's rules differ from the rules that our expert was written for.
    """
    entrance = door(env_id)
    named = task_named(env_id, registry.tasks(env_id, entrance.options))(number)
    if named is None:
        raise EnvironmentFailure(f"{env_id} has no task {number}")
    environment = make(env_id)
    first = observation = (await environment.reset(named)).text
    expert, replies = make_expert(environment), list[str]()
    answers: list[Step] = []
    try:
        while not answers or not (answers[-1].terminated or answers[-1].truncated):
            if len(replies) == MAX_TURNS:
                return None
            replies.append(reply_of(entrance.dialect, expert.act(observation)))
            answers.append(await answer(environment, entrance.dialect, replies[-1]))
            observation = answers[-1].observation
    except EnvironmentFailure:
        return None
    finally:
        await environment.close()
    return Game(number, first, tuple(replies), tuple(answers))


async def answer(environment: Environment, dialect: Dialect, reply: str) -> Step:
    """Return the environment's answer to the part of a reply that AgentGym's client sends."""
    action = dialect.read(reply)
    if isinstance(action, Unreadable):
        return Step(action.reason, reward=0.0, terminated=False)
    return await environment.step(action)


def reply_of(dialect: Dialect, action: str) -> str:
    """Return the reply to AgentGym's prompt that takes an expert's action."""
    return _FORMS.get(dialect.name, _react)(action)


def _react(action: str) -> str:
    return f"Thought:\nThis is the next step.\n\nAction:\n{action}"


def _sql(action: str) -> str:
    return f"Thought: This query answers the question.\n\nAction: ```sql\n{action}\n```"


def _search(action: str) -> str:
    return f"<think>This is the next step.</think>{action}"


def _web(action: str) -> str:
    return f"Let's think step-by-step. In summary, the next action I will perform is ```{action}```"


def _tool(reply: str) -> str:
    return _CALL.sub(lambda call: f"Action: {call[1]} with Action Input: {call[2]}", reply)


_FORMS: Mapping[str, Callable[[str], str]] = {
    "sqlgym": _sql,
    "searchqa": _search,
    "webarena": _web,
    **dict.fromkeys(TOOLS, _tool),
}
