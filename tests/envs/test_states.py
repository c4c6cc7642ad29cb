"""Environments that name their states: the same actions lead to the same name, and a name is one point of the game."""

import asyncio

import pytest

from horizonrl.envs import registry
from horizonrl.envs.api import Environment, NamesState, make_expert
from horizonrl.envs.worlds.babyai.world import GridWorld


async def states_of(env_id: str, task_id: str, replies: list[str]) -> list[str]:
    environment = registry.make(env_id, {"format": "plain"})
    assert isinstance(environment, NamesState)
    await environment.reset(task_id)
    states = [environment.state()]
    for reply in replies:
        await environment.step(reply)
        states.append(environment.state())
    await environment.close()
    return states


async def experts_way(env_id: str, task_id: str) -> list[str]:
    environment: Environment = registry.make(env_id, {"format": "plain"})
    observation, replies = (await environment.reset(task_id)).text, []
    expert, over = make_expert(environment), False
    while not over:
        replies.append(expert.act(observation))
        step = await environment.step(replies[-1])
        observation, over = step.observation, step.terminated
    await environment.close()
    return replies


@pytest.mark.parametrize("env_id", ["babyai", "maze", "textcraft"])
def test_a_state_follows_from_what_was_done_and_not_from_what_was_said(env_id: str) -> None:
    task_id = next(task.task_id for task in registry.tasks(env_id) if task.split == "train")
    way = asyncio.run(experts_way(env_id, task_id))[:-1]
    states = asyncio.run(states_of(env_id, task_id, way))
    assert states == asyncio.run(states_of(env_id, task_id, way))
    assert len(set(states)) > 1 or not way
    # A reply that is no action leaves everything where it was.
    (start, after) = asyncio.run(states_of(env_id, task_id, ["no such thing"]))
    assert start == after == states[0]


def test_the_registry_knows_who_names_states() -> None:
    assert {env_id: registry.names_state(env_id) for env_id in ("maze", "textcraft", "parity")} == {
        "maze": True,
        "textcraft": True,
        "parity": False,
    }


def test_babyais_state_tells_which_parts_of_a_mission_are_done() -> None:
    # "go to a box and go to the purple box": a full turn passes one box, and ends where it began
    turned = asyncio.run(states_of("babyai", "887", ["turn left"] * 8))
    assert turned[4] != turned[0]
    assert turned[8] == turned[4]


def test_babyais_state_tells_it_of_parts_within_parts() -> None:
    world = GridWorld("367")  # "go to the green ball and go to a door, then go to the red door"
    before = world.state
    world.level.instrs.instr_a.b_done = "success"
    assert world.state != before
