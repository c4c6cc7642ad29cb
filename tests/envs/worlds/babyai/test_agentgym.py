"""AgentGym's text layer; `python -m tests.peers.agentgym theirs babyai` compares it turn by turn."""

import asyncio

from horizonrl.envs.api import Step
from horizonrl.envs.worlds.babyai.env import BabyAI


def play(number: int, *actions: str) -> tuple[str, list[Step]]:
    async def run() -> tuple[str, list[Step]]:
        environment = BabyAI(style="agentgym", format="plain")
        first = (await environment.reset(str(number))).text
        return first, [await environment.step(action) for action in actions]

    return asyncio.run(run())


def test_nothing_in_sight_and_what_cannot_be_reached_are_told_as_there() -> None:
    first, _ = play(32)
    assert first.splitlines()[:2] == [
        "Your goal: pick up the ball",
        "You cannot see any objects within sight.The room has walls around you. You are not carrying anything.",
    ]
    first, _ = play(1768)  # yellow key 1 cannot be reached: its number goes to the next
    assert '"pickup yellow key 1"' in first
    assert '"pickup yellow key 2"' not in first


def test_ways_lead_through_closed_doors() -> None:
    assert '"toggle and go through blue closed door 1"' in play(1389)[0]


def test_an_action_is_taken_word_for_word_and_what_is_none_is_answered_by_why() -> None:
    _, steps = play(
        1801,
        "",
        "pick up green key 1",
        "drop",
        "pickup green key 1",
        "check it",
        "GO TO GREEN KEY 1 ",
    )
    answers = [step.observation.partition("\nAvailable actions: ")[0] for step in steps]
    assert answers[:3] == [
        "No change in state.",
        "The action is not recognized. Please check valid actions.",
        "You cannot drop the object, as you are not carrying anything.",
    ]
    assert "You are carrying a green key." in answers[3]
    assert answers[4].startswith("You can take the following actions: turn left, turn right")
    assert answers[5] == "The action is not recognized. Please check valid actions."


def test_going_to_what_is_in_front_changes_nothing_and_takes_no_time() -> None:
    _, steps = play(1801, "go to green key 1", "go to green key 1")
    assert steps[1].observation.startswith("No change in state.")
    assert steps[0].info == steps[1].info


def test_opening_and_passing_a_door_in_one_action_wins_no_mission_of_opening_it() -> None:
    first, steps = play(12, "toggle and go through red closed door 1")
    assert first.startswith("Your goal: open the red door\n")
    assert (steps[0].reward, steps[0].terminated) == (0.0, False)
    assert "The task is completed." not in steps[0].observation


def test_a_mission_is_won() -> None:
    _, steps = play(1801, "turn right", "go to red ball 1")
    assert steps[-1].success
    assert steps[-1].reward > 0.5
    assert (
        "carrying anything.\n The task is completed.\nAvailable actions: [" in steps[-1].observation
    )
