"""TextWorld: text adventures that are generated and compiled here, by the package's own score.

A task is `FAMILY-NUMBER`; the number is the seed, and chooses the difficulty where the family has one. A game is
compiled once per machine and kept in a folder, since the compiler takes 5 to 15 s.
"""

import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

from pydantic import validate_call

from horizonrl.common.errors import EnvironmentFailure
from horizonrl.common.files import atomic_write
from horizonrl.envs.api import Step, TaskSpec
from horizonrl.envs.formats import ActionFormat, Command
from horizonrl.envs.game import Move, MoveExpert, refuse_move, words
from horizonrl.envs.hubs.hub import HubEnvironment, TaskCount, numbered_tasks
from horizonrl.envs.hubs.packages import hub_module, hub_version
from horizonrl.envs.splits import hashed_split
from horizonrl.envs.text_limits import MAX_OBSERVATION_CHARS, Chars

PACKAGE = "textworld"
EXTRA = "textworld"
GAMES = Path("~/.cache/horizonrl/textworld")
COMMANDS = (
    Command("do", "{command}", "give the game a command, such as: go north, take coin, open door"),
)
REFUSED = frozenset(
    words("quit q restart save restore undo script transcript unscript verify version yes y no")
)
"""Commands to the interpreter, which would write files, start over, or ask back."""
_STATUS = re.compile(r"\s*>?\s{20,}-=.*\Z", re.DOTALL)
"""The status line, which the interpreter prints after the prompt."""
_END = re.compile(r"\s*Would you like to RESTART, RESTORE.*\Z", re.DOTALL)
_GAP = re.compile(r"[ \t]*\n(?:[ \t]*\n)+")
_BANNER = re.compile(r"\A[\s_|\\$/<>]*(?=\w)")
"""TextWorld's name in large letters."""


FAMILIES: Mapping[str, Callable[[int], dict[str, Any]]] = {
    "coin_collector": lambda number: {"level": 1 + number % 10},
    "cooking": lambda number: {
        "recipe": 1 + number % 3, "take": 1 + number % 3, "go": 1, "open": True, "cook": number % 2 == 1,
        "cut": False, "drop": False, "recipe_seed": 0, "split": None,
    },
    "custom": lambda number: {
        "rooms": 2 + number % 4, "objects": 3 + number % 5, "quest": 1 + number % 4
    },
    "simple": lambda number: {
        "rewards": "dense", "goal": "detailed", "test": hashed_split(f"simple-{number}") == "test"
    },
    "treasure_hunter": lambda number: {"level": 1 + number % 20},
}  # fmt: skip
"""The settings of a family's game by its number."""


class Adventure:
    """One game in an interpreter of its own."""

    def __init__(self, game: Any, state: Any, walkthrough: Sequence[str]) -> None:
        self._game = game
        self._score, self._most = state["score"] or 0, max(1, state["max_score"] or 1)
        self.walkthrough = tuple(walkthrough)
        self.moves: list[str] = []

    def follow(self, action: str) -> Step:
        """Give the game a command. The rewards of an episode add up to its score over the highest one."""
        command = " ".join(action.lower().split())
        if not command or command.split()[0] in REFUSED or not command.isascii():
            return refuse_move(
                "That command is not played here. Give a command of the game, such as look."
            )
        self.moves.append(command)
        state, _, done = self._game.step(command)
        score = state["score"] or 0
        gained, self._score = score - self._score, score
        won = bool(state["won"])
        over = bool(done or won or state["lost"])
        return Step(
            clean_feedback(state["feedback"]),
            gained / self._most,
            terminated=over,
            success=won,
            info={"score": score},
        )

    def advise(self) -> Move:
        """Return the next command of the walkthrough, however the agent has played before it."""
        if len(self.moves) >= len(self.walkthrough):
            raise EnvironmentFailure(
                f"textworld: the walkthrough of this game ends after {len(self.walkthrough)} commands"
            )
        return Move(self.walkthrough[len(self.moves)], "This is the next step.")

    def close(self) -> None:
        self._game.close()


class TextWorld(HubEnvironment[Adventure]):
    """One game at a time.

    tasks: how many games of each family are listed
    games: the folder that keeps the compiled games; ~/.cache/horizonrl/textworld by default
    format: how the agent names its action (envs/formats.py)
    max_observation_chars: bound of every observation; a first observation that does not fit is a ConfigError
    """

    env_id = "textworld"
    version = hub_version(1, PACKAGE)
    commands = COMMANDS

    @validate_call
    def __init__(
        self,
        *,
        tasks: TaskCount = 20,
        games: Path | None = None,
        format: ActionFormat = "react",
        max_observation_chars: Chars = MAX_OBSERVATION_CHARS,
    ) -> None:
        super().__init__(format, max_observation_chars)
        hub_module("textworld", EXTRA)
        self.version = f"{type(self).version} tasks:{tasks}"
        self._folder = (games or GAMES).expanduser()

    @classmethod
    @validate_call
    def tasks(cls, *, tasks: TaskCount = 20) -> Sequence[TaskSpec]:
        """Return the first games of every family."""
        hub_module("textworld", EXTRA)
        return numbered_tasks(tuple(FAMILIES), tasks)

    def begin(self, task_id: str) -> tuple[str, Adventure]:
        """Compile the game if it is not in the folder, and start it."""
        family, number = self.parse_id(task_id, FAMILIES)
        textworld = hub_module("textworld", EXTRA)
        path = self._folder / installed_version(PACKAGE) / f"{task_id}.z8"
        if not path.exists():
            _compile(textworld, family, number, path)
        infos = textworld.EnvInfos(
            objective=True, won=True, lost=True, score=True, max_score=True, policy_commands=True,
            extras=["walkthrough"],
        )  # fmt: skip
        game = textworld.start(str(path), infos)
        state = game.reset()
        walkthrough = state["policy_commands"] or state["extra.walkthrough"] or ()
        first = f"{clean_feedback(state['feedback'])}\n\n{self.manual()}"
        return first, Adventure(game, state, walkthrough)

    def expert(self) -> MoveExpert:
        """Return an expert that solves the game from its first turn. It cannot recover if the agent has left it."""
        adventure = self._current()
        return self._expert(lambda observation: adventure.advise())


def clean_feedback(feedback: str) -> str:
    """Return what a game tells, without its banner and the status line of a terminal."""
    text = _END.sub("", _BANNER.sub("", _STATUS.sub("", feedback))).strip().removesuffix(">")
    return _GAP.sub("\n\n", text).strip()


def _compile(textworld: Any, family: str, number: int, path: Path) -> None:
    """Generate a game and compile it at `path`, which appears only when it is whole."""
    settings = FAMILIES[family](number)
    with tempfile.TemporaryDirectory(prefix="horizonrl-textworld-") as folder:
        options = textworld.GameOptions()
        options.seeds = number
        options.path = str(Path(folder) / path.name)
        if family == "custom":
            options.nb_rooms, options.nb_objects = settings["rooms"], settings["objects"]
            options.quest_length = settings["quest"]
            game = hub_module("textworld.generator", EXTRA).make_game(options)
        else:
            _, make, _ = hub_module("textworld.challenges", EXTRA).CHALLENGES[f"tw-{family}"]
            game = make(settings, options)
        compiled = Path(hub_module("textworld.generator", EXTRA).compile_game(game, options))
        path.parent.mkdir(parents=True, exist_ok=True)
        # The facts of the game first: `start` reads them beside the compiled file.
        _copy(compiled.with_suffix(".json"), path.with_suffix(".json"))
        _copy(compiled, path)


def _copy(source: Path, path: Path) -> None:
    """Copy a file, since the two folders may be on two disks."""
    # Actors of one host may compile the same game at the same time.
    with atomic_write(path, rivals=True) as incoming:
        shutil.copyfile(source, incoming)
