from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horizonrl.envs.formats import read_action
from horizonrl.envs.game import MoveExpert
from horizonrl.envs.worlds.textcraft.crafting import COMMANDS, Crafting
from horizonrl.envs.worlds.textcraft.expert import next_move, recipes_needed, shortest_plan
from horizonrl.envs.worlds.textcraft.tasks import load_book

BOOK = load_book()


def turns_to_craft(world: Crafting) -> int:
    """Let the expert play to the goal; every one of its actions must be followed."""
    turns = 0
    while not world.crafted:
        answer = world.follow(next_move(world).action)
        assert answer.startswith(("Got", "Crafted"))
        turns += 1
    return turns


def test_the_expert_solves_all_544_tasks_in_the_turns_it_planned() -> None:
    turns = defaultdict(list)
    for goal, depth in BOOK.depths.items():
        turns[depth].append(turns_to_craft(Crafting(BOOK, goal)))
        assert turns[depth][-1] == shortest_plan(BOOK, goal, {}).turns
    assert {depth: max(taken) for depth, taken in turns.items()} == {1: 4, 2: 11, 3: 48, 4: 27}
    mean = {depth: round(sum(taken) / len(taken), 1) for depth, taken in sorted(turns.items())}
    assert mean == {1: 2.2, 2: 5.1, 3: 10.2, 4: 18.5}


def fewest_turns_by_search(goal: str, limit: int) -> int:
    """Oracle: breadth-first search over inventories, where a `get` takes more than any plan could need.

    Of a tag only the first member is tried.
    """
    recipes = BOOK.reachable(goal)
    names = dict.fromkeys(
        item for r in recipes for i in r.ingredients for item in BOOK.items_for(i.name)
    )
    commands = [f"get 64 {item}" for item in names if item in BOOK.base_items]
    for recipe in recipes:
        paid = (f"{i.count} {BOOK.items_for(i.name)[0]}" for i in recipe.ingredients)
        commands.append(f"craft {recipe.item} using {', '.join(paid)}")

    reached: dict[frozenset[tuple[str, int]], tuple[str, ...]] = {frozenset(): ()}
    """By what is carried, the shortest list of commands that leads there."""
    for turns in range(1, limit + 1):
        for history in [history for history in reached.values() if len(history) == turns - 1]:
            for command in commands:
                world = Crafting(BOOK, goal)
                for earlier in (*history, command):
                    world.follow(earlier)
                if world.crafted:
                    return turns
                reached.setdefault(frozenset(world.inventory.items()), (*history, command))
    raise AssertionError(f"{goal} is not reached in {limit} turns")


@pytest.mark.parametrize("goal", ["stick", "light gray dye", "torch", "chest", "iron door"])
def test_no_search_finds_a_shorter_way_than_the_plan(goal: str) -> None:
    planned = shortest_plan(BOOK, goal, {}).turns
    assert fewest_turns_by_search(goal, limit=planned) == planned


@given(
    st.sampled_from(sorted(BOOK.recipes_of)),
    st.lists(st.sampled_from(sorted(BOOK.base_items)), max_size=6),
)
def test_the_expert_takes_over_in_the_middle_and_never_needs_more_turns(
    goal: str, found: list[str]
) -> None:
    world = Crafting(BOOK, goal)
    for item in found:
        world.follow(f"get 1 {item}")
    assert turns_to_craft(world) <= shortest_plan(BOOK, goal, {}).turns


def test_the_expert_uses_what_is_left_over() -> None:
    world = Crafting(BOOK, "chest")
    for command in ("get 2 birch logs", *["craft 4 birch planks using 1 birch logs"] * 2):
        world.follow(command)
    assert next_move(world).action == "craft 1 chest using 8 birch planks"


def test_in_react_format_a_short_true_thought_goes_before_the_action() -> None:
    world = Crafting(BOOK, "chest")
    expert = MoveExpert(lambda observation: next_move(world), "react", COMMANDS)
    replies = []
    while not world.crafted:
        replies.append(expert.act(""))
        world.follow(str(read_action(replies[-1], "react")))
    assert replies[0] == "Thought: I need 2 acacia logs.\nAction: get 2 acacia logs"
    assert (
        replies[1]
        == "Thought: I need acacia planks first.\nAction: craft 4 acacia planks using 1 acacia logs"
    )
    assert replies[-1] == "Thought: I have all I need.\nAction: craft 1 chest using 8 acacia planks"


def test_the_recipes_needed_end_with_the_goal() -> None:
    assert [str(recipe) for recipe in recipes_needed(BOOK, "chest")] == [
        "craft 4 acacia planks using 1 acacia logs",
        "craft 1 chest using 8 planks",
    ]
