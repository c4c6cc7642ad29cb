"""Tasks that take a time of their own, log-normal over the tasks. Nothing else tells them apart."""

import asyncio
import hashlib
import random
from collections.abc import Sequence
from typing import ClassVar

from horizonrl.envs.api import Observation, Step, TaskSpec

TURNS = 2


def seconds(task_id: str, median: float, sigma: float) -> float:
    return median * random.Random(f"slow{task_id}").lognormvariate(0.0, sigma)


class SlowTasks:
    env_id: ClassVar[str] = "slowtasks"
    version: ClassVar[str] = "1"

    def __init__(self, median: float = 0.1, sigma: float = 1.0, hangs: int = 0) -> None:
        self._median, self._sigma = median, sigma
        self._hangs = hangs
        """One task in so many never answers; 0 for none."""
        self._task_id, self._turns = "", 0

    @classmethod
    def tasks(cls) -> Sequence[TaskSpec]:
        return tuple(
            TaskSpec(f"{n:04d}", "test" if n % 20 == 0 else "train", "all") for n in range(2000)
        )

    async def reset(self, task_id: str) -> Observation:
        self._task_id, self._turns = task_id, 0
        return Observation("Say something.")

    async def step(self, text: str) -> Step:
        self._turns += 1
        said = f"{text}{self._task_id}"
        varied = random.Random(said).lognormvariate(0.0, 0.3)
        if self._hangs and int(self._task_id) % self._hangs == 1:
            await asyncio.Event().wait()
        await asyncio.sleep(seconds(self._task_id, self._median, self._sigma) / TURNS * varied)
        # Every text earns another reward, so that no group is dropped because its episodes earn the same.
        reward = int(hashlib.sha256(said.encode()).hexdigest()[:6], 16) / 16**6
        return Step("More.", reward=reward, terminated=self._turns == TURNS, success=reward > 0.5)

    async def close(self) -> None: ...
