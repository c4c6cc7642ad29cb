"""Environments that are registered with Gymnasium: of texts as they are, others through a wrapper."""

import asyncio
from typing import Any

import pytest

from horizonrl.common.errors import ConfigError, EnvironmentFailure
from horizonrl.envs import registry
from horizonrl.envs.api import Step
from tests.envs.hubs.guess import COIN, GUESS, WRAPPER


def played(options: dict[str, Any], *replies: str) -> list[Step]:
    async def play() -> list[Step]:
        environment = registry.make("gymnasium", options | {"format": "plain"})
        try:
            await environment.reset("seed-3")
            return [await environment.step(reply) for reply in replies]
        finally:
            await environment.close()

    return asyncio.run(play())


def test_an_episode_is_won_lost_or_cut_as_the_environment_says() -> None:
    steps = played({"id": GUESS}, *"01234")
    assert [step.reward for step in steps] == [0.0] * 5
    assert (steps[-1].terminated, steps[-1].truncated) == (False, True)
    won = [step for digit in "56789" for step in played({"id": GUESS}, digit)]
    assert sum(step.success for step in won) == 1
    assert all(step.success == (step.reward == 1.0) == step.terminated for step in won)


def test_a_text_outside_of_the_action_space_is_answered_and_costs_nothing() -> None:
    step, *_ = played({"id": GUESS}, "x" * 41, "1")
    assert "That is no action here: an action is Text(" in step.observation
    assert (step.reward, step.terminated) == (0.0, False)


def test_what_it_raises_breaks_the_episode() -> None:
    with pytest.raises(EnvironmentFailure, match="its package raised ZeroDivisionError: it fell"):
        played({"id": GUESS}, "fall")


def test_an_environment_of_numbers_is_played_through_a_wrapper() -> None:
    heads, tails = (
        played({"id": COIN, "wrapper": WRAPPER}, side)[0] for side in ("heads", "tails")
    )
    assert {heads.success, tails.success} == {True, False}
    assert heads.success == bool(heads.reward)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "gymnasium needs an environment: set options.id"),
        (
            {"id": COIN},
            r"has the spaces Discrete\(2\) and Discrete\(2\), and both must be Text: set options.wrapper",
        ),
        ({"id": "NoSuchThing-v0"}, "gymnasium cannot make id 'NoSuchThing-v0'"),
        (
            {"id": GUESS, "wrapper": "no.module:f"},
            "options.wrapper is 'no.module:f', but this Python has no module 'no'",
        ),
    ],
)
def test_what_cannot_be_played_is_a_config_error_before_the_first_episode(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        registry.make("gymnasium", options)
