"""Views made by hand: `Thing(kind, colour, state, (steps ahead, steps to the right), number)`."""

from minigrid.core.actions import Actions

from horizonrl.envs.worlds.babyai.view import Thing, View

L, R, F = Actions.left, Actions.right, Actions.forward
BALL = Thing("ball", "red", "", (2, 1), 1)
DOOR = Thing("door", "blue", "locked", (2, 0), 1)
KEY = Thing("key", "blue", "", (0, 0))


def view(*things: Thing, carrying: Thing | None = None) -> View:
    blocked = {thing.cell: thing for thing in things if thing.state != "open"}
    return View([thing for thing in things if thing.kind != "wall"], None, carrying, blocked)


def wall(ahead: int, right: int) -> Thing:
    return Thing("wall", "grey", "", (ahead, right))


def test_the_way_to_a_thing_is_a_shortest_one_and_ends_in_front_of_it() -> None:
    assert view(BALL).actions["go to red ball 1"] == (F, F, R)
    assert view(BALL).actions["pickup red ball 1"] == (F, F, R, Actions.pickup)


def test_a_way_leads_around_what_is_in_it() -> None:
    assert view(BALL, wall(1, 0)).actions["go to red ball 1"] == (R, F, L, F)


def test_what_is_walled_in_cannot_be_reached() -> None:
    around = [wall(ahead, right) for ahead, right in ((1, 1), (3, 1), (2, 0), (2, 2))]
    shut_in = view(BALL, *around)
    assert "go to red ball 1" not in shut_in.actions
    assert shut_in.why_not("pickup red ball 1").endswith("as there is no path leading to it.")


def test_a_locked_door_opens_with_the_key_of_its_color_only() -> None:
    opened = "toggle and go through blue locked door 1"
    assert opened not in view(DOOR).actions
    assert opened not in view(DOOR, carrying=Thing("key", "red", "", (0, 0))).actions
    assert view(DOOR, carrying=KEY).actions[opened] == (F, Actions.toggle, F)
    assert "not carrying a key of its color" in view(DOOR).why_not(opened)


def test_a_thing_is_dropped_only_where_nothing_is() -> None:
    assert view(carrying=KEY).actions["drop"] == (Actions.drop,)
    assert "drop" not in view(wall(1, 0), carrying=KEY).actions
    assert "drop" not in view(Thing("door", "red", "open", (1, 0), 1), carrying=KEY).actions
    assert "drop" not in view().actions


def test_nothing_is_picked_up_with_full_hands() -> None:
    assert not any(action.startswith("pickup") for action in view(BALL, carrying=KEY).actions)
    assert "already carrying" in view(BALL, carrying=KEY).why_not("pickup red ball 1")


def test_an_open_door_is_walked_into_and_shut_from_before_it() -> None:
    door = Thing("door", "red", "open", (1, 0), 1)
    assert view(door).actions["go through red open door 1"] == (F,)
    assert view(door).actions["toggle"] == (Actions.toggle,)
    assert view(door).actions["go to red open door 1"] == (Actions.done,)


def test_words_that_name_nothing_in_sight_are_not_recognized() -> None:
    for words in ("go to red ball 2", "pickup", "dance", ""):
        assert (
            view(BALL).why_not(words) == "The action is not recognized. Please check valid actions."
        )
