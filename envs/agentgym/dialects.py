"""The HTTP dialects of AgentGym's environment servers: one `Dialect` for each of the fifteen ids.

Our client reads them and our server writes them (docs/environments/agentgym.md). There are two families, by the key
that identifies an episode: with `id`, /create answers an object and errors are status 200 with {"error"}; with
`env_idx`, /create answers a bare number and the first observation comes from GET /observation.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from horizonrl.common.errors import EnvironmentFailure, EnvironmentTimeout
from horizonrl.envs.agentgym import replies
from horizonrl.envs.agentgym.rules import RULES
from horizonrl.envs.api import Step
from horizonrl.envs.formats import Unreadable

ACTIONS = "\nAVAILABLE ACTIONS: "


@dataclass(frozen=True, slots=True)
class Verdict:
    """A step's answer as AgentGym's client reads it."""

    observation: str
    score: float
    """The reward that AgentGym's client reports: the score so far if the dialect is cumulative, else this step's."""
    done: bool
    truncated: bool
    success: bool


@dataclass(frozen=True, eq=False)
class Dialect:
    name: str
    key: Literal["id", "env_idx"]
    task: str
    """The field of /reset that holds the task."""
    train: int
    """Number of tasks in the train split. They come first; those of the test split follow."""
    test: int
    read: Callable[[str], str | Unreadable] = replies.whole
    """Returns the part of a reply that is sent to the server."""
    action: str = "action"
    """The field of /step that holds the action."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of /reset."""
    observation: str = "observation"
    score: str = "reward"
    done: str = "done"
    cumulative: bool = False
    """The score covers the whole episode so far, not just the last step."""
    solved_at: float = 1.0
    """The score from which a task counts as solved, if the server does not say so itself."""
    unit: int = 1
    """The AgentGym score that equals a reward of 1 here."""
    closes: bool = False
    """The server has /close."""
    shares: bool = False
    """/create may return an environment that others use. A step does not change it, so only a reset does harm."""
    prefix: str = ""

    @property
    def rules(self) -> str:
        """The rules for the agent. AgentGym's servers leave them to their clients."""
        return RULES.get(self.name, "")

    @property
    def first_in_reset(self) -> bool:
        """Whether the first observation is in /reset's answer. If not, it comes from GET /observation."""
        return self.key == "id" or self.shares

    @property
    def needs_task(self) -> bool:
        """Whether /reset needs the task's number. If not, a reset without one begins the last task again."""
        return self.key == "id" and self is not SERVED

    # What the client reads. Anything that is not in the dialect raises EnvironmentFailure.

    def create_request(self) -> dict[str, Any]:
        return {"id": 0} if self.key == "env_idx" and self.task == "id" else {}

    def handle(self, answer: Any) -> int:
        """Return the number that identifies the environment on the server."""
        handle = answer.get(self.key) if isinstance(answer, dict) else answer
        if isinstance(handle, bool) or not isinstance(handle, int):
            raise EnvironmentFailure(
                f"{self.name}: /create answered {_show(answer)}, which holds no {self.key}"
            )
        return handle

    def first_text(self, answer: Any) -> str:
        """Return the first observation, from the answer to /reset or /observation."""
        if self.key == "env_idx":
            in_reset = isinstance(answer, list) and answer and self.shares
            return self._text(
                answer[0] if in_reset else answer, "/reset" if self.shares else "/observation"
            )
        text = self._text(_get(answer, "observation"), "/reset")
        if self.name == "sciworld":
            return f"{self._text(_get(answer, 'task_description'), '/reset')}\n{text}"
        if isinstance(actions := _get(answer, "available_actions"), list) and actions:
            return text + ACTIONS + ",".join(map(str, actions))
        return text

    def check_begun(self, answer: Any) -> None:
        """Raise EnvironmentTimeout if WebArena's server has given up on the reset."""
        if _get(answer, "observation") == "TimeoutError":
            raise EnvironmentTimeout(
                f"{self.name}: the server gave up on the reset: its sites may need a restart"
            )

    def verdict(self, answer: Any) -> Verdict:
        """Return what a step's answer says."""
        # A wrong type breaks the episode. Read as 0 it would be a zero reward (broken is not zero).
        score, done = _get(answer, self.score), _get(answer, self.done)
        # In Python `true` is an int: it would pay 1.
        if (
            isinstance(score, bool)
            or not isinstance(score, int | float)
            or not math.isfinite(score)
        ):
            raise EnvironmentFailure(
                f"{self.name}: /step answered {_show(answer)}, whose {self.score} is no number"
            )
        if not isinstance(done, bool):
            raise EnvironmentFailure(
                f"{self.name}: /step answered {_show(answer)}, whose {self.done} is no boolean"
            )
        if self.name == "webarena" and not done:
            score = 0.0
        return Verdict(
            observation=self._text(_get(answer, self.observation), "/step"),
            score=float(score),
            done=done,
            truncated=answer.get("truncated") is True and answer.get("terminated") is not True,
            # Our own server says whether the task is solved; AgentGym's leave it to the score.
            success=done and bool(answer.get("success", score >= self.solved_at)),
        )

    # What the server writes.

    def write_created(self, episode: int) -> Any:
        if self.key == "env_idx" and self.name != "webarena":
            return episode
        return {self.key: episode, "observation": "", "done": False, "reward": 0}

    def write_reset(self, episode: int, text: str) -> Any:
        if self.key == "env_idx":
            if self.name == "webarena":
                return {"observation": text, "sites": [], "object": ""}
            return text if self.task == "id" else [text, None]
        answer = {
            "id": episode,
            "observation": text,
            "done": False,
            "deleted": False,
            "reward": 0,
            "score": 0,
        }
        if self.name == "sciworld":  # AgentGym's clients join the two parts again
            description, _, rest = text.partition("\n")
            answer |= {"task_description": description, "observation": rest}
        if self.name == "alfworld":
            observation, actions = part_actions(text)
            answer |= {"observation": observation, "available_actions": actions, "task_type": ""}
        return answer

    def write_observation(self, text: str) -> str:
        """Return the answer to GET /observation."""
        return part_actions(text)[0] if self.name == "alfworld" else text

    def closed(self, existed: bool) -> Any:
        """Return the answer to /close, which says whether the environment existed."""
        return {"closed": True} if self is SERVED else existed

    def write_step(self, step: Step, total: float) -> dict[str, Any]:
        """Return a step's answer; `total` is the sum of the episode's rewards.

        It has the fields of every dialect: a client ignores the fields that it does not know.
        """
        answer: dict[str, Any] = {
            self.observation: step.observation,
            "reward": self._score(step.reward),
            "score": self._score(total),
            "done": step.terminated or step.truncated,
            "terminated": step.terminated,
            "truncated": step.truncated,
            "success": step.success,
            "info": None,
        }
        if self.cumulative:
            answer[self.score] = self._score(total)
        if self.name == "alfworld":
            answer[self.observation], answer["available_actions"] = part_actions(step.observation)
        return answer

    def _score(self, reward: float) -> float:
        """Return a reward in AgentGym's unit, as an integer if that unit is not ours."""
        return reward if self.unit == 1 else round(reward * self.unit)

    def _text(self, value: Any, path: str) -> str:
        if not isinstance(value, str):
            raise EnvironmentFailure(
                f"{self.name}: {path} answered {_show(value)} where a text belongs"
            )
        return value


def _tool(name: str, train: int) -> Dialect:
    return Dialect(name, "env_idx", "id", train, 20, cumulative=True)


SERVED = Dialect("served", "id", "task_id", 0, 0, action="text", closes=True, prefix="/served")
"""Our own dialect, for environments that AgentGym does not have: whole replies, task ids and our own field names."""

DIALECTS: Mapping[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        Dialect("textcraft", "id", "data_idx", 444, 100, replies.only_action, closes=True),
        Dialect(
            "babyai", "id", "data_idx", 810, 90, replies.only_action,
            # A win within the step limit pays 1 - 0.9 * steps / limit, which is 0.1 or more.
            score="score", cumulative=True, solved_at=0.1, closes=True,
        ),
        Dialect(
            "sciworld", "id", "data_idx", 4_439, 200, replies.last_action,
            score="score", cumulative=True, solved_at=100, unit=100, closes=True,
        ),
        Dialect("alfworld", "id", "game", 2_420, 200, replies.last_action, fields={"world_type": "Text"}),
        # AgentGym's lists repeat the 26 starts of its server, and start 25 is the goal itself.
        Dialect("maze", "id", "game", 20, 5, replies.first_action, prefix="/maze"),
        Dialect("wordle", "id", "seed", 955, 25, replies.first_action, prefix="/wordle"),
        Dialect("webshop", "env_idx", "session_id", 3_930, 200, replies.last_action, observation="state"),
        Dialect(
            "webarena", "env_idx", "idx", 762, 50, replies.whole_if_fenced,
            fields={"seed": 0}, done="terminated", closes=True,
        ),
        Dialect(
            "sqlgym", "env_idx", "item_id", 9_428, 1_534, replies.last_sql, observation="state", shares=True,
        ),
        Dialect("searchqa", "env_idx", "id", 220_928, 400, closes=True),
        _tool("weather", 323),
        _tool("movie", 218),
        _tool("academia", 0),
        _tool("sheet", 0),
        _tool("todo", 135),
    )
}  # fmt: skip


def part_actions(text: str) -> tuple[str, list[str]]:
    """Split an observation of ALFWorld into its text and the actions in its last line."""
    observation, label, actions = text.rpartition(ACTIONS)
    return (observation, actions.split(",")) if label else (text, [])


def _get(answer: Any, name: str) -> Any:
    return answer.get(name) if isinstance(answer, dict) else None


def _show(answer: Any) -> str:
    shown = repr(answer)
    return shown if len(shown) <= 200 else shown[:200] + "..."
