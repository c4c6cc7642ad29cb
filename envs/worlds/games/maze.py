"""Maze: walk to the goal within 50 steps. The reward is 1 at the goal, else 0.

The agent reads its position, the goal's position and on which sides there are walls. The mazes are generated, or the
one maze that AgentGym took from LMRL-Gym.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Literal

from pydantic import validate_call

from horizonrl.envs.api import Step, TaskSpec
from horizonrl.envs.formats import ActionFormat, Command
from horizonrl.envs.game import GameEnvironment, Move, Style, random_for
from horizonrl.envs.splits import lowest_hashes, split_tasks
from horizonrl.envs.text_limits import Chars

COMMANDS = (
    Command("move", "move {direction}", "one cell up, down, left or right; row 0 is at the top"),
)
STEPS = 50
TRAIN, TEST, LMRL_TEST = 215, 25, 5
SIZES = {"small": 4, "medium": 6, "large": 8}
"""Cells on a side, by category."""
LONGEST_WAY = 30
Mazes = Literal["made", "lmrl"]

Cell = tuple[int, int]
"""Column and row."""
SIDES: dict[str, Cell] = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}
LMRL_GOAL: Cell = (6, 8)
LMRL_STARTS: tuple[Cell, ...] = (
    *((column, 1) for column in (1, 2, 3, 4, 5, 7, 8, 9, 10, 11)),
    *((3, row) for row in (2, 3, 4, 5)),
    (4, 5), (5, 5), (6, 5), (6, 6), (6, 7), (7, 5), (8, 5), (9, 5),
    *((9, row) for row in (4, 3, 2)),
)  # fmt: skip
"""The starts in the double-T maze, by AgentGym's number. Its number 25 is the goal itself. There are no other cells."""


class Maze:
    """Cells, and which of them are connected. There is exactly one way between any two cells."""

    def __init__(self, size: int, draw: Random) -> None:
        self.ways: dict[Cell, dict[str, Cell]] = {(0, 0): {}}
        trail = [(0, 0)]
        while trail:  # depth-first: dig into an unvisited neighbour, turn back if there is none
            here = trail[-1]
            new = {
                side: cell for side, cell in neighbours(here, size).items() if cell not in self.ways
            }
            if not new:
                trail.pop()
                continue
            side = draw.choice(list(new))
            self.ways[here][side] = new[side]
            self.ways[new[side]] = {_OPPOSITE[side]: here}
            trail.append(new[side])

    @classmethod
    def from_cells(cls, cells: Collection[Cell]) -> "Maze":
        """Return a maze of the given cells, in which neighbouring cells are connected."""
        maze = cls.__new__(cls)
        maze.ways = {
            cell: {
                side: other
                for side, (dx, dy) in SIDES.items()
                if (other := (cell[0] + dx, cell[1] + dy)) in cells
            }
            for cell in cells
        }
        return maze

    def steps_to(self, goal: Cell) -> dict[Cell, int]:
        """Return the number of steps to the goal from every cell."""
        steps, edge = {goal: 0}, [goal]
        for cell in edge:
            for other in self.ways[cell].values():
                if other not in steps:
                    steps[other] = steps[cell] + 1
                    edge.append(other)
        return steps


@dataclass
class Walk:
    """One walk through a maze, until the goal or the 50th step."""

    maze: Maze
    here: Cell
    goal: Cell
    steps: int = 0

    def follow(self, action: str) -> Step:
        """Take a step. A step against a wall, or an action that is no step, counts too."""
        self.steps += 1
        side = action.lower().removeprefix("move ").strip(" .")
        ways = self.maze.ways[self.here]
        hint = (
            ""
            if side in ways
            else "There is a wall. "
            if side in SIDES
            else "Move up, down, left or right. "
        )
        self.here = ways.get(side, self.here)
        if self.here == self.goal:
            return Step("You are at the goal.", reward=1.0, terminated=True, success=True)
        # The limit is the environment's own: truncated and never terminated (broken is not zero).
        return Step(hint + self.look(), reward=0.0, terminated=False, truncated=self.steps == STEPS)

    @property
    def state(self) -> str:
        """Where the agent stands: the walls of a task never move."""
        return f"{self.here}"

    def look(self) -> str:
        """Return what the agent sees."""
        walls = ", ".join(side for side in SIDES if side not in self.maze.ways[self.here])
        (column, row), (to_column, to_row) = self.here, self.goal
        return (
            f"You are at column {column}, row {row}. The goal is at column {to_column}, row {to_row}. "
            f"Walls: {walls or 'none'}."
        )

    def advise(self) -> Move:
        """Take the shortest way."""
        steps, ways = self.maze.steps_to(self.goal), self.maze.ways[self.here]
        side = min(ways, key=lambda side: steps[ways[side]])
        return Move(f"move {side}", f"The way to the goal leads {side}.")


class AgentGymWalk(Walk):
    """A walk in AgentGym's words: the row comes before the column, and the failure takes one more turn."""

    def follow(self, action: str) -> Step:
        """Take a step. An action that is none of the four changes nothing and counts."""
        if self.steps == STEPS:
            return Step("Failure\n", reward=-1.0, terminated=True)
        self.steps += 1
        side = action.removeprefix("move ") if action.startswith("move ") else ""
        self.here = self.maze.ways[self.here].get(side, self.here)
        if self.here == self.goal:
            return Step("Success\n", reward=1.0, terminated=True, success=True)
        return Step(self.look(), reward=0.0, terminated=False)

    def look(self) -> str:
        """Return what the agent sees."""
        (column, row), (to_column, to_row) = self.here, self.goal
        walls = [
            words
            for side, words in _AGENTGYM_SIDES.items()
            if side not in self.maze.ways[self.here]
        ]
        near = {0: "There are no walls near you.", 1: f"There is a wall {', '.join(walls)}."}
        return (
            f"The goal is at position {to_row}, {to_column}. Your current position is at position {row}, {column}. "
            + near.get(len(walls), f"There are walls {', '.join(walls)}.")
        )


class MazeWalk(GameEnvironment[Walk]):
    """One maze at a time.

    mazes: `made` for our 240 mazes, `lmrl` for the maze of LMRL-Gym and AgentGym with each of its 25 starts
    format: how the agent names its action (envs/formats.py)
    style: `compact` omits the sentence about the task
    max_observation_chars: bound of every observation
    """

    env_id = "maze"
    version = "1"
    commands = COMMANDS

    @validate_call
    def __init__(
        self,
        *,
        mazes: Mazes = "made",
        format: ActionFormat = "react",
        style: Style = "full",
        max_observation_chars: Chars = 2_048,
    ) -> None:
        super().__init__(format, style, max_observation_chars)
        self._mazes: Mazes = mazes
        self.version = self.version if mazes == "made" else f"{self.version} {mazes}"

    @classmethod
    @validate_call
    def tasks(cls, *, mazes: Mazes = "made") -> Sequence[TaskSpec]:
        """Return the 240 mazes, in alternating sizes, or the 25 starts."""
        if mazes == "made":
            return split_tasks(_sizes(), lowest_hashes(_sizes(), TEST))
        return split_tasks(dict.fromkeys(_starts(), "lmrl"), lowest_hashes(_starts(), LMRL_TEST))

    def state(self) -> str:
        """Return where the agent stands."""
        return self._current().state

    def begin(self, task_id: str) -> tuple[str, Walk]:
        """Return where the agent stands."""
        walk = (AgentGymWalk if self._style == "agentgym" else Walk)(*self._laid_out(task_id))
        rules = f"Walk through a maze to the goal, in {STEPS} steps at most."
        return self.introduce(rules, walk.look()), walk

    def _laid_out(self, task_id: str) -> tuple[Maze, Cell, Cell]:
        """Return the maze of a task, its start and its goal."""
        if self._mazes == "lmrl":
            start = self.find(_starts(), task_id)
            return Maze.from_cells({*LMRL_STARTS, LMRL_GOAL}), start, LMRL_GOAL
        category = self.find(_sizes(), task_id)
        draw, size = random_for(task_id), SIZES[category]
        maze = Maze(size, draw)
        # Sorted, so that the draw does not depend on the order in which the cells were dug.
        goal = draw.choice(sorted(maze.ways))
        steps = maze.steps_to(goal)
        farthest = min(LONGEST_WAY, max(steps.values()))
        return (
            maze,
            draw.choice(
                [cell for cell in sorted(steps) if farthest // 2 < steps[cell] <= farthest]
            ),
            goal,
        )


_AGENTGYM_SIDES = {
    "right": "to your right",
    "left": "to your left",
    "up": "above you",
    "down": "below you",
}
_OPPOSITE = {"up": "down", "down": "up", "left": "right", "right": "left"}


def neighbours(cell: Cell, size: int) -> dict[str, Cell]:
    """Return the cells around a cell, by side."""
    around = {side: (cell[0] + dx, cell[1] + dy) for side, (dx, dy) in SIDES.items()}
    return {side: (x, y) for side, (x, y) in around.items() if 0 <= x < size and 0 <= y < size}


@cache
def _starts() -> dict[str, Cell]:
    return {f"lmrl-{number:02d}": start for number, start in enumerate(LMRL_STARTS)}


@cache
def _sizes() -> dict[str, str]:
    categories = list(SIZES)
    return {
        f"maze-{number:03d}": categories[number % len(categories)] for number in range(TRAIN + TEST)
    }
