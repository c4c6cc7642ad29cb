"""For programs: an episode of one of the registered environments, step by step and without asyncio."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any, Self

from horizonrl.envs import registry
from horizonrl.envs.api import Environment, Step
from horizonrl.envs.text_limits import readable

REWARD = "reward.json"


class Game:
    """One episode: `Game("maze", "small-3", format="plain")`; options are the environment's.

    It has an event loop of its own in a thread, so that programs can use it whether or not they have one.
    """

    def __init__(self, env_id: str, task_id: str, **options: Any) -> None:
        self.reward = 0.0
        """The sum so far."""
        self.success = False
        self.over = False
        self.turns = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="game", daemon=True)
        self._thread.start()
        self._environment: Environment = registry.make(env_id, options)
        self.observation: str = self._call(self._environment.reset(task_id)).text
        """What the environment said last: the task, then the answer to each step."""

    def step(self, text: str) -> Step:
        """Answer the environment. Raises EnvironmentFailure after the end."""
        step: Step = self._call(self._environment.step(readable(text)))
        self.observation, self.reward = step.observation, self.reward + step.reward
        self.success, self.over, self.turns = (
            step.success,
            step.terminated or step.truncated,
            self.turns + 1,
        )
        return step

    def save(self, file: str = REWARD) -> None:
        """Write the result where environment `program` looks for it if it has no other grader."""
        Path(file).write_text(
            json.dumps({"reward": self.reward, "success": self.success}), encoding="utf-8"
        )

    def close(self) -> None:
        if self._thread.is_alive():
            self._call(self._environment.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.save()
        self.close()

    def _call(self, awaitable: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(awaitable, self._loop).result()
