"""A server of OpenEnv's own package, for our client `openenv`: openenv_server.py PORT."""

import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Say(Action):
    message: str


class Heard(Observation):
    text: str


class Digits(Environment):
    """Say the digit that the seed hides; five tries."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self._hidden = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Heard:
        self._state = State(episode_id=episode_id)
        self._hidden = random.Random(seed).randrange(10)
        return Heard(text="Say a digit.")

    def step(self, action: Say, timeout_s: float | None = None, **_: Any) -> Heard:
        self._state.step_count += 1
        won = action.message.strip() == str(self._hidden)
        text = (
            "right" if won else "higher" if action.message.strip() < str(self._hidden) else "lower"
        )
        return Heard(text=text, reward=float(won), done=won or self._state.step_count == 5)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(Digits, Say, Heard, max_concurrent_envs=64)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
