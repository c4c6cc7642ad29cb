"""AgentGym's words and its reading of a command; `tests/peers/agentgym theirs textcraft` compares them turn by turn."""

import pytest

from horizonrl.envs.worlds.textcraft.agentgym import AgentGymCrafting
from horizonrl.envs.worlds.textcraft.env import TextCraft
from horizonrl.envs.worlds.textcraft.tasks import load_book


def follow(*commands: str) -> list[str]:
    world = AgentGymCrafting(load_book(), "stick")
    return [world.follow(command) for command in commands]


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("get 2 oak logs", "Got 2 oak logs"),
        ("get 2 oak planks", "Could not find oak planks"),
        ("get 1 planks", "Could not find planks"),
        ("get 1 unicorn", "Could not find unicorn"),
        ("Get 1 oak logs", "Could not execute Get 1 oak logs"),
        ("", "Could not execute "),
        ("inventory please", "Inventory: You are not carrying anything."),
        ("craft 4 stick using planks", "Wrong item format: planks"),
        (
            "craft 4 stick using 2 oak planks",
            "Could not find enough items to craft minecraft:stick",
        ),
        ("craft 1 unicorn using 0 horn", "Could not find a valid recipe for minecraft:unicorn"),
    ],
)
def test_a_command_is_answered_in_agentgyms_words(command: str, answer: str) -> None:
    assert follow(command) == [answer]


def test_a_goal_is_crafted_and_the_inventory_tells_what_is_left() -> None:
    assert follow(
        "get 1 oak logs",
        "craft 4 oak planks using 1 oak logs",
        "craft 9 oak planks using 2 oak planks",
        "craft 4 stick using 1 oak planks, 1 oak planks",
        "craft stick using 2 oak planks",
        "inventory",
    ) == [
        "Got 1 oak logs",
        "Crafted 4 minecraft:oak_planks",
        "Could not find a valid recipe for minecraft:oak_planks",
        "Could not find a valid recipe for minecraft:stick",
        "Crafted 4 minecraft:stick",
        "Inventory: [oak planks] (2) [stick] (4) ",
    ]


async def test_the_expert_solves_a_task_in_agentgyms_style() -> None:
    environment = TextCraft(style="agentgym", format="plain", distractors=0)
    first = (await environment.reset("chest")).text
    assert first.startswith("Crafting commands:\ncraft ")
    assert first.endswith("\n\nGoal: craft chest.")
    expert = environment.expert()
    while not (step := await environment.step(expert.act(""))).terminated:
        assert step.observation.startswith(("Got ", "Crafted "))
    assert (step.observation, step.success) == ("Crafted 1 minecraft:chest", True)
