"""AgentGym's text layer, for the styles `compat` and `agentgym`, because AgentGym's models were trained on it.

Our own text layer differs on purpose (docs/environments/babyai.md). This one keeps AgentGym's peculiarities, because
they decide what an agent reads and earns: paths lead through closed doors, a path may be longer than necessary, objects
that cannot be reached shift the numbers of equal ones, the moves of an action continue after the mission is won, and a
win that pays 0.5 or less does not count.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import product

from minigrid.core.actions import Actions

from horizonrl.envs.worlds.babyai.sight import SIZE, Cell, Sight, look
from horizonrl.envs.worlds.babyai.view import (
    HEADINGS,
    START,
    VIEWS_KEPT,
    Moves,
    Paths,
    Pose,
    Thing,
    View,
    parts,
)
from horizonrl.envs.worlds.babyai.world import GridWorld, Outcome

LEAST_REWARD = 0.5
"""A win that pays this much or less does not end the episode."""
_UNMOVED = "No change in state."
_TURNS = ((int(Actions.left), -1), (int(Actions.right), 1))


@dataclass(frozen=True)
class AgentGymView(View):
    heading: int = 0
    """The agent's heading in minigrid's numbers. It decides through which cells out of sight a path may lead."""

    @property
    def actions(self) -> Mapping[str, Moves]:
        """The available actions with their moves, in AgentGym's order."""
        return self._offered[0]

    def why_not(self, action: str) -> str:
        """Return the reason why an action is not available."""
        if not action:
            return _UNMOVED
        return self._offered[1].get(
            action, "The action is not recognized. Please check valid actions."
        )

    @cached_property
    def _offered(self) -> tuple[dict[str, Moves], dict[str, str]]:
        offer = _Offer(self)
        offer.walk()
        offer.pick_up()
        offer.drop()
        offer.pass_doors()
        offer.go()
        return offer.actions, offer.reasons


class _Offer:
    """Collects the actions of a view, and the reasons why others are not available."""

    def __init__(self, view: AgentGymView) -> None:
        self._view = view
        self._ways = _Ways(view)
        self.actions: dict[str, Moves] = {
            "turn left": (Actions.left,),
            "turn right": (Actions.right,),
        }
        self.reasons: dict[str, str] = {}

    def walk(self) -> None:
        barrier = self._view.barrier
        if barrier is None or barrier.cell[0] > 1:
            self.actions["move forward"] = (Actions.forward,)
        else:
            self.reasons["move forward"] = (
                "There is a barrier in front of you, you can't move forward."
            )

    def pick_up(self) -> None:
        if self._view.carrying is None:
            self._reach(
                "pickup",
                (thing for thing in self._view.things if thing.kind != "door"),
                (Actions.pickup,),
            )

    def drop(self) -> None:
        ahead = self._view.blocked.get((1, 0))
        if self._view.carrying is None:
            self.reasons["drop"] = "You cannot drop the object, as you are not carrying anything."
        elif ahead is not None and ahead.kind != "door":
            self.reasons["drop"] = (
                "You cannot drop the object, as there is already an object in front of you."
            )
        else:
            self.actions["drop"] = (Actions.drop,)

    def pass_doors(self) -> None:
        counted: dict[str, int] = {}
        for door in self._view.things:
            if door.kind != "door":
                continue
            counted[door.kind_name] = door.number
            if door.state == "open":
                self._add(
                    f"go through {door.name}",
                    self._ways.to(door.cell),
                    "there is no path leading to it",
                )
                continue
            if door.state == "closed":
                self.reasons[f"go through {door.name}"] = (
                    f"You cannot go through {door.name}, as it is closed. You should toggle it first."
                )
            elif lacking := self._lacking(door):
                self._add(f"toggle and go through {door.name}", None, lacking)
                continue
            self._open(door, counted)

    def _open(self, door: Thing, counted: Mapping[str, int]) -> None:
        action, way = f"toggle and go through {door.name}", self._ways.facing(door.cell)
        if way is None:
            shown = f"{door.kind_name} {dict(counted)}"  # sic
            self.reasons[action] = (
                f"You cannot toggle and go through {shown}, as there is no path leading to it."
            )
            return
        self.actions[action] = (*way, Actions.toggle, Actions.forward)
        if not way:
            self.actions["toggle"] = (Actions.toggle,)

    def _lacking(self, door: Thing) -> str:
        key = self._view.carrying
        if key is None or key.kind != "key":
            return "you are not carrying a key"
        matches = key.colour == door.colour
        return (
            ""
            if matches
            else "the color of the key you are carrying does not match the color of door"
        )

    def go(self) -> None:
        self._reach("go to", self._view.things, ())

    def _reach(self, verb: str, things: Iterable[Thing], then: Moves) -> None:
        """Offer an action for each thing. A thing that cannot be reached passes its number on to the next one."""
        counts: dict[str, int] = {}
        for thing in things:
            way = self._ways.facing(thing.cell)
            action = f"{verb} {thing.kind_name} {counts.get(thing.kind_name, 0) + 1}"
            self._add(
                action, None if way is None else (*way, *then), "there is no path leading to it"
            )
            counts[thing.kind_name] = counts.get(thing.kind_name, 0) + (way is not None)

    def _add(self, action: str, way: Moves | None, reason: str) -> None:
        if way is None:
            self.reasons[action] = f"You cannot {action}, as {reason}."
        else:
            self.actions[action] = way


class _Ways(Paths):
    """The paths that AgentGym's search finds: to stand in a cell, and to face one.

    If a pose is found again before it leaves the queue, the last predecessor wins. So a path may be longer than the
    shortest one: what a pose came from is settled when the pose leaves the queue.
    """

    def __init__(self, view: AgentGymView) -> None:
        super().__init__()
        after_each = _successors(view.heading in (0, 1), view.heading in (1, 2))
        solid = {cell for cell, thing in view.blocked.items() if thing.kind != "door"}
        seen: set[Pose] = set()
        queue = [START]
        for pose in queue:
            front, successors = after_each[pose]
            if pose not in seen:
                seen.add(pose)
                self._poses_in.setdefault(pose[:2], pose)
                self._poses_facing.setdefault(front, pose)
            for action, after, cell in successors:
                if after not in seen and cell not in solid:
                    self._came[after] = (pose, action)
                    queue.append(after)


@cache  # of four combinations
def _successors(
    behind: bool, right: bool
) -> Mapping[Pose, tuple[Cell, Sequence[tuple[int, Pose, Cell]]]]:
    """Return for each pose the cell in front, and what may come next: action, pose and its cell.

    behind, right: whether a path may lead through the cells one step behind the agent, and one beyond its right edge
    """
    cells = {
        (ahead, side) for ahead in range(-behind, SIZE) for side in range(-(SIZE // 2), SIZE // 2 + 1 + right)
    }  # fmt: skip
    table = {}
    for (ahead, side), heading in product(cells, range(4)):
        front = (ahead + HEADINGS[heading][0], side + HEADINGS[heading][1])
        turns = [
            (action, (ahead, side, (heading + turn) % 4), (ahead, side)) for action, turn in _TURNS
        ]
        steps = [(int(Actions.forward), (*front, heading), front)] if front in cells else []
        table[ahead, side, heading] = (front, [*steps, *turns])
    return table


class AgentGymWorld(GridWorld):
    """A level as AgentGym's server plays it: it ignores the step limit, and repeats the reward of an earlier action."""

    def __init__(self, task_id: str) -> None:
        super().__init__(task_id)
        self._reward = 0.0

    def follow(self, reply_action: str) -> tuple[Outcome, str]:
        """Take an action that is named word for word. Any other text gets an answer and the previous reward again."""
        action = reply_action.lower().strip()
        if "check" in action:
            return self.reject(self.listing())
        if action not in self.view.actions:
            return self.reject(self.view.why_not(action))
        return (self.act(action), "") if self.view.actions[action] else self.reject(_UNMOVED)

    def reject(self, reason: str) -> tuple[Outcome, str]:
        """Answer an action that changes nothing."""
        return Outcome(self._reward), reason

    def act(self, action: str) -> Outcome:
        """Take one of the view's actions: make its moves until one does not change the visible grid."""
        terminated, sight = False, self.sight
        for move in self.view.actions[action]:
            _, reward, terminated, _, _ = self.level.step(Actions(move))
            self._reward = float(reward)
            before, sight = sight, look(self.level)
            # As AgentGym does: what the agent sees decides, not where it stands.
            if before == sight:
                break
        self.sight, self.view = sight, self._view(sight)
        self.completed = terminated
        return Outcome(self._reward, terminated and self._reward > LEAST_REWARD)

    def _view(self, sight: Sight) -> AgentGymView:
        return _see(sight, int(self.level.agent_dir))


@lru_cache(maxsize=VIEWS_KEPT)
def _see(sight: Sight, heading: int) -> AgentGymView:
    return AgentGymView(*parts(sight), heading)
