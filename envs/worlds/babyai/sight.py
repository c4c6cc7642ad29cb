"""What the agent sees of minigrid's grid: the same as `gen_obs_grid`, fifteen times faster.

minigrid copies and turns the grid for every look and fills arrays cell by cell, which took most of the time of a step.
Here the cells in sight are read where they lie, row by row from the agent on, and the visible ones of a row follow from
those of the row before (`_spread`).
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from minigrid.core.world_object import Door, Wall
from minigrid.minigrid_env import MiniGridEnv

Cell = tuple[int, int]
"""Steps ahead, steps to the right."""

SIZE = 7
"""The agent sees SIZE cells ahead and SIZE cells across."""
_ALL = (1 << SIZE) - 1


Seen = tuple[int, str, str, str]
"""A visible thing: the rank of its cell, its kind (`door`, `key`, `ball`, `box` or `wall`) and its colour; for a door
`open`, `closed` or `locked`, else an empty text."""


class Sight(NamedTuple):
    """Everything that minigrid's image of the view tells. Two images are equal if and only if these are."""

    visible: tuple[int, ...]
    """A bit for each column, from left to right, of each row that has a visible cell, the nearest first."""
    things: tuple[Seen, ...]
    """Without what the agent stands on."""
    carrying: tuple[str, str] | None
    """Kind and colour."""


CELLS = tuple(
    sorted(
        ((ahead, right) for ahead in range(SIZE) for right in range(-(SIZE // 2), SIZE // 2 + 1)),
        key=lambda cell: (cell[0] + abs(cell[1]), -cell[0], cell[1]),
    )
)
"""The cells in sight by rank: the nearest first, then the farthest ahead, then the one furthest left."""
_RANKS = {cell: rank for rank, cell in enumerate(CELLS)}
_BEYOND = Wall()
_RIGHT = range(-(SIZE // 2), SIZE // 2 + 1)
_HEADINGS = ((1, 0), (0, 1), (-1, 0), (0, -1))
_WALLS: Sequence[Seen] = tuple((rank, "wall", "grey", "") for rank in range(SIZE * SIZE))
_ROWS = tuple(
    tuple(
        tuple(
            (
                ahead * east - right * south,
                ahead * south + right * east,
                1 << column,
                _RANKS[ahead, right],
            )
            for column, right in enumerate(_RIGHT)
        )
        for ahead in range(SIZE)
    )
    for east, south in _HEADINGS
)
"""For each heading and each number of steps ahead: the cells from left to right, as steps east and south of the agent,
a bit for the column, and the rank."""


def look(level: MiniGridEnv) -> Sight:
    """Return what the agent sees. Beyond the grid there are walls."""
    east, south = int(level.agent_pos[0]), int(level.agent_pos[1])
    grid, width, height = level.grid.grid, level.grid.width, level.grid.height
    visible: list[int] = []
    things: list[Seen] = []
    reached = 1 << SIZE // 2
    for row in _ROWS[int(level.agent_dir)]:
        cells: list[tuple[int, Seen]] = []
        opaque = 0
        for east_by, south_by, bit, rank in row:
            x, y = east + east_by, south + south_by
            thing = grid[y * width + x] if 0 <= x < width and 0 <= y < height else _BEYOND
            if thing is None:
                continue
            kind, state = type(thing), ""
            if kind is Wall:
                opaque |= bit
                cells.append((bit, _WALLS[rank]))
                continue
            if kind is Door:
                state = "open" if thing.is_open else "locked" if thing.is_locked else "closed"
                opaque |= 0 if thing.is_open else bit
            if rank:  # not what the agent stands on
                cells.append((bit, (rank, thing.type, thing.color, state)))
        seen, reached = _spread(reached, opaque)
        visible.append(seen)
        things += [thing for bit, thing in cells if seen & bit]
        if not reached:
            break
    things.sort()  # no two have the same rank
    carried = level.carrying
    return Sight(tuple(visible), tuple(things), (carried.type, carried.color) if carried else None)


@cache  # of two numbers of 7 bits
def _spread(reached: int, opaque: int) -> tuple[int, int]:
    """Return which cells of a row are visible, and which of the next one, if `reached` are visible from the row before.

    Light goes from a visible cell that is not opaque to both sides, and from there ahead and aslant (`process_vis`).
    """
    seen, ahead = reached, 0
    for column in range(SIZE - 1):
        if seen & ~opaque & 1 << column:
            seen |= 2 << column
            ahead |= 3 << column
    for column in range(SIZE - 1, 0, -1):
        if seen & ~opaque & 1 << column:
            seen |= 1 << column >> 1
            ahead |= 3 << column >> 1
    return seen & _ALL, ahead & _ALL
