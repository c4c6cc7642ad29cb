"""AgentGym's text layer, for the styles `compat` and `agentgym`, because AgentGym's models were trained on it.

Our own text layer differs on purpose (docs/environments/babyai.md). This one keeps AgentGym's peculiarities, because
they decide what an agent reads and earns: paths lead through closed doors, a path may be longer than necessary, objects
that cannot be reached shift the numbers of equal ones, the moves of an action continue after the mission is won, and a
win that pays 0.5 or less does not count.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from minigrid.core.actions import Actions

from horizonrl.envs.babyai.view import HEADINGS, SIZE, START, Cell, Moves, Pose, Thing, View
from horizonrl.envs.babyai.world import GridWorld, Outcome

LEAST_REWARD = 0.5
"""A win that pays this much or less does not end the episode."""
_UNMOVED = "No change in state."


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
        return self._offered[1].get(action, "The action is not recognized. Please check valid actions.")

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
        self.actions: dict[str, Moves] = {"turn left": (Actions.left,), "turn right": (Actions.right,)}
        self.reasons: dict[str, str] = {}

    def walk(self) -> None:
        barrier = self._view.barrier
        if barrier is None or barrier.cell[0] > 1:
            self.actions["move forward"] = (Actions.forward,)
        else:
            self.reasons["move forward"] = "There is a barrier in front of you, you can't move forward."

    def pick_up(self) -> None:
        if self._view.carrying is None:
            self._reach("pickup", (thing for thing in self._view.things if thing.kind != "door"), (Actions.pickup,))

    def drop(self) -> None:
        ahead = self._view.blocked.get((1, 0))
        if self._view.carrying is None:
            self.reasons["drop"] = "You cannot drop the object, as you are not carrying anything."
        elif ahead is not None and ahead.kind != "door":
            self.reasons["drop"] = "You cannot drop the object, as there is already an object in front of you."
        else:
            self.actions["drop"] = (Actions.drop,)

    def pass_doors(self) -> None:
        counted: dict[str, int] = {}
        for door in self._view.things:
            if door.kind != "door":
                continue
            counted[door.kind_name] = door.number
            if door.state == "open":
                self._add(f"go through {door.name}", self._ways.to.get(door.cell), "there is no path leading to it")
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
        action, way = f"toggle and go through {door.name}", self._ways.facing.get(door.cell)
        if way is None:
            shown = f"{door.kind_name} {dict(counted)}"  # sic
            self.reasons[action] = f"You cannot toggle and go through {shown}, as there is no path leading to it."
            return
        self.actions[action] = (*way, Actions.toggle, Actions.forward)
        if not way:
            self.actions["toggle"] = (Actions.toggle,)

    def _lacking(self, door: Thing) -> str:
        key = self._view.carrying
        if key is None or key.kind != "key":
            return "you are not carrying a key"
        matches = key.colour == door.colour
        return "" if matches else "the color of the key you are carrying does not match the color of door"

    def go(self) -> None:
        self._reach("go to", self._view.things, ())

    def _reach(self, verb: str, things: Iterable[Thing], then: Moves) -> None:
        """Offer an action for each thing. A thing that cannot be reached passes its number on to the next one."""
        counts: dict[str, int] = {}
        for thing in things:
            way = self._ways.facing.get(thing.cell)
            action = f"{verb} {thing.kind_name} {counts.get(thing.kind_name, 0) + 1}"
            self._add(action, None if way is None else (*way, *then), "there is no path leading to it")
            counts[thing.kind_name] = counts.get(thing.kind_name, 0) + (way is not None)

    def _add(self, action: str, way: Moves | None, reason: str) -> None:
        if way is None:
            self.reasons[action] = f"You cannot {action}, as {reason}."
        else:
            self.actions[action] = way


class _Ways:
    """The paths that AgentGym's search finds: to stand in a cell, and to face one.

    If a pose is found again before it leaves the queue, the last predecessor wins. So a path may be longer than the
    shortest one.
    """

    def __init__(self, view: AgentGymView) -> None:
        self.to: dict[Cell, Moves] = {}
        self.facing: dict[Cell, Moves] = {}
        solid = {cell for cell, thing in view.blocked.items() if thing.kind != "door"}
        behind, right = (-1 if view.heading in (0, 1) else 0), SIZE // 2 + (view.heading in (1, 2))
        came: dict[Pose, tuple[Pose, int]] = {}
        seen: set[Pose] = set()
        queue = deque([START])
        while queue:
            pose = queue.popleft()
            seen.add(pose)
            step = HEADINGS[pose[2]]
            front = (pose[0] + step[0], pose[1] + step[1])
            if pose[:2] not in self.to or front not in self.facing:
                way = _way(came, pose)
                self.to.setdefault(pose[:2], way)
                self.facing.setdefault(front, way)
            for action, after in (
                (Actions.forward, (*front, pose[2])),
                (Actions.left, (*pose[:2], (pose[2] - 1) % 4)),
                (Actions.right, (*pose[:2], (pose[2] + 1) % 4)),
            ):
                inside = behind <= after[0] < SIZE and -(SIZE // 2) <= after[1] <= right
                if inside and after not in seen and after[:2] not in solid:
                    came[after] = (pose, action)
                    queue.append(after)


def _way(came: Mapping[Pose, tuple[Pose, int]], pose: Pose) -> Moves:
    moves = []
    while pose != START:
        pose, action = came[pose]
        moves.append(action)
    return tuple(reversed(moves))


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
        moves = self.view.actions[action]
        terminated, image = False, self._image()
        for move in moves:
            _, reward, terminated, _, _ = self.level.step(Actions(move))
            self._reward = float(reward)
            before, image = image, self._image()
            # As AgentGym does: what the agent sees decides, not where it stands.
            if np.array_equal(before, image):
                break
        self.view = self._look()
        self.completed, self.over = terminated, terminated and self._reward > LEAST_REWARD
        return Outcome(self._reward, self.over)

    def _image(self) -> npt.NDArray[Any]:
        grid, in_sight = self.level.gen_obs_grid()
        return np.asarray(grid.encode(in_sight))

    def _look(self) -> AgentGymView:
        view = super()._look()
        return AgentGymView(view.things, view.barrier, view.carrying, view.blocked, int(self.level.agent_dir))
