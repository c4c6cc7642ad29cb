"""Parity: the smallest environment. A reply with an even number of characters earns 0.5.

A random policy earns a different return in every episode, so a run has non-zero advantages before it has learned
anything. The chaos suite and the soak test play it, and it is a good example to start your own environment from.
"""

from collections.abc import Sequence
from typing import ClassVar

from horizonrl.common.errors import ConfigError, EnvironmentFailure
from horizonrl.envs.api import Observation, Split, Step, TaskSpec

SPLITS: tuple[Split, ...] = ("train", "validation", "train", "test")
TASKS = tuple(
    TaskSpec(f"round-{number:02d}", SPLITS[number % len(SPLITS)], "all") for number in range(64)
)
TURNS = 4
REWARD = 0.5


class ParityExpert:
    def act(self, observation: str) -> str:
        return "even"


class Parity:
    """Episodes of four turns. A task is solved if every reply is even."""

    env_id: ClassVar[str] = "parity"
    version: ClassVar[str] = "1"

    def __init__(self) -> None:
        self._turns: int | None = None
        self._even_turns = 0

    @classmethod
    def tasks(cls) -> Sequence[TaskSpec]:
        """Return the 64 tasks. They differ only in name."""
        return TASKS

    async def reset(self, task_id: str) -> Observation:
        """Begin an episode."""
        if all(task.task_id != task_id for task in TASKS):
            raise ConfigError(
                f"parity has no task {task_id!r}: a task is {TASKS[0].task_id} to {TASKS[-1].task_id}"
            )
        self._turns = self._even_turns = 0
        return Observation(f"This is {task_id}. Reply with an even number of characters.")

    async def step(self, text: str) -> Step:
        """Count the characters of a reply."""
        turns = self._current() + 1
        if turns > TURNS:
            raise EnvironmentFailure(
                f"the episode is over after {TURNS} turns: reset before the next step"
            )
        even = len(text) % 2 == 0
        self._turns, self._even_turns = turns, self._even_turns + even
        return Step(
            "even, again" if even else "odd, again",
            reward=REWARD * even,
            terminated=turns == TURNS,
            success=self._even_turns == TURNS,
        )

    def expert(self) -> ParityExpert:
        """Return an expert that always replies with an even word."""
        self._current()
        return ParityExpert()

    async def close(self) -> None:
        self._turns = None

    def _current(self) -> int:
        if self._turns is None:
            raise EnvironmentFailure("no episode has begun: reset before step and expert")
        return self._turns
