"""How AgentGym's environment servers write: one `Dialect` for each of the fifteen ids, read by our client and written
by our server (docs/environments/agentgym.md).

Two families, by the key that names an episode: `id` (create answers an object, errors are 200 with {"error"}) and
`env_idx` (create answers a bare number; the first observation is asked for with GET /observation).
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
    """The reward of AgentGym's client: of a cumulative dialect the score so far, else of this step."""
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
    """Tasks of the train split; they come first, those of the test split follow."""
    test: int
    read: Callable[[str], str | Unreadable] = replies.whole
    """What of a reply is sent."""
    action: str = "action"
    """The field of /step that holds it."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """What else /reset is sent."""
    observation: str = "observation"
    score: str = "reward"
    done: str = "done"
    cumulative: bool = False
    """The score is that of the whole episode so far."""
    solved_at: float = 1.0
    """The score of a solved task, where the server does not say whether it is."""
    unit: int = 1
    """The score of AgentGym's that our reward of 1 is."""
    closes: bool = False
    shares: bool = False
    """/create hands out environments that others use. A step changes nothing in one, so that only a reset does harm."""
    prefix: str = ""

    @property
    def rules(self) -> str:
        """What the agent is told: AgentGym's servers leave it to their clients."""
        return RULES.get(self.name, "")

    @property
    def first_in_reset(self) -> bool:
        """Whether the first observation is in /reset's answer; else it is asked for with GET /observation."""
        return self.key == "id" or self.shares

    @property
    def needs_task(self) -> bool:
        """Whether /reset is refused without the task's number; else it begins the last one again."""
        return self.key == "id" and self is not SERVED

    # As the client reads it. What is not of the dialect raises EnvironmentFailure.

    def create_request(self) -> dict[str, Any]:
        return {"id": 0} if self.key == "env_idx" and self.task == "id" else {}

    def handle(self, answer: Any) -> int:
        """Return the number by which the server knows the environment."""
        handle = answer.get(self.key) if isinstance(answer, dict) else answer
        if isinstance(handle, bool) or not isinstance(handle, int):
            raise EnvironmentFailure(f"{self.name}: /create answered {_shown(answer)}, which holds no {self.key}")
        return handle

    def first_text(self, answer: Any) -> str:
        """Return the first observation from the answer of /reset or /observation that holds it."""
        if self.key == "env_idx":
            in_reset = isinstance(answer, list) and answer and self.shares
            return self._text(answer[0] if in_reset else answer, "/reset" if self.shares else "/observation")
        text = self._text(_get(answer, "observation"), "/reset")
        if self.name == "sciworld":
            return f"{self._text(_get(answer, 'task_description'), '/reset')}\n{text}"
        if isinstance(actions := _get(answer, "available_actions"), list) and actions:
            return text + ACTIONS + ",".join(map(str, actions))
        return text

    def check_begun(self, answer: Any) -> None:
        """Raise EnvironmentTimeout for a reset that WebArena's server has given up."""
        if _get(answer, "observation") == "TimeoutError":
            raise EnvironmentTimeout(f"{self.name}: the server gave the reset up: its sites may need a restart")

    def verdict(self, answer: Any) -> Verdict:
        """Return a step's answer."""
        score, done = _get(answer, self.score), _get(answer, self.done)
        if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
            raise EnvironmentFailure(f"{self.name}: /step answered {_shown(answer)}, whose {self.score} is no number")
        if not isinstance(done, bool):
            raise EnvironmentFailure(f"{self.name}: /step answered {_shown(answer)}, whose {self.done} is no boolean")
        if self.name == "webarena" and not done:
            score = 0.0
        return Verdict(
            observation=self._text(_get(answer, self.observation), "/step"),
            score=float(score),
            done=done,
            truncated=answer.get("truncated") is True and answer.get("terminated") is not True,
            success=done and bool(answer.get("success", score >= self.solved_at)),
        )

    # As the server writes it.

    def created(self, episode: int) -> Any:
        if self.key == "env_idx" and self.name != "webarena":
            return episode
        return {self.key: episode, "observation": "", "done": False, "reward": 0}

    def begun(self, episode: int, text: str) -> Any:
        if self.key == "env_idx":
            if self.name == "webarena":
                return {"observation": text, "sites": [], "object": ""}
            return text if self.task == "id" else [text, None]
        answer = {"id": episode, "observation": text, "done": False, "deleted": False, "reward": 0, "score": 0}
        if self.name == "sciworld":  # its clients join the two again
            description, _, rest = text.partition("\n")
            answer |= {"task_description": description, "observation": rest}
        if self.name == "alfworld":
            observation, actions = part_actions(text)
            answer |= {"observation": observation, "available_actions": actions, "task_type": ""}
        return answer

    def observed(self, text: str) -> str:
        """Return the answer to GET /observation."""
        return part_actions(text)[0] if self.name == "alfworld" else text

    def closed(self, found: bool) -> Any:
        """Return the answer to /close: whether there was such an environment."""
        return {"closed": True} if self is SERVED else found

    def stepped(self, step: Step, total: float) -> dict[str, Any]:
        """Return a step's answer; `total` is the sum of the episode's rewards. Other clients leave the rest alone."""
        answer: dict[str, Any] = {
            self.observation: step.observation,
            "reward": self._scored(step.reward),
            "score": self._scored(total),
            "done": step.terminated or step.truncated,
            "terminated": step.terminated,
            "truncated": step.truncated,
            "success": step.success,
            "info": None,
        }
        if self.cumulative:
            answer[self.score] = self._scored(total)
        if self.name == "alfworld":
            answer[self.observation], answer["available_actions"] = part_actions(step.observation)
        return answer

    def _scored(self, reward: float) -> float:
        """Return a reward as AgentGym counts it; whole where its unit is not ours."""
        return reward if self.unit == 1 else round(reward * self.unit)

    def _text(self, value: Any, path: str) -> str:
        if not isinstance(value, str):
            raise EnvironmentFailure(f"{self.name}: {path} answered {_shown(value)} where a text belongs")
        return value


def _tool(name: str, train: int) -> Dialect:
    return Dialect(name, "env_idx", "id", train, 20, cumulative=True)


SERVED = Dialect("served", "id", "task_id", 0, 0, action="text", closes=True, prefix="/served")
"""Our own server, for an environment that AgentGym does not know: the reply and the task go by our own names."""

DIALECTS: Mapping[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        Dialect("textcraft", "id", "data_idx", 444, 100, replies.only_action, closes=True),
        Dialect(
            "babyai", "id", "data_idx", 810, 90, replies.only_action,
            score="score", cumulative=True, solved_at=0.1, closes=True,
        ),
        Dialect(
            "sciworld", "id", "data_idx", 4_439, 200, replies.last_action,
            score="score", cumulative=True, solved_at=100, unit=100, closes=True,
        ),
        Dialect("alfworld", "id", "game", 2_420, 200, replies.last_action, fields={"world_type": "Text"}),
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
    """Return an observation of ALFWorld without its last line, and the actions that stand there."""
    observation, label, actions = text.rpartition(ACTIONS)
    return (observation, actions.split(",")) if label else (text, [])


def _get(answer: Any, name: str) -> Any:
    return answer.get(name) if isinstance(answer, dict) else None


def _shown(answer: Any) -> str:
    shown = repr(answer)
    return shown if len(shown) <= 200 else shown[:200] + "..."
