import pytest
from hypothesis import given
from hypothesis import strategies as st

from horizonrl.envs.worlds.textcraft.crafting import MAX_COMMAND_CHARS, Crafting
from horizonrl.envs.worlds.textcraft.tasks import load_book

BOOK = load_book()
NAMES = st.sampled_from(
    [*sorted(BOOK.recipes_of), *sorted(BOOK.base_items), *BOOK.members, "unobtainium"]
)
COUNTED = st.builds("{} {}".format, st.integers(0, 10), NAMES)
COMMANDS = st.one_of(
    st.builds("get {}".format, COUNTED),
    st.builds(
        lambda item, paid: f"craft {item} using {', '.join(paid)}",
        COUNTED,
        st.lists(COUNTED, min_size=1),
    ),
    st.sampled_from([str(recipe) for recipe in BOOK.recipes]),
    st.text(),
)


def world(goal: str = "chest", **carried: int) -> Crafting:
    """Return a world with some base items in the inventory."""
    begun = Crafting(BOOK, goal)
    for item, count in carried.items():
        assert begun.follow(f"get {count} {item}").startswith("Got")
    return begun


def test_a_chest_is_crafted_from_logs() -> None:
    chest = world()
    assert chest.follow("get 2 oak logs") == "Got 2 oak logs"
    assert chest.follow("craft 4 oak planks using 1 oak logs") == "Crafted 4 oak planks"
    assert chest.follow("craft 4 oak planks using 1 oak logs") == "Crafted 4 oak planks"
    assert chest.follow("inventory") == "Inventory: [oak planks] (8)"
    assert not chest.crafted
    assert chest.follow("craft 1 chest using 8 oak planks") == "Crafted 1 chest"
    assert chest.crafted
    assert chest.inventory == {"chest": 1}


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("get 4 oak planks", "Could not find oak planks: it must be crafted."),
        (
            "get 4 planks",
            "Could not find planks: name a kind of it, such as acacia planks or birch planks.",
        ),
        ("get 1 unobtainium", "Could not find unobtainium: there is no such item."),
        ("get 0 oak logs", "Could not get 0 oak logs: the least is 1."),
        ("get oak logs", "Could not execute 'get oak logs'."),
        ("get -2 oak logs", "Could not execute 'get -2 oak logs'."),
        ("inventoryXYZ", "Could not execute 'inventoryxyz'."),
        ("craft 1 chest", "Could not execute 'craft 1 chest'."),
        ("craft 1 oak logs using 1 stick", "Could not craft oak logs: there is no recipe for it."),
        (
            "craft 1 chest using oak planks",
            "Could not craft chest: 'oak planks' is not an amount and an item.",
        ),
        (
            "craft 1 chest using 8 planks",
            "Could not craft chest using planks: name a kind of it, such as acacia planks or birch planks.",
        ),
        (
            "craft 1 chest using 8 oak planks",
            "Could not find enough items to craft chest: you have 0 of 8 oak planks.",
        ),
        (
            "craft 1 chest using 4 oak planks, 4 birch planks",
            "Could not find a valid recipe for chest: items and amounts must be exactly those of a recipe.",
        ),
        (
            "craft 2 chest using 16 oak planks",
            "Could not find a valid recipe for chest: items and amounts must be exactly those of a recipe.",
        ),
        ("x" * 600, "Could not execute a command of 600 characters."),
    ],
)
def test_a_command_that_cannot_be_followed_says_why_and_changes_nothing(
    command: str, answer: str
) -> None:
    begun = world(oak_logs=2)
    assert begun.follow(command) == answer
    assert begun.inventory == {"oak logs": 2}


def test_the_recipe_decides_how_many_are_made() -> None:
    assert (
        world(oak_logs=1).follow("craft 99 oak planks using 1 oak logs") == "Crafted 4 oak planks"
    )


def test_capitals_underscores_and_quotes_do_not_matter() -> None:
    assert world().follow("`Get 2 oak_logs.`\n") == "Got 2 oak logs"


def test_the_goal_is_not_an_item_whose_name_begins_like_it() -> None:
    stone = world("stone brick slab", stone=4)
    stone.follow("craft 4 stone bricks using 4 stone")
    assert stone.inventory == {"stone bricks": 4}
    stone.follow("craft 4 stone brick stairs using 6 stone bricks")
    assert not stone.crafted


def test_nothing_is_carried_at_first() -> None:
    assert world().follow("inventory") == "Inventory: You are not carrying anything."


@given(st.lists(COMMANDS, max_size=12))
def test_no_sequence_of_commands_goes_into_debt_or_answers_at_length(commands: list[str]) -> None:
    begun = Crafting(BOOK, "chest")
    for command in commands:
        answer = begun.follow(command)
        assert answer
        assert len(answer) < 2 * MAX_COMMAND_CHARS
        assert all(count > 0 for count in begun.inventory.values())
        assert begun.inventory.keys() <= BOOK.base_items | BOOK.recipes_of.keys()
        assert begun.crafted or "chest" not in begun.inventory
