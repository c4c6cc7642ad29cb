"""A registered Gymnasium environment of texts, and one of numbers that a wrapper makes texts."""

import string
from typing import Any

import gymnasium
from gymnasium.spaces import Discrete, Text

GUESS = "tests.envs.hubs.guess:HorizonGuess-v0"
COIN = "tests.envs.hubs.guess:HorizonCoin-v0"
WRAPPER = "tests.envs.hubs.guess:in_words"


class GuessWord(gymnasium.Env[str, str]):
    """Say the number that the seed hides."""

    observation_space = Text(200, charset=string.printable)
    action_space = Text(40, charset=string.printable)

    def __init__(self) -> None:
        self.hidden, self.left = 0, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.hidden, self.left = int(self.np_random.integers(10)), 5
        return "Say a digit.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action == "fall":
            raise ZeroDivisionError("it fell")
        self.left -= 1
        won = action.strip() == str(self.hidden)
        return "right" if won else "wrong", float(won), won, not self.left, {}


class Coin(gymnasium.Env[int, int]):
    """Say what the seed tossed."""

    observation_space = action_space = Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.side = int(self.np_random.integers(2))
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        return self.side, float(action == self.side), True, False, {"success": action == self.side}


class Words(gymnasium.Wrapper[str, str, int, int]):
    def __init__(self, env: gymnasium.Env[int, int]) -> None:
        super().__init__(env)
        self.observation_space, self.action_space = Text(20), Text(20)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        return f"coin {self.env.reset(seed=seed)[0]}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        side, *rest = self.env.step(1 if action == "heads" else 0)
        return ("tails", "heads")[side], *rest  # type: ignore[return-value]


def in_words(environment: gymnasium.Env[int, int]) -> Words:
    return Words(environment)


for _id, _made in (("HorizonGuess-v0", GuessWord), ("HorizonCoin-v0", Coin)):
    gymnasium.register(id=_id, entry_point=_made)
