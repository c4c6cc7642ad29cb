import asyncio
from collections import Counter
from random import Random

import pytest

from horizonrl.envs import registry
from horizonrl.envs.check import check
from horizonrl.envs.maze import LONGEST_WAY, STEPS, Maze, MazeWalk, Walk


def test_there_are_215_mazes_to_train_on_and_25_to_test_of_three_sizes() -> None:
    assert len(registry.select("maze", "train")) == 215
    assert len(registry.select("maze", "test")) == 25
    assert Counter(task.category for task in registry.tasks("maze")) == {"small": 80, "medium": 80, "large": 80}


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


@pytest.mark.parametrize("action_format", ["react", "plain", "function", "code"])
def test_the_expert_walks_in_every_format(action_format: str) -> None:
    assert asyncio.run(check("maze", {"format": action_format, "style": "compact"}, ["maze-001"])).passed
