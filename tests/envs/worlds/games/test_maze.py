import asyncio
from collections import Counter
from random import Random

import pytest

from horizonrl.common.errors import ConfigError
from horizonrl.envs import registry
from horizonrl.envs.api import Step
from horizonrl.envs.worlds.games.maze import LONGEST_WAY, STEPS, Maze, MazeWalk, Walk


def test_there_are_187_mazes_to_train_on_28_to_choose_by_and_25_to_test_of_three_sizes() -> None:
    assert len(registry.select("maze", "train")) == 187
    assert len(registry.select("maze", "validation")) == 28
    assert len(registry.select("maze", "test")) == 25
    assert Counter(task.category for task in registry.tasks("maze")) == {
        "small": 80,
        "medium": 80,
        "large": 80,
    }


def test_every_cell_of_a_maze_is_reached_in_one_way() -> None:
    for seed in range(20):
        maze = Maze(8, Random(seed))
        assert len(maze.steps_to((3, 3))) == 64
        assert sum(map(len, maze.ways.values())) == 2 * 63


def test_the_expert_walks_every_maze_in_the_fewest_steps() -> None:
    async def turns(task_id: str) -> int:
        environment, turns = MazeWalk(format="plain"), 0
        await environment.reset(task_id)
        while True:
            step, turns = await environment.step(environment.expert().act("")), turns + 1
            assert "wall." not in step.observation
            if step.terminated:
                assert step.success
                return turns

    taken = [asyncio.run(turns(task.task_id)) for task in registry.tasks("maze")]
    assert max(taken) <= LONGEST_WAY < STEPS
    assert min(taken) >= 2


def walk() -> Walk:
    """A walk from a cell of a maze whose ways lead up and down."""
    maze = Maze(4, Random(1))
    start = next(cell for cell in sorted(maze.ways) if set(maze.ways[cell]) == {"up", "down"})
    return Walk(maze, start, goal=(3, 3))


def test_a_wall_stops_a_step_which_is_counted() -> None:
    here = (game := walk()).look()
    steps = [game.follow("move left") for _ in range(STEPS)]
    assert {step.observation for step in steps} == {f"There is a wall. {here}"}
    assert [step.truncated for step in steps] == [False] * (STEPS - 1) + [True]
    assert not any(step.terminated or step.reward for step in steps)


@pytest.mark.parametrize("action", ["up", "move up", "MOVE UP.", "Up"])
def test_a_direction_may_stand_alone(action: str) -> None:
    game = walk()
    assert "Move up" not in game.follow(action).observation
    assert game.follow("jump").observation.startswith("Move up, down, left or right.")


def agentgym_maze(task_id: str, *actions: str) -> tuple[str, list[Step]]:
    """Play LMRL-Gym's maze in AgentGym's words; `tests/peers/agentgym games` compares both turn by turn."""

    async def run() -> tuple[str, list[Step]]:
        environment = MazeWalk(mazes="lmrl", style="agentgym", format="plain")
        first = (await environment.reset(task_id)).text
        return first, [await environment.step(action) for action in actions]

    return asyncio.run(run())


def test_lmrl_gyms_maze_is_told_in_agentgyms_words_from_each_of_its_starts() -> None:
    tasks = registry.tasks("maze", {"mazes": "lmrl"})
    assert [task.task_id for task in tasks] == [f"lmrl-{number:02d}" for number in range(25)]
    position = "The goal is at position 8, 6. Your current position is at position"
    assert (
        agentgym_maze("lmrl-00")[0]
        == f"{position} 1, 1. There are walls to your left, above you, below you."
    )
    assert (
        agentgym_maze("lmrl-17", "move left")[1][0].observation
        == f"{position} 6, 6. There are walls to your right, to your left."
    )
    _, (there, done) = agentgym_maze("lmrl-17", "move down", "move down")
    assert there.observation == f"{position} 7, 6. There are walls to your right, to your left."
    assert (done.observation, done.reward, done.success) == ("Success\n", 1.0, True)
    with pytest.raises(ConfigError, match="maze has no task 'maze-001'"):
        agentgym_maze("maze-001")


def test_only_agentgyms_four_actions_move_and_the_51st_step_fails() -> None:
    first, steps = agentgym_maze("lmrl-17", *["down", "move down.", "Move down"] * 17)
    assert {step.observation for step in steps[:-1]} == {first}
    assert [step.terminated for step in steps] == [False] * STEPS + [True]
    assert (steps[-1].observation, steps[-1].reward, steps[-1].success) == (
        "Failure\n",
        -1.0,
        False,
    )
