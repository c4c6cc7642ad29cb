"""The rules of parity; what every environment promises is the contract suite's business."""

import asyncio

import pytest

from horizonrl.envs import registry
from horizonrl.envs.api import Step
from horizonrl.envs.worlds.games.parity import Parity


def play(*replies: str) -> list[Step]:
    async def episode() -> list[Step]:
        environment = Parity()
        await environment.reset("round-00")
        return [await environment.step(reply) for reply in replies]

    return asyncio.run(episode())


def test_an_even_reply_earns_a_half_and_an_odd_one_nothing() -> None:
    assert [step.reward for step in play("ab", "abc", "", "x")] == [0.5, 0.0, 0.5, 0.0]


@pytest.mark.parametrize(
    ("replies", "success"), [(["ab"] * 4, True), (["ab", "ab", "ab", "a"], False)]
)
def test_the_fourth_turn_ends_the_episode_and_is_a_success_when_all_were_even(
    replies: list[str], success: bool
) -> None:
    steps = play(*replies)
    assert [step.terminated for step in steps] == [False, False, False, True]
    assert [step.success for step in steps] == [False, False, False, success]


def test_there_are_32_tasks_to_train_on_16_to_choose_by_and_16_to_test() -> None:
    assert len(registry.select("parity", "train")) == 32
    assert len(registry.select("parity", "validation")) == 16
    assert len(registry.select("parity", "test")) == 16
