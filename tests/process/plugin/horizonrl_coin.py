"""A third-party environment as a pip package would bring it: even a random policy earns something in it.

Each reply of an even number of letters is worth a half; the episode ends after four turns.
"""

from collections.abc import Sequence
from typing import ClassVar

from horizonrl.envs.api import Observation, Split, Step, TaskSpec

SPLITS: tuple[Split, ...] = ("train", "validation", "train", "test")


class CoinExpert:
    def act(self, observation: str) -> str:
        return "heads" if len(observation) % 2 else "tail"


class Coin:
    env_id: ClassVar[str] = "coin"
    version: ClassVar[str] = "1"

    def __init__(self) -> None:
        self._turns = 0

    @classmethod
    def tasks(cls) -> Sequence[TaskSpec]:
        return tuple(TaskSpec(f"coin{n}", SPLITS[n % len(SPLITS)], "all") for n in range(16))

    async def reset(self, task_id: str) -> Observation:
        self._turns = 0
        return Observation(f"heads or tails, {task_id}?")

    async def step(self, text: str) -> Step:
        self._turns += 1
        even = len(text) % 2 == 0
        return Step("again", reward=0.5 * even, terminated=self._turns == 4, success=even)

    def expert(self) -> CoinExpert:
        return CoinExpert()

    async def close(self) -> None: ...
