"""TextArena: its games for one player that run offline, by the package's own rules and rewards.

A task is `GAME-SEED`. TextArena pays once, at the end: 1 for a win in most games, a share for part of one, and what the
game says for a second invalid move in a row, which ends it.
"""

from collections.abc import Callable, Sequence
from typing import Any

from pydantic import validate_call

from horizonrl.common.errors import EnvironmentFailure
from horizonrl.envs.api import Step, TaskSpec
from horizonrl.envs.formats import ActionFormat, Command
from horizonrl.envs.game import words
from horizonrl.envs.hubs.hub import HubEnvironment, TaskCount, numbered_tasks
from horizonrl.envs.hubs.packages import hub_module, hub_version
from horizonrl.envs.text_limits import MAX_OBSERVATION_CHARS, Chars

PACKAGE = "textarena"
GAMES = words(
    "2048-v0 2048-v0-3x3 2048-v0-easy 2048-v0-super-easy 2048-v0-ultra-easy Bandit-v0 "
    "Bandit-v0-hard Blackjack-v0 Blackjack-v0-long Countdown-v0 Crosswords-v0 "
    "Crosswords-v0-hardcore Cryptarithm-v0 FifteenPuzzle-v0 FrozenLake-v0 FrozenLake-v0-hardcore "
    "FrozenLake-v0-random GuessTheNumber-v0 GuessTheNumber-v0-hardcore LightsOut-v0 "
    "LogicPuzzle-v0 LogicPuzzle-v0-hard Mastermind-v0 Mastermind-v0-extreme Mastermind-v0-hard "
    "Minesweeper-v0 Minesweeper-v0-hard Minesweeper-v0-medium Minesweeper-v0-small PegJump-v0 "
    "RushHour-v0 Secretary-v0 Secretary-v0-long Set-v0 Slitherlink-v0 Sokoban-v0 Sudoku-v0 "
    "Sudoku-v0-easy Sudoku-v0-very-easy ThreeCardMonte-v0 TowerOfHanoi-v0 TowerOfHanoi-v0-hard "
    "TowerOfHanoi-v0-medium"
)
"""Every family for one player that runs offline on Python 3.11 and repeats itself (docs/environments/hubs.md)."""
COMMANDS = (Command("act", "{action}", "take an action of the game, as its rules write it"),)


class Match:
    """One game, until TextArena says that it is over."""

    def __init__(self, game: Any) -> None:
        self._game = game

    def follow(self, action: str) -> Step:
        """Take an action; return what the game has said since."""
        done, _ = self._game.step(action)
        observation = self.unread()
        if not done:
            return Step(observation, reward=0.0, terminated=False)
        rewards, info = self._game.close()
        reward, facts = rewards[0], info[0]
        if isinstance(reward, bool) or not isinstance(reward, int | float):
            raise EnvironmentFailure(
                f"textarena: the reward of this game is {reward!r}, which is no number"
            )
        state = self._game.state
        late = state.max_turns is not None and state.turn >= state.max_turns
        cut = late and reward < 1 and not facts["invalid_move"]
        observation = "\n".join(filter(None, (observation, str(facts.get("reason") or ""))))
        return Step(
            observation,
            float(reward),
            terminated=not cut,
            truncated=cut,
            success=not cut and reward >= 1,
        )

    def unread(self) -> str:
        """Return the game's messages since the last call, without the agent's own actions, which it has in its chat."""
        player_action = hub_module("textarena").ObservationType.PLAYER_ACTION
        _, messages = self._game.get_observation()
        # Some games put their text in the place of its kind.
        texts = (
            text if isinstance(text, str) else kind
            for _, text, kind in messages
            if kind is not player_action
        )
        return "\n".join(str(text).strip("\n") for text in texts)

    def close(self) -> None: ...


class TextArena(HubEnvironment[Match]):
    """One game at a time.

    tasks: how many seeds of each game are listed
    format: how the agent names its action (envs/formats.py)
    max_observation_chars: bound of every observation; a first observation that does not fit is a ConfigError
    """

    env_id = "textarena"
    version = hub_version(1, PACKAGE)
    commands = COMMANDS

    @validate_call
    def __init__(
        self,
        *,
        tasks: TaskCount = 20,
        format: ActionFormat = "react",
        max_observation_chars: Chars = MAX_OBSERVATION_CHARS,
    ) -> None:
        super().__init__(format, max_observation_chars)
        hub_module("textarena")
        self.version = f"{type(self).version} tasks:{tasks}"

    @classmethod
    @validate_call
    def tasks(cls, *, tasks: TaskCount = 20) -> Sequence[TaskSpec]:
        """Return the first seeds of every game."""
        hub_module("textarena")
        return numbered_tasks(GAMES, tasks)

    def begin(self, task_id: str) -> tuple[str, Match]:
        """Make a game and return its rules and first board."""
        name, seed = self.parse_id(task_id, GAMES)
        package = hub_module("textarena")
        # `raw`: its other wrappers repeat the whole conversation in every observation.
        game = package.wrappers.ActionFormattingWrapper(package.make(f"{name}-raw"))
        game.reset(num_players=1, seed=seed)
        game.state.set_invalid_move = _in_order(game.state.set_invalid_move)
        match = Match(game)
        return f"{match.unread()}\n\n{self.manual()}", match


def _in_order(report: Callable[..., None]) -> Callable[..., None]:
    """Return `set_invalid_move` with its arguments in order: Countdown and three other games swap the two."""

    def report_in_order(reason: Any, reward: Any = -1.0) -> None:
        if isinstance(reward, str):
            reason, reward = reward, reason
        report(reason=reason, reward=reward)

    return report_in_order
