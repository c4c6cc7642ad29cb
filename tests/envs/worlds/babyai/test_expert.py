import asyncio

import pytest

from horizonrl.envs.api import Split
from horizonrl.envs.worlds.babyai.env import BabyAI
from horizonrl.envs.worlds.babyai.levels import Levels


async def unsolved(levels: Levels, split: Split) -> list[str]:
    environment = BabyAI(levels=levels, format="plain", style="compact")
    failed = []
    for task in environment.tasks(levels=levels):
        if task.split == split:
            observation = (await environment.reset(task.task_id)).text
            expert, success = environment.expert(), False
            for _ in range(80):
                step = await environment.step(expert.act(observation))
                observation, success = step.observation, step.success
                if step.terminated or step.truncated:
                    break
            failed += [] if success else [task.task_id]
    await environment.close()
    return failed


def test_the_expert_solves_every_test_task() -> None:
    assert asyncio.run(unsolved("agentgym", "test")) == []


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_the_expert_solves_every_task_of_every_level(split: Split) -> None:
    assert asyncio.run(unsolved("all", split)) == []
