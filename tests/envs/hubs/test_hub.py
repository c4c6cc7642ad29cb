"""What the base class of hubs promises whatever a package does: its failures break an episode, and pay nothing."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

import pytest

from horizonrl.common.errors import ConfigError, EnvironmentFailure, MissingDependency
from horizonrl.envs.api import Step
from horizonrl.envs.formats import Command
from horizonrl.envs.hubs.hub import HubEnvironment, numbered_tasks, read_number
from horizonrl.envs.hubs.packages import hub_module


class Fragile:
    """Does what the action says."""

    def __init__(self) -> None:
        self.closed = False

    def follow(self, action: str) -> Step:
        match action:
            case "raise":
                raise ZeroDivisionError("it fell")
            case "exit":
                raise SystemExit(1)
            case "win":
                return Step("won", 1.0, terminated=True, success=True)
        return Step("x" * 300, 0.0, terminated=False)

    def close(self) -> None:
        self.closed = True


class FragileHub(HubEnvironment[Fragile]):
    env_id: ClassVar[str] = "fragile"
    version: str = "1"
    commands = (Command("do", "{what}", "do it"),)

    def __init__(self) -> None:
        super().__init__("plain", 100)
        self.begun: list[Fragile] = []

    def begin(self, task_id: str) -> tuple[str, Fragile]:
        if task_id == "fails":
            raise ZeroDivisionError("it fell")
        self.begun.append(Fragile())
        return "y" * 101 if task_id == "long" else "begin", self.begun[-1]


def played(scenario: Callable[[FragileHub], Awaitable[Any]]) -> Any:
    async def play() -> Any:
        hub = FragileHub()
        try:
            return await scenario(hub)
        finally:
            await hub.close()

    return asyncio.run(play())


@pytest.mark.parametrize("action", ["raise", "exit"])
def test_what_a_package_raises_breaks_the_episode_and_the_next_one_is_played(action: str) -> None:
    async def scenario(hub: FragileHub) -> Step:
        await hub.reset("a")
        with pytest.raises(
            EnvironmentFailure,
            match=r"its package raised (ZeroDivisionError: it fell|SystemExit: 1)",
        ):
            await hub.step(action)
        with pytest.raises(EnvironmentFailure, match="its last step failed"):
            await hub.step("win")
        await hub.reset("a")
        return await hub.step("win")

    assert played(scenario).reward == 1.0


def test_a_reset_that_fails_leaves_no_episode() -> None:
    async def scenario(hub: FragileHub) -> None:
        await hub.reset("a")
        with pytest.raises(EnvironmentFailure, match="it fell"):
            await hub.reset("fails")
        with pytest.raises(EnvironmentFailure, match="no episode has begun"):
            await hub.step("win")
        assert hub.begun[0].closed

    played(scenario)


def test_a_first_observation_that_is_too_long_is_refused_and_a_later_one_is_cut() -> None:
    async def scenario(hub: FragileHub) -> Step:
        with pytest.raises(
            ConfigError, match="has 101 characters and max_observation_chars is 100"
        ):
            await hub.reset("long")
        assert hub.begun[0].closed
        await hub.reset("a")
        return await hub.step("look")

    assert len(played(scenario).observation) == 100


def test_longer_lists_of_tasks_move_no_task_to_another_split() -> None:
    short, long = numbered_tasks(("a", "b"), 10), numbered_tasks(("a", "b"), 400)
    assert set(short) <= set(long)


@pytest.mark.parametrize("task_id", ["a", "a-", "a-01", "a--1", "a-1x", "c-1", "a-٣", "a-1 ", ""])
def test_an_id_that_names_no_task_is_none(task_id: str) -> None:
    assert read_number(task_id, ("a", "b-c")) is None
    assert read_number("b-c-12", ("a", "b-c")) == ("b-c", 12)


def test_a_missing_package_names_the_extra() -> None:
    with pytest.raises(MissingDependency, match=r"no_such_hub.*pip install 'horizonrl\[hubs\]'"):
        hub_module("no_such_hub")
