from collections import Counter, OrderedDict

import pytest

from horizonrl.envs.worlds.babyai import levels
from horizonrl.envs.worlds.babyai.env import BabyAI
from horizonrl.envs.worlds.babyai.levels import LEFT_OUT, generate, is_drawn, load_tasks
from tests.envs.hash_seeds import printed_under_hash_seeds

FIRST_OBSERVATIONS = """
import asyncio, hashlib
from horizonrl.envs.worlds.babyai.env import BabyAI

async def main():
    digest = hashlib.sha256()
    environment = BabyAI(style="compact", levels="all")
    for task in environment.tasks(levels="all")[::43]:
        digest.update((await environment.reset(task.task_id)).text.encode())
    print(digest.hexdigest())

asyncio.run(main())
"""
DIGEST = "6b6d2adefacc60a65e0a5d3ef6b3cd807eefe00d1a3772074426c1429a7b4924"
"""Of minigrid 3.2.0's levels in our words, level 4 as AgentGym's minigrid has it. Another minigrid is other tasks, and
other words another environment."""


def test_the_first_observations_are_those_of_the_version_whatever_the_hash_seed_and_nothing_else_is_printed() -> (
    None
):
    assert printed_under_hash_seeds(FIRST_OBSERVATIONS, timeout_s=120) == {f"{DIGEST}\n"}


def test_the_families_have_the_test_tasks_of_agentgym() -> None:
    tests = Counter(task.category for task in load_tasks("agentgym") if task.split == "test")
    assert tests == {"GoTo": 55, "Pickup": 15, "AOD": 5, "FindObj": 5, "Room": 5, "SynthLoc": 5}


def test_all_tasks_to_train_on_are_listed_but_those_with_a_reason() -> None:
    """Validation is of AgentGym's train tasks."""
    train = [task for task in load_tasks("agentgym") if task.split != "test"]
    assert sum(task.split == "validation" for task in train) == 18 * 6
    assert len(train) == 810 - len({246, 566, 1406, 1459})
    assert len(load_tasks("all")) == 40 * 50 - len(LEFT_OUT)


def test_a_task_is_of_the_level_and_the_seed_that_its_number_says() -> None:
    # 32 of 40, seed 45.
    assert next(task for task in load_tasks("all") if task.task_id == "1832").category == "Room"
    assert (generate("1832").width, generate("1832").mission) == (20, "pick up the ball")
    assert generate("1").mission == generate("41").mission == "go to the red ball"
    assert generate("1").agent_pos != generate("41").agent_pos


def test_level_4_has_the_rooms_of_agentgyms_minigrid() -> None:
    assert {(generate(number).width, generate(number).height) for number in ("3", "43")} == {(4, 4)}


def test_a_level_that_was_drawn_before_is_as_new_whatever_was_done_to_it() -> None:
    first = generate("1832")
    place, state = tuple(first.agent_pos), first.np_random.bit_generator.state
    for _ in range(3):
        first.step(first.actions.forward)
        first.step(first.actions.left)
    again = generate("1832")
    assert (tuple(again.agent_pos), again.np_random.bit_generator.state) == (place, state)
    assert again.step_count == 0


def test_levels_are_drawn_ahead_of_need_until_there_is_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(levels, "_KEPT", OrderedDict())
    monkeypatch.setattr(levels, "LEVELS_KEPT", 5)
    while BabyAI.prepare():
        pass
    listed = [task.task_id for task in BabyAI.tasks()]
    assert all(map(is_drawn, listed[:5]))
    assert len(levels._KEPT) == 5
    drawn = generate(listed[3])
    generate(listed[7])  # the one that was used the longest ago makes room
    assert not is_drawn(listed[0])
    assert is_drawn(listed[3])
    levels._KEPT.clear()
    assert generate(listed[3]).grid == drawn.grid
