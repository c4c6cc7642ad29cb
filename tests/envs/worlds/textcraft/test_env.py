import asyncio

import pytest
from pydantic import ValidationError

from horizonrl.common.errors import ConfigError, EnvironmentFailure
from horizonrl.envs.api import TaskSpec
from horizonrl.envs.worlds.textcraft.env import TextCraft
from horizonrl.envs.worlds.textcraft.tasks import load_tasks
from tests.envs.hash_seeds import printed_under_hash_seeds

FIRST_OBSERVATIONS = """
import asyncio, hashlib
from horizonrl.envs.worlds.textcraft.env import TextCraft

async def main():
    digest = hashlib.sha256()
    for options in ({}, {"style": "compact", "distractors": 2, "format": "plain"}):
        environment = TextCraft(**options)
        for task in environment.tasks()[::11][:50]:
            digest.update((await environment.reset(task.task_id)).text.encode())
    print(digest.hexdigest())

asyncio.run(main())
"""


def first_observation(task_id: str, environment: TextCraft) -> str:
    return asyncio.run(environment.reset(task_id)).text


def test_the_first_observations_do_not_depend_on_the_hash_seed() -> None:
    assert len(printed_under_hash_seeds(FIRST_OBSERVATIONS)) == 1


def test_the_compact_first_observation_is_terse_and_ends_with_the_goal() -> None:
    text = first_observation("stick", TextCraft(style="compact", format="plain", distractors=0))
    assert text == (
        "Commands: get N item | craft N item using M item, M item | inventory\n"
        "Get what no recipe makes.\n"
        "craft 1 stick using 2 bamboo\n"
        "Goal: craft 1 stick"
    )


def test_a_compact_observation_names_a_kind_of_each_tag() -> None:
    lines = first_observation("chest", TextCraft(style="compact", distractors=2)).splitlines()
    assert "For planks use one kind, such as acacia planks." in lines
    assert sum(line.startswith("craft ") for line in lines) == 4


@pytest.mark.parametrize("task", load_tasks()[::50])
def test_distractors_are_added_to_every_way_to_the_goal(task: TaskSpec) -> None:
    few = first_observation(task.task_id, TextCraft(distractors=0)).splitlines()
    many = first_observation(task.task_id, TextCraft(distractors=10)).splitlines()
    assert len(many) == len(few) + 10
    assert set(few) <= set(many)
    assert len(recipes := [line for line in many if line.startswith("craft 1")]) == len(
        set(recipes)
    )


async def test_the_reward_is_paid_once_and_only_for_the_goal() -> None:
    environment = TextCraft(format="plain")
    await environment.reset("stick")
    bamboo, stick = (
        await environment.step("get 4 bamboo"),
        await environment.step("craft 1 stick using 2 bamboo"),
    )
    assert (bamboo.reward, bamboo.terminated, bamboo.success) == (0.0, False, False)
    assert (stick.reward, stick.terminated, stick.success) == (1.0, True, True)
    with pytest.raises(EnvironmentFailure, match="the episode is over"):
        await environment.step("craft 1 stick using 2 bamboo")


async def test_several_actions_in_one_reply_are_an_observation_and_none_is_taken() -> None:
    environment = TextCraft(format="react")
    await environment.reset("stick")
    refused = await environment.step("Action: get 2 bamboo\nAction: craft 1 stick using 2 bamboo")
    assert refused.observation == "There are 2 actions in the reply. Take one action at a time."
    nothing = await environment.step("Action: inventory")
    assert nothing.observation == "Inventory: You are not carrying anything."


async def test_a_long_inventory_is_cut_to_the_bound() -> None:
    environment = TextCraft(
        format="plain", style="compact", distractors=0, max_observation_chars=200
    )
    await environment.reset("stick")
    for item in (
        "cobblestone",
        "sugar cane",
        "rabbit hide",
        "bamboo",
        "ink sac",
        "feather",
        "flint",
        "redstone",
    ):
        for count in (9_999, 9_999):
            await environment.step(f"get {count} {item}")
    step = await environment.step("inventory")
    assert len(step.observation) <= 200


def test_a_first_observation_that_does_not_fit_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="max_observation_chars is 100: raise the limit"):
        first_observation("chest", TextCraft(max_observation_chars=100))


@pytest.mark.parametrize(
    "task_id", ["", "oak planks", "minecraft:chest", "unobtainium", "oak_logs"]
)
def test_a_task_that_does_not_exist_is_a_config_error(task_id: str) -> None:
    with pytest.raises(ConfigError, match="textcraft has no task"):
        first_observation(task_id, TextCraft())


def test_an_expert_before_reset_is_a_failure() -> None:
    with pytest.raises(EnvironmentFailure, match="no episode has begun"):
        TextCraft().expert()


@pytest.mark.parametrize(
    "options", [{"distractors": -1}, {"format": "xml"}, {"max_observation_chars": 3}, {"x": 1}]
)
def test_a_wrong_option_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        TextCraft(**options)  # type: ignore[arg-type]
