"""Parity: the smallest environment. A reply with an even number of characters earns 0.5.

A random policy earns a different return in every episode, so a run has non-zero advantages before it has learned
anything. The chaos suite and the soak test play it, and it is a good example to start your own environment from.
"""

from collections.abc import Sequence

from horizonrl.common.errors import ConfigError
from horizonrl.envs.api import Split, Step, TaskSpec
from horizonrl.envs.game import Move, MoveExpert, TurnEnvironment

SPLITS: tuple[Split, ...] = ("train", "validation", "train", "test")
TASKS = tuple(
    TaskSpec(f"round-{number:02d}", SPLITS[number % len(SPLITS)], "all") for number in range(64)
)
TURNS = 4
REWARD = 0.5


class Parity(TurnEnvironment[list[bool]]):
    """Episodes of four turns. A task is solved if every reply is even."""

    env_id = "parity"
    version = "1"

    def __init__(self) -> None:
        super().__init__("plain", max_observation_chars=100)

    @classmethod
    def tasks(cls) -> Sequence[TaskSpec]:
        """Return the 64 tasks. They differ only in name."""
        return TASKS

    async def start(self, task_id: str) -> tuple[str, list[bool]]:
        """Begin an episode: which of its replies were even."""
        if all(task.task_id != task_id for task in TASKS):
            raise ConfigError(
                f"parity has no task {task_id!r}: a task is {TASKS[0].task_id} to {TASKS[-1].task_id}"
            )
        return f"This is {task_id}. Reply with an even number of characters.", []

    def read(self, text: str) -> str:
        """Return the whole reply, of which every character counts."""
        return text

    async def follow(self, game: list[bool], action: str) -> Step:
        """Count the characters of a reply."""
        even = len(action) % 2 == 0
        game.append(even)
        return Step(
            "even, again" if even else "odd, again",
            reward=REWARD * even,
            terminated=len(game) == TURNS,
            success=sum(game) == TURNS,
        )

    def expert(self) -> MoveExpert:
        """Return an expert that always replies with an even word."""
        self._current()
        return self._expert(lambda observation: Move("even", "It has four characters."))
