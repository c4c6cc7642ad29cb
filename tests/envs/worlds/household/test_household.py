from collections import Counter, defaultdict
from random import Random

import pytest

from horizonrl.envs import registry
from horizonrl.envs.game import random_for
from horizonrl.envs.worlds.household.env import CATEGORIES, Chore
from horizonrl.envs.worlds.household.house import NOTHING, House, Place


def house() -> House:
    """A kitchen with an apple on a table, and a mug in a shut fridge."""
    return House(
        [
            Place("table 1", True, ["apple 1", "desklamp 1"]),
            Place("fridge 1", False, ["mug 1"]),
            Place("sinkbasin 1", True),
            Place("microwave 1", False),
        ]
    )


def obey(room: House, *commands: str) -> list[str]:
    return [room.obey(command) for command in commands]


def test_the_expert_does_every_test_chore_within_50_turns() -> None:
    turns = defaultdict(list)
    for task in registry.select("household", "test"):
        chore, step, taken = Chore(task.category, random_for(task.task_id)), None, 0
        while step is None or not step.terminated:
            assert taken < 50, task
            step, taken = chore.follow(chore.advise().action), taken + 1
            assert step.observation != NOTHING
        assert step.success and step.reward == 1
        turns[task.category].append(taken)
    assert sum(map(len, turns.values())) == 200
    assert max(map(max, turns.values())) == 33


def test_there_are_2115_chores_to_train_on_of_six_categories() -> None:
    assert len(registry.select("household", "train")) == 2_115
    assert set(Counter(task.category for task in registry.tasks("household"))) == set(CATEGORIES)


@pytest.mark.parametrize("category", CATEGORIES)
def test_no_chore_is_done_before_it_is_begun(category: str) -> None:
    for seed in range(50):
        assert not Chore(category, Random(seed)).follow("inventory").terminated


def test_a_shut_place_must_be_opened_before_one_takes_from_it() -> None:
    assert obey(
        house(),
        "go to fridge 1",
        "take mug 1 from fridge 1",
        "open fridge 1",
        "open fridge 1",
        "take mug 1 from fridge 1",
    ) == [
        "You arrive at the fridge 1. The fridge 1 is closed.",
        NOTHING,
        "You open the fridge 1. In the fridge 1, you see a mug 1.",
        NOTHING,
        "You take the mug 1 from the fridge 1.",
    ]


def test_one_carries_one_thing_at_a_time_and_acts_only_where_one_is() -> None:
    room = house()
    assert obey(room, "take apple 1 from table 1", "go to table 1", "take apple 1 from table 1")[
        ::2
    ] == [
        NOTHING,
        "You take the apple 1 from the table 1.",
    ]
    assert (
        obey(
            room, "put apple 1 in/on sinkbasin 1", "open fridge 1", "heat apple 1 with microwave 1"
        )
        == [NOTHING] * 3
    )
    assert obey(room, "go to fridge 1", "open fridge 1", "take mug 1 from fridge 1")[-1] == NOTHING
    assert room.obey("inventory") == "You carry a apple 1."
    assert room.obey("put apple 1 in fridge 1") == "You put the apple 1 in/on the fridge 1."


@pytest.mark.parametrize(
    ("verb", "place", "state"),
    [("clean", "sinkbasin", "clean"), ("heat", "microwave", "hot"), ("cool", "fridge", "cool")],
)
def test_a_thing_is_changed_by_the_right_place_only(verb: str, place: str, state: str) -> None:
    room = house()
    obey(room, "go to table 1", "take apple 1 from table 1")
    assert room.obey(f"{verb} apple 1 with table 1") == NOTHING
    room.obey(f"go to {place} 1")
    assert (
        room.obey(f"{verb} apple 1 with {place} 1")
        == f"You {verb} the apple 1 using the {place} 1."
    )
    assert room.obey("examine apple 1").endswith(f"it is {state}.")


def test_a_lamp_is_toggled_where_it_stands_and_never_taken() -> None:
    room = house()
    assert obey(room, "toggle desklamp 1", "go to table 1", "take desklamp 1 from table 1")[
        ::2
    ] == [NOTHING, NOTHING]
    assert obey(room, "use desklamp 1", "toggle desklamp 1") == [
        "You turn on the desklamp 1.",
        "You turn off the desklamp 1.",
    ]
