"""The expert. It sees the whole grid and plans from its present state, so it can take over in any episode.

It finds the first unfinished part of the mission and the cheapest path to where that part can be done. It clears what
is in the way (for a locked door it fetches the key, an object it carries aside) and takes the action that leads
farthest along the path.
"""

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from minigrid.core.actions import Actions
from minigrid.core.world_object import Box, Door, WorldObj
from minigrid.envs.babyai.core.roomgrid_level import RoomGridLevel
from minigrid.envs.babyai.core.verifier import (
    AfterInstr,
    GoToInstr,
    Instr,
    ObjDesc,
    OpenInstr,
    PickupInstr,
    PutNextInstr,
    SeqInstr,
)

from horizonrl.common.errors import EnvironmentFailure
from horizonrl.envs.game import Move
from horizonrl.envs.worlds.babyai.sight import Cell
from horizonrl.envs.worlds.babyai.view import HEADINGS, Moves
from horizonrl.envs.worlds.babyai.world import GridWorld

Place = tuple[int, int, int]
"""Column, row and direction: 0 is to the right, 1 down."""

TO_OPEN, TO_REMOVE, TO_UNLOCK = 1, 20, 60
"""The extra cost, in steps, of entering the cell of a closed door, of an object, of a locked door without its key."""
RING = ((1, 0), (1, 1), (0, 1), (-1, 1), (-1, 0), (-1, -1), (0, -1), (1, -1))
MOST_ERRANDS = 12
"""The most nested errands: a door waits for its key, the key for another door. A deeper plan goes in circles."""


@dataclass(frozen=True, slots=True)
class Errand:
    """Face one of the cells, then do something there: `toggle`, `pickup`, `drop`, or nothing."""

    cells: Collection[Cell]
    then: str
    why: str
    costs: Mapping[Place, int]
    """The remaining cost of the path from each place that is not farther away than the agent."""
    unlocks: bool
    """The path leads through a locked door, and the agent carries its key."""


def next_move(world: GridWorld) -> Move:
    """Return the move that makes the most progress on the present errand."""
    errand = Planner(world.level).errand()
    return Move(best_action(world, errand), errand.why)


class Planner:
    """Plans once, from the present grid. Raises EnvironmentFailure if there is no path."""

    def __init__(self, level: RoomGridLevel) -> None:
        self._level = level
        self._here = here(level)
        grid = level.grid
        cells = ((x, y) for x in range(grid.width) for y in range(grid.height))
        self._tolls = {
            cell: toll
            for cell in cells
            if (toll := _toll(grid.get(*cell), level.carrying)) is not None
        }
        """The extra cost of entering each cell. Walls, and doors whose keys are being fetched, are missing."""
        self._ways: set[Cell] = {self._here[:2]}
        """The cells of the paths planned so far."""
        self._errands = 0

    def errand(self) -> Errand:
        """Return what to do next."""
        match open_part(self._level.instrs):
            case GoToInstr(desc=desc):
                return self._reach(
                    _cells(desc.obj_poss), "", f"I go to the {_describe_object(desc)}."
                )
            case OpenInstr(desc=desc):
                return self._open([door for door in desc.obj_set if isinstance(door, Door)])
            case PickupInstr(desc=desc):
                return self._pick_up(
                    self._movable(desc), f"I pick up the {_describe_object(desc)}."
                )
            case PutNextInstr(desc_move=moved, desc_fixed=fixed):
                return self._put_next(moved, fixed)
            case part:
                raise EnvironmentFailure(
                    f"the expert knows no mission such as {type(part).__name__}"
                )

    def _open(self, doors: list[Door]) -> Errand:
        """Open one of the doors; when all are, close one first."""
        ready = [
            door
            for door in doors
            if not door.is_open and (not door.is_locked or _is_key(self._level.carrying, door))
        ]
        if not ready and (locked := [door for door in doors if door.is_locked]):
            return self._fetch_key(locked[0])
        ready = ready or doors
        return self._reach(self._where(ready), "toggle", f"I open the {ready[0].color} door.")

    def _put_next(self, moved: ObjDesc, fixed: ObjDesc) -> Errand:
        there = [(x, y) for x, y in _cells(fixed.obj_poss) if self._level.grid.get(x, y)]
        beside = [(x + dx, y + dy) for x, y in there for dx, dy in HEADINGS]
        free = [cell for cell in beside if self._is_empty(cell)]
        if not free:
            taken = [cell for cell in beside if self._tolls.get(cell) == TO_REMOVE]
            return (
                self._pick_up(taken, f"I make room next to the {_describe_object(fixed)}.")
                if taken
                else self._put_aside()
            )
        # Clear the path first: the agent carries one thing, so it could not clear anything with the object in hand.
        to_drop = self._reach(free, "drop", f"I put it next to the {_describe_object(fixed)}.")
        if to_drop.cells is not free or any(
            self._level.carrying is object for object in moved.obj_set
        ):
            return to_drop
        return self._pick_up(self._movable(moved), f"I need the {_describe_object(moved)} first.")

    def _pick_up(self, cells: list[Cell], why: str) -> Errand:
        errand = self._reach(cells, "pickup", why)
        ready = errand.cells is not cells or errand.unlocks or self._level.carrying is None
        return errand if ready else self._put_aside()

    def _fetch_key(self, door: Door) -> Errand:
        grid = self._level.grid
        cells = self._where([door])
        for cell in cells:
            self._tolls.pop(cell, None)
        # Clear the path first, for the same reason: with the key in hand the agent can carry nothing else.
        to_open = self._reach(cells, "toggle", f"I open the {door.color} door.")
        if to_open.cells is not cells:
            return to_open
        if keys := self._where([thing for thing in grid.grid if _is_key(thing, door)]):
            return self._pick_up(keys, f"I need the {door.color} key for the door.")
        boxes = self._where(
            [
                thing
                for thing in grid.grid
                if isinstance(thing, Box) and _is_key(thing.contains, door)
            ]
        )
        return (
            self._reach(boxes, "toggle", "The key must be in the box.")
            if boxes
            else self._put_aside()
        )

    def _put_aside(self) -> Errand:
        """Put down the carried thing, if possible where it blocks no path."""
        empty = [cell for cell in self._tolls if self._is_empty(cell)]
        aside = [cell for cell in empty if self._is_open_ground(cell)]
        off_the_ways = [cell for cell in empty if cell not in self._ways]
        near = (
            cells for cells in (aside, off_the_ways) if self._here in self._costs(cells, TO_OPEN)
        )
        return self._reach(next(near, empty), "drop", "I put down what I carry.")

    def _is_open_ground(self, cell: Cell) -> bool:
        """Return whether no door or thing is next to the cell, and an object in it could be walked around."""
        ring = [self._is_empty((cell[0] + dx, cell[1] + dy)) for dx, dy in RING]
        gaps = sum(ring[index - 1] and not ring[index] for index in range(len(RING)))
        beside = [self._level.grid.get(cell[0] + dx, cell[1] + dy) for dx, dy in HEADINGS]
        return gaps <= 1 and all(thing is None or thing.type == "wall" for thing in beside)

    def _reach(self, cells: list[Cell], then: str, why: str) -> Errand:
        """Return the errand to face one of the cells, or the errand that has to come before it."""
        self._errands += 1
        costs = self._costs(cells)
        if self._here not in costs or self._errands > MOST_ERRANDS:
            raise EnvironmentFailure(
                f"the expert finds no way on its errand ({why}) from {self._here} to {cells}"
            )
        way = list(self._way(costs))
        self._ways.update(way)
        hindrance = next(
            (cell for cell in way if self._tolls.get(cell) in (TO_REMOVE, TO_UNLOCK)), None
        )
        if hindrance is None:
            unlocks = any(getattr(self._level.grid.get(*cell), "is_locked", False) for cell in way)
            return Errand(cells, then, why, costs, unlocks)
        match self._level.grid.get(*hindrance):
            case Door() as door:
                return self._fetch_key(door)
            case _:
                return self._pick_up([hindrance], "Something is in the way.")

    def _costs(self, cells: list[Cell], highest_toll: int = TO_UNLOCK) -> dict[Place, int]:
        """Return the cost of facing one of the cells, by Dijkstra's algorithm from the cells back to the agent."""
        ends = [
            (x - dx, y - dy, heading) for x, y in cells for heading, (dx, dy) in enumerate(HEADINGS)
        ]
        # Backwards from the goal, so that one search serves every pose from which an action may go on.
        heap = [(0, place) for place in ends if place[:2] in self._tolls]
        heapq.heapify(heap)
        costs: dict[Place, int] = {}
        while heap and self._here not in costs:
            cost, place = heapq.heappop(heap)
            if place in costs:
                continue
            costs[place] = cost
            x, y, heading = place
            heapq.heappush(heap, (cost + 1, (x, y, (heading + 1) % 4)))
            heapq.heappush(heap, (cost + 1, (x, y, (heading - 1) % 4)))
            dx, dy = HEADINGS[heading]
            toll = self._tolls.get((x, y), 0)
            if toll <= highest_toll and (x - dx, y - dy) in self._tolls:
                heapq.heappush(heap, (cost + 1 + toll, (x - dx, y - dy, heading)))
        return costs

    def _way(self, costs: Mapping[Place, int]) -> Iterator[Cell]:
        """Yield the cells that a cheapest way enters."""
        place = self._here
        while remaining := costs[place]:
            x, y, heading = place
            dx, dy = HEADINGS[heading]
            front = (x + dx, y + dy, heading)
            turned = [(x, y, (heading + turn) % 4) for turn in (1, -1)]
            place = next((turn for turn in turned if costs.get(turn) == remaining - 1), front)
            if place == front:
                yield front[:2]

    def _is_empty(self, cell: Cell) -> bool:
        return self._tolls.get(cell) == 0 and self._level.grid.get(*cell) is None

    def _movable(self, desc: ObjDesc) -> list[Cell]:
        """Return where the described things are; a `grey object` can be a wall too."""
        return self._where([thing for thing in desc.obj_set if thing.can_pickup()])

    def _where(self, things: Collection[WorldObj]) -> list[Cell]:
        """Return the cells of those things that are on the grid. Things that are carried or in a box have none."""
        grid = self._level.grid
        return [
            (index % grid.width, index // grid.width)
            for index, thing in enumerate(grid.grid)
            if thing and thing in things
        ]


def best_action(world: GridWorld, errand: Errand) -> str:
    """Return the action that completes an errand, or else the one that leaves the lowest remaining cost."""
    x, y, heading = here(world.level)
    if errand.costs[x, y, heading] == 0 and errand.then in ("toggle", "drop"):
        return errand.then
    (fx, fy), (rx, ry) = HEADINGS[heading], HEADINGS[(heading + 1) % 4]
    verb, last_moves = {"toggle": ("toggle and go through", 2), "pickup": ("pickup", 1)}.get(
        errand.then, ("go to", 0)
    )
    final = {
        f"{verb} {thing.name}"
        for thing in world.view.things
        for ahead, right in [thing.cell]
        if (x + ahead * fx + right * rx, y + ahead * fy + right * ry) in errand.cells
    }
    choices = []
    for action, moves in world.view.actions.items():
        if action in final:
            moves = moves[: len(moves) - last_moves]
        elif action in ("toggle", "drop") or action.startswith("pickup"):
            continue
        remaining = errand.costs.get(final_position(world.level, moves))
        if remaining is not None:
            choices.append((remaining - (action in final), len(moves), action))
    return min(choices, default=(0, 0, "turn left"))[2]


def here(level: RoomGridLevel) -> Place:
    x, y = level.agent_pos
    return int(x), int(y), int(level.agent_dir)


def final_position(level: RoomGridLevel, moves: Moves) -> Place:
    """Return the place where moves lead on the grid as it is."""
    x, y, heading = here(level)
    opened = None
    for move in moves:
        dx, dy = HEADINGS[heading]
        front = (x + dx, y + dy)
        if move in (Actions.left, Actions.right):
            heading = (heading + (1 if move == Actions.right else -1)) % 4
        elif move == Actions.toggle:
            opened = front
        elif move == Actions.forward:
            thing = level.grid.get(*front)
            if thing is not None and not thing.can_overlap() and front != opened:
                break
            x, y = front
    return x, y, heading


def open_part(instr: Instr) -> Instr:
    """Return the first part of a mission that is not done yet."""
    if not isinstance(instr, SeqInstr):
        return instr
    if isinstance(instr, AfterInstr):
        return open_part(instr.instr_a if instr.b_done == "success" else instr.instr_b)
    return open_part(instr.instr_b if instr.a_done == "success" else instr.instr_a)


def _toll(thing: WorldObj | None, carrying: WorldObj | None) -> int | None:
    """Return what it costs beyond a step to enter the cell of a thing; None for a wall."""
    match thing:
        case None | Door(is_open=True):
            return 0
        case Door(is_locked=True) as door:
            return TO_OPEN if _is_key(carrying, door) else TO_UNLOCK
        case Door():
            return TO_OPEN
        case _:
            return TO_REMOVE if thing.can_pickup() else None


def _is_key(thing: WorldObj | None, door: Door) -> bool:
    return thing is not None and thing.type == "key" and thing.color == door.color


def _describe_object(desc: ObjDesc) -> str:
    return " ".join(filter(None, (desc.color, desc.type or "object")))


def _cells(positions: Iterable[Sequence[int]]) -> list[Cell]:
    return [(int(x), int(y)) for x, y in positions]
