"""The 40 levels and their tasks, by AgentGym's rule: task N is of level `N % 40`, from 0, and seed `N // 40`.

A task is the same for as long as minigrid generates the same levels, so its version is pinned.
"""

import pickle
import re
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from threading import Lock
from typing import Literal

import gymnasium
import minigrid
from minigrid.core.world_object import Wall
from minigrid.envs.babyai.core import roomgrid_level
from minigrid.envs.babyai.core.roomgrid_level import RoomGridLevel

from horizonrl.common.errors import MissingDependency
from horizonrl.envs.api import Split, TaskSpec

MINIGRID = "3.2.0"

Levels = Literal["agentgym", "all"]

_FAMILIES = """\
GoTo: GoToRedBallGrey-v0 GoToRedBall-v0 GoToRedBallNoDists-v0 GoToObjS6-v1 GoToLocalS8N7-v0
GoTo: GoToObjMazeS7-v0 GoToImpUnlock-v0 GoToSeqS5R2-v0 GoToRedBlueBall-v0 GoToDoor-v0
GoTo: GoToObjDoor-v0
Open: Open-v0 OpenRedDoor-v0 OpenDoorLoc-v0 OpenRedBlueDoorsDebug-v0 OpenDoorsOrderN4Debug-v0
PickupMaze: Pickup-v0 UnblockPickup-v0
Pickup: PickupLoc-v0 PickupDistDebug-v0 PickupAbove-v0
PutNext: PutNextLocalS6N4-v0 PutNextS7N4Carrying-v0
Unlock: Unlock-v0 UnlockLocalDist-v0 KeyInBox-v0 UnlockPickupDist-v0 BlockedUnlockPickup-v0
Unlock: UnlockToUnlock-v0
AOD: ActionObjDoor-v0
FindObj: FindObjS7-v0
KeyCorridor: KeyCorridorS6R3-v0
Room: OneRoomS20-v0
PutNext: MoveTwoAcrossS8N9-v0
Synth: SynthS5R2-v0
SynthLoc: SynthLoc-v0
Synth: SynthSeq-v0
Boss: MiniBossLevel-v0 BossLevel-v0 BossLevelNoUnlock-v0
"""
LEVELS = tuple(
    (name, family)
    for family, _, names in (line.partition(": ") for line in _FAMILIES.splitlines())
    for name in names.split()
)
"""The level's name in minigrid and its family, in AgentGym's order."""
OLD_KEYWORDS = {"GoToObjS6-v1": {"room_size": 4}}
"""AgentGym's minigrid has GoToObjS6-v0 with rooms of 4 cells per side. minigrid 3.2.0 fixed that as a bug and has 6."""
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")
AGENTGYM = ("GoTo", "Pickup", "AOD", "FindObj", "Room", "SynthLoc")
"""The families that AgentGym trains and tests on, with 18 levels."""
SEEDS = 50
TEST_SEEDS = 5
"""The last 5 seeds are for testing: 18 levels with 45 and with 5 seeds make AgentGym's 810 and 90 tasks."""
VALIDATION_SEEDS = 6
"""The seeds before them: levels of one seed resemble each other, and are all of one split."""
LEVELS_KEPT = 1024
"""Levels that a process keeps as they were drawn, 6 kB each: the episodes of a group all play the same one."""
LEFT_OUT = {
    **dict.fromkeys(
        range(15, SEEDS * 40, 40), "a mission of two doors is lost by opening the first (level 16)"
    ),
    **dict.fromkeys((246, 566, 1406), "the key is in the room that it opens (level 7)"),
    1459: "can only be won by destroying a box (level 20)",
    **dict.fromkeys((154, 994), "the expert finds no room to put things aside (level 35)"),
}
"""Tasks that are not listed, with the reason. Except for the first reason, they are all train tasks."""

if minigrid.__version__ != MINIGRID:
    raise MissingDependency(
        f"minigrid is {minigrid.__version__}, and the tasks are levels of {MINIGRID}: pip install minigrid=={MINIGRID}"
    )
# Minigrid prints a line for every level that it has to redraw.
vars(roomgrid_level)["print"] = lambda *words: None


@cache
def load_tasks(levels: Levels) -> Sequence[TaskSpec]:
    """Return the tasks of AgentGym's families, or of all levels, by their number."""
    return tuple(
        TaskSpec(str(number), _split(seed), family)
        for seed in range(SEEDS)
        for number, (_, family) in enumerate(LEVELS, seed * len(LEVELS))
        if (levels == "all" or family in AGENTGYM) and number not in LEFT_OUT
    )


def _split(seed: int) -> Split:
    from_the_end = SEEDS - seed
    if from_the_end <= TEST_SEEDS:
        return "test"
    return "validation" if from_the_end <= TEST_SEEDS + VALIDATION_SEEDS else "train"


def is_number(task_id: str) -> bool:
    """Return whether AgentGym has a task with this number. Every number stands for a level and a seed."""
    return bool(_NUMBER.fullmatch(task_id))


def generate(task_id: str) -> RoomGridLevel:
    """Return a task's level, ready to play. Drawing it takes 1 to 100 ms, and 0.2 ms once it has been drawn here."""
    level: RoomGridLevel = pickle.loads(_draw_level(task_id))
    return level


def is_drawn(task_id: str) -> bool:
    """Return whether this process keeps the level, so that `generate` does not draw it."""
    return task_id in _KEPT


def draw_ahead(levels: Levels) -> bool:
    """Draw the next listed level that is not kept. Returns False if there is none, or no room for it."""
    missing = (task.task_id for task in load_tasks(levels) if task.task_id not in _KEPT)
    task_id = next(missing, None) if len(_KEPT) < LEVELS_KEPT else None
    if task_id is None:
        return False
    _draw_level(task_id)
    return True


_KEPT: OrderedDict[str, bytes] = OrderedDict()
"""The levels that this process has drawn, the last used one last. As bytes, since whoever plays one changes it."""
_CHANGING = Lock()
_ONE_WALL = Wall()


def _draw_level(task_id: str) -> bytes:
    """Return a level as bytes. It is drawn again and again until one can be solved."""
    with _CHANGING:
        if task_id in _KEPT:
            _KEPT.move_to_end(task_id)
            return _KEPT[task_id]
    drawn = pickle.dumps(_draw(task_id))  # without the lock, for which the event loop would wait
    with _CHANGING:
        _KEPT[task_id] = drawn
        if len(_KEPT) > LEVELS_KEPT:
            _KEPT.popitem(last=False)
    return drawn


def _draw(task_id: str) -> RoomGridLevel:
    seed, level_number = divmod(int(task_id), len(LEVELS))
    name = LEVELS[level_number][0]
    level = gymnasium.make(
        f"BabyAI-{name}", disable_env_checker=True, **OLD_KEYWORDS.get(name, {})
    ).unwrapped
    assert isinstance(level, RoomGridLevel), "every BabyAI level is one"
    level.reset(seed=seed)
    # Walls have no state, and are most of what there is to copy: one stands for all.
    level.grid.grid = [_ONE_WALL if type(cell) is Wall else cell for cell in level.grid.grid]
    return level
