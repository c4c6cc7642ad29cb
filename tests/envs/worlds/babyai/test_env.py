import asyncio

import pytest

from horizonrl.common.errors import ConfigError, EnvironmentFailure
from horizonrl.envs.api import Step
from horizonrl.envs.worlds.babyai.env import BabyAI


def play(task_id: str, *replies: str, **options: str) -> list[Step]:
    async def run() -> list[Step]:
        environment = BabyAI(**options)  # type: ignore[arg-type]
        await environment.reset(task_id)
        return [await environment.step(reply) for reply in replies]

    return asyncio.run(run())


def first_observation(task_id: str, **options: str) -> str:
    return asyncio.run(BabyAI(**options).reset(task_id)).text  # type: ignore[arg-type]


async def test_the_reward_is_for_few_steps_and_is_paid_once() -> None:
    environment = BabyAI(format="plain")
    await environment.reset("1801")
    turned, found = (
        await environment.step("turn right"),
        await environment.step("go to red ball 1"),
    )
    assert (turned.reward, turned.terminated) == (0.0, False)
    assert (found.terminated, found.success, found.reward) == (
        True,
        True,
        1 - 0.9 * found.info["steps"] / 64,
    )
    with pytest.raises(EnvironmentFailure, match="the episode is over"):
        await environment.step("turn right")


def test_an_episode_is_truncated_at_the_most_steps_of_its_level() -> None:
    steps = play("1801", *["turn left"] * 64, format="plain")
    assert [step.truncated for step in steps] == [False] * 63 + [True]
    assert not any(step.terminated or step.reward for step in steps)


def test_a_mission_that_is_lost_ends_without_reward_or_success() -> None:
    # The mission is a box.
    step = play("1819", "turn left", "turn left", "pickup yellow ball 1", format="plain")[-1]
    assert (step.terminated, step.success, step.reward) == (True, False, 0.0)


def test_the_compact_first_observation_is_terse() -> None:
    assert first_observation("1801", style="compact", format="plain").splitlines()[1:] == [
        "Goal: go to the red ball",
        "green key 1: 1 ahead 2 right; wall: 2 ahead",
    ]


def test_the_full_observation_tells_what_is_seen_and_what_can_be_done() -> None:
    assert first_observation("1801", format="plain").endswith(
        "\nGoal: go to the red ball\n"
        "You see green key 1 (1 ahead, 2 right). Straight ahead is a wall, 2 steps away. You carry nothing.\n"
        "Actions: turn left, turn right, move forward, pickup green key 1, go to green key 1, check available actions"
    )


def test_compat_has_the_words_of_agentgym() -> None:
    text = first_observation("1801", style="compat")
    assert text.startswith("You are an exploration master")
    assert text.endswith(
        "\nYour goal: go to the red ball\n"
        "In front of you in this room, you can see several objects: There is a green key 1 1 steps in front of you and "
        "2 steps to your right.  The room has walls around you. You are facing a wall 2 steps away. You are not "
        'carrying anything.\nAvailable actions: ["turn left", "turn right", "move forward", "pickup green key 1", '
        '"go to green key 1", "check available actions"]'
    )
    won = play("1801", "Action:\nturn right", "Action: go to red ball 1", style="compat")[-1]
    assert (
        "You are not carrying anything.\n The task is completed.\nAvailable actions: ["
        in won.observation
    )


def test_only_compat_loses_the_order_of_a_mission() -> None:
    sentence = "go to a door and go to the purple key after you go to a door"
    assert f"Goal: {sentence}\n" in first_observation("1927")
    assert f"Your goal: {sentence.replace('after you', 'and')}\n" in first_observation(
        "1927", style="compat"
    )


def test_pick_up_and_capitals_are_understood_and_a_check_lists_the_actions() -> None:
    listed, known, unknown = play(
        "1801", "check", "Go To Red Ball 7.", "pick up red ball 7", format="plain"
    )
    assert listed.observation.startswith(
        "You can take the following actions: turn left, turn right"
    )
    assert known.observation.splitlines()[0] == unknown.observation.splitlines()[0]
    assert known.observation.startswith("The action is not recognized.")


def test_a_bound_holds_and_a_first_observation_beyond_it_is_a_config_error() -> None:
    async def run() -> None:
        environment = BabyAI(style="compact", format="plain", max_observation_chars=184)
        await environment.reset("1884")
        await environment.step("turn right")
        cut = (await environment.step("turn right")).observation
        assert (len(cut), cut[-3:]) == (184, "...")

    asyncio.run(run())
    with pytest.raises(ConfigError, match="max_observation_chars is 184: raise the limit"):
        asyncio.run(BabyAI(max_observation_chars=184).reset("1801"))


@pytest.mark.parametrize("task_id", ["", "-1", "01801", "go", "1e3", "1234567890"])
def test_a_task_that_does_not_exist_is_a_config_error(task_id: str) -> None:
    with pytest.raises(ConfigError, match="babyai has no task"):
        first_observation(task_id)
