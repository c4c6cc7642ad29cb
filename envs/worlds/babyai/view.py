"""What the agent sees and can do, computed from what is in sight by one breadth-first search.

All positions are relative to the agent: a cell is a number of steps ahead and a number of steps to the right. Knows
nothing about the rest of the grid, about wording or about missions.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from minigrid.core.actions import Actions

from horizonrl.envs.worlds.babyai.sight import CELLS, SIZE, Cell, Sight

Pose = tuple[int, int, int]
"""A cell and a heading in quarter turns to the right."""
Moves = tuple[int, ...]
"""Actions of minigrid."""

VIEWS_KEPT = 512
"""Views that a process keeps with their actions, about 8 kB each: the episodes of a group often see the same."""
HEADINGS = ((1, 0), (0, 1), (-1, 0), (0, -1))
START: Pose = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class Thing:
    kind: str
    """`door`, `key`, `ball`, `box` or `wall`."""
    colour: str
    state: str
    """For doors: `open`, `closed` or `locked`; else empty."""
    cell: Cell
    number: int = 0
    """Distinguishes things with the same name, the nearest first."""

    @property
    def kind_name(self) -> str:
        return " ".join(filter(None, (self.colour, self.state, self.kind)))

    @property
    def name(self) -> str:
        return f"{self.kind_name} {self.number}"


@dataclass(frozen=True)
class View:
    things: Sequence[Thing]
    """Everything except walls, the nearest first."""
    barrier: Thing | None
    """The first wall or box straight ahead."""
    carrying: Thing | None
    blocked: Mapping[Cell, Thing]
    """The visible cells that cannot be walked on."""

    @cached_property
    def actions(self) -> Mapping[str, Moves]:
        """The available actions with their moves, in AgentGym's order."""
        ahead, ways = self.blocked.get((1, 0)), Ways(self.blocked)
        moves: dict[str, Moves] = {"turn left": (Actions.left,), "turn right": (Actions.right,)}
        if ahead is None:
            moves["move forward"] = (Actions.forward,)
        if self.carrying is None:
            for thing in self.things:
                if thing.kind != "door" and (way := ways.facing(thing.cell)) is not None:
                    moves[f"pickup {thing.name}"] = (*way, Actions.pickup)
        elif ahead is None and not any(thing.cell == (1, 0) for thing in self.things):
            moves["drop"] = (Actions.drop,)
        for door in self.things:
            if door.state == "open" and (way := ways.to(door.cell)) is not None:
                moves[f"go through {door.name}"] = way
            elif self.can_open(door) and (way := ways.facing(door.cell)) is not None:
                moves[f"toggle and go through {door.name}"] = (
                    *way,
                    Actions.toggle,
                    Actions.forward,
                )
        if any(
            thing.cell == (1, 0)
            and (thing.kind == "box" or thing.state == "open" or self.can_open(thing))
            for thing in self.things
        ):
            moves["toggle"] = (Actions.toggle,)
        for thing in self.things:
            if (way := ways.facing(thing.cell)) is not None:
                # Does nothing, but makes minigrid check the mission.
                moves[f"go to {thing.name}"] = way or (Actions.done,)
        return moves

    def can_open(self, door: Thing) -> bool:
        key = self.carrying
        has_key = key is not None and (key.kind, key.colour) == ("key", door.colour)
        return door.state == "closed" or (door.state == "locked" and has_key)

    def why_not(self, action: str) -> str:
        """Return the reason why an action is not available."""
        verb, thing = next(
            (
                (action.removesuffix(thing.name).strip(), thing)
                for thing in self.things
                if action.endswith(thing.name)
            ),
            (action, None),
        )
        match verb:
            case "move forward":
                return "There is a barrier in front of you, you can't move forward."
            case "drop" if self.carrying is None:
                return "You cannot drop the object, as you are not carrying anything."
            case "drop":
                return "You cannot drop the object, as there is already an object in front of you."
            case "toggle":
                return "You cannot toggle, as there is no door in front of you that you can open."
            case "pickup" if self.carrying is not None:
                return "You cannot pick up anything, as you are already carrying something."
            case "go through" if thing and thing.state == "closed":
                return f"You cannot go through {thing.name}, as it is closed. You should toggle it first."
            case "go through" | "toggle and go through" if thing and thing.state == "locked":
                return (
                    f"You cannot {verb} {thing.name}, as you are not carrying a key of its color."
                )
            case "go to" | "pickup" | "go through" | "toggle and go through" if thing:
                return f"You cannot {verb} {thing.name}, as there is no path leading to it."
        return "The action is not recognized. Please check valid actions."


class Paths:
    """What a search over poses has found. The search fills it; then it tells the way into a cell, or to face one."""

    def __init__(self) -> None:
        self._came: dict[Pose, tuple[Pose, int]] = {}
        self._poses_in: dict[Cell, Pose] = {}
        self._poses_facing: dict[Cell, Pose] = {}

    def to(self, cell: Cell) -> Moves | None:
        return self._way(self._poses_in.get(cell))

    def facing(self, cell: Cell) -> Moves | None:
        return self._way(self._poses_facing.get(cell))

    def _way(self, pose: Pose | None) -> Moves | None:
        if pose is None:
            return None
        moves = []
        while pose != START:
            pose, action = self._came[pose]
            moves.append(action)
        return tuple(reversed(moves))


class Ways(Paths):
    """The shortest paths from the agent to all cells, over cells that are free or hidden from view."""

    def __init__(self, blocked: Mapping[Cell, Thing]) -> None:
        super().__init__()
        queue = deque([START])
        while queue:
            ahead, right, heading = pose = queue.popleft()
            step = HEADINGS[heading]
            front = (ahead + step[0], right + step[1])
            self._poses_in.setdefault((ahead, right), pose)
            self._poses_facing.setdefault(front, pose)
            for action, after in (
                (Actions.forward, (*front, heading)),
                (Actions.left, (ahead, right, (heading - 1) % 4)),
                (Actions.right, (ahead, right, (heading + 1) % 4)),
            ):
                if (
                    after not in self._came
                    and after != START
                    and after[:2] not in blocked
                    and _in_sight(after)
                ):
                    self._came[after] = (pose, action)
                    queue.append(after)


@lru_cache(maxsize=VIEWS_KEPT)
def see(sight: Sight) -> View:
    """Return the view of what is in sight. Episodes share it: nobody changes a view."""
    return View(*parts(sight))


def parts(sight: Sight) -> tuple[Sequence[Thing], Thing | None, Thing | None, Mapping[Cell, Thing]]:
    """Return the fields of a view."""
    counts: dict[str, int] = {}
    things, barrier, blocked = [], None, {}
    for rank, kind, colour, state in sight.things:
        thing = Thing(kind, colour, state, CELLS[rank])
        if kind != "wall":
            counts[thing.kind_name] = number = counts.get(thing.kind_name, 0) + 1
            thing = Thing(kind, colour, state, thing.cell, number)
            things.append(thing)
        if barrier is None and thing.cell[1] == 0 and kind in ("wall", "box"):
            barrier = thing
        if state != "open":
            blocked[thing.cell] = thing
    carrying = Thing(*sight.carrying, "", (0, 0)) if sight.carrying else None
    return things, barrier, carrying, blocked


def _in_sight(pose: Pose) -> bool:
    return 0 <= pose[0] < SIZE and abs(pose[1]) <= SIZE // 2
