"""Delayed changes when another environment answers, and nothing else."""

import asyncio
import statistics
from typing import Any

import pytest

from horizonrl.common.errors import ConfigError, EnvironmentFailure
from horizonrl.envs import registry
from horizonrl.envs.api import (
    Environment,
    NamesState,
    ToolCall,
    make_expert,
    state_digest,
    tool_user,
)
from horizonrl.envs.check import check
from horizonrl.envs.worlds import delayed

PLAIN = {"format": "plain", "style": "compact"}


class Delays(list[float]):
    """Takes the place of `asyncio.sleep` in the environment."""

    async def sleep(self, delay_s: float) -> None:
        self.append(delay_s)


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> Delays:
    found = Delays()
    monkeypatch.setattr(delayed, "asyncio", found)
    return found


def make(env: str = "parity", **options: Any) -> Environment:
    return registry.make("delayed", {"env": env, **options})


async def play(environment: Environment, task_id: str, replies: list[str]) -> list[Any]:
    return [await environment.reset(task_id), *[await environment.step(reply) for reply in replies]]


def test_it_plays_what_the_other_environment_plays(delays: Delays) -> None:
    replies = ["even", "odd", "even", "even"]
    ours = asyncio.run(play(make(seconds=0.5), "round-05", replies))
    assert ours == asyncio.run(play(registry.make("parity"), "round-05", replies))
    assert delays == [0.5] * 4, "before each step, and not before the reset"


def test_tasks_splits_categories_and_version_are_the_other_ones() -> None:
    options = {"env": "textcraft", "options": PLAIN, "sigma": 1.0}
    for split in ("train", "test"):
        ours, theirs = (
            registry.select("delayed", split, ["depth2"], options),
            registry.select("textcraft", split, ["depth2"], PLAIN),
        )
        assert ours == theirs
    assert registry.load("textcraft").version in make("textcraft").version


def test_the_same_episode_has_the_same_delays_and_another_one_has_others(delays: Delays) -> None:
    def delays_of(task_id: str, replies: list[str], **options: Any) -> list[float]:
        delays.clear()
        asyncio.run(play(make(sigma=1.0, **options), task_id, replies))
        return list(delays)

    first = delays_of("round-05", ["a", "b", "c"])
    assert len(set(first)) == 3
    assert delays_of("round-05", ["a", "b", "c"]) == first
    assert delays_of("round-05", ["a", "b", "d"])[:2] == first[:2]
    assert delays_of("round-05", ["a", "b", "d"])[2] != first[2]
    assert not set(delays_of("round-06", ["a", "b", "c"])) & set(first)
    assert not set(delays_of("round-05", ["a", "b", "c"], seed=1)) & set(first)
    assert delays_of("round-05", ["a", "b", "c"], seconds=2.0) == [
        pytest.approx(2 * each) for each in first
    ]


async def test_an_instance_that_is_reset_forgets_the_episode_before(delays: Delays) -> None:
    environment = make(sigma=1.0)
    for _ in range(2):
        await play(environment, "round-05", ["a", "b"])
    assert delays[:2] == delays[2:]


async def test_delays_are_log_normal_about_the_median(delays: Delays) -> None:
    environment = make(seconds=0.6, sigma=1.0)
    for number in range(500):
        await play(environment, f"round-{number % 64:02d}", [str(number), "x", "y", "z"])
    assert statistics.median(delays) == pytest.approx(0.6, rel=0.1)
    assert statistics.mean(delays) == pytest.approx(0.6 * 1.6487, rel=0.1)


async def test_it_has_an_expert_and_states_if_the_other_environment_has_them() -> None:
    for env in ("textcraft", "reasoning-gym"):
        options = {"env": env, "seconds": 0.0}
        environment, other = registry.make("delayed", options), registry.make(env)
        task_id = registry.tasks(env)[0].task_id
        await environment.reset(task_id)
        await other.reset(task_id)
        assert state_digest(environment) == state_digest(other)
        assert isinstance(environment, NamesState) is isinstance(other, NamesState)
        assert registry.names_state("delayed", options) is registry.names_state(env)
        assert registry.has_expert("delayed", options) is registry.has_expert(env)


def test_the_expert_of_one_without_an_expert_is_a_failure() -> None:
    options = {"env": "mcp"}
    assert not registry.has_expert("delayed", options)
    assert registry.demonstrations_only("delayed", {"env": "transcripts"})
    with pytest.raises(EnvironmentFailure, match="reset"):
        make_expert(make())


async def test_calls_of_tools_are_delayed_too(delays: Delays) -> None:
    environment = make("textcraft", options={"format": "native"}, seconds=0.3)
    await environment.reset(registry.tasks("textcraft")[0].task_id)
    user = tool_user(environment)
    assert user is not None
    assert user.tools()
    await user.call(ToolCall("inventory", "{}"))
    assert delays == [0.3]
    assert tool_user(make("textcraft", options=PLAIN)) is None


def test_it_keeps_the_contract_of_environments_that_offer_tools() -> None:
    options = {"env": "maze", "options": {"format": "native"}, "seconds": 0.0}
    task_ids = [task.task_id for task in registry.tasks("maze")[:200:100]]
    report = asyncio.run(check("delayed", options, task_ids))
    assert [found for found in report.checks if not found.passed] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs an environment to delay: set options.env"),
        ({"env": "delayed"}, "cannot delay itself"),
        ({"env": "program"}, "drives itself"),
        ({"env": "parrity"}, "no environment 'parrity'; did you mean parity"),
        (
            {"env": "parity", "seconds": -1},
            r"option seconds: .*greater than or equal to 0 \(got -1\)",
        ),
        ({"env": "parity", "sigma": -0.5}, r"option sigma: .*greater than or equal to 0"),
        ({"env": "parity", "seconds": float("inf")}, "option seconds: .*finite"),
        ({"env": "parity", "second": 1}, "no option 'second'; did you mean seconds"),
        (
            {"env": "textcraft", "options": {"formt": "plain"}},
            "environment 'textcraft' has no option 'formt'",
        ),
    ],
)
def test_what_cannot_be_delayed_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        registry.make("delayed", options)
