import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from horizonrl.common.errors import ConfigError, EnvironmentFailure, MissingDependency
from horizonrl.envs.agentgym.dialects import DIALECTS
from horizonrl.envs.formats import ActionFormat
from horizonrl.envs.worlds.sciworld import jvm
from horizonrl.envs.worlds.sciworld.env import MAX_STEPS, SciWorld
from horizonrl.envs.worlds.sciworld.tasks import index_tasks, list_tasks

needs_java = pytest.mark.skipif(
    shutil.which("java") is None, reason="ScienceWorld's simulator needs Java"
)


def task_of(*names: str) -> str:
    """Return the first test task of one of these kinds."""
    return next(
        task.task_id
        for task in list_tasks()
        if task.split == "test" and index_tasks()[task.task_id].name in names
    )


LIFESPAN = task_of("lifespan-longest-lived", "lifespan-shortest-lived")
"""Solved in three to five turns."""


@pytest.fixture(scope="module", autouse=True)
def no_jvm_outlives_the_tests() -> Iterator[None]:
    yield
    jvm.stop_all()
    assert not Path("object_type_ids.tsv").exists(), (
        "the JVM has written into the working directory"
    )


async def solve(environment: SciWorld, task_id: str) -> tuple[list[str], float, bool]:
    """Return the observations, the sum of the rewards and the success of the expert."""
    observations, total = [(await environment.reset(task_id)).text], 0.0
    expert = environment.expert()
    while True:
        step = await environment.step(expert.act(observations[-1]))
        observations.append(step.observation)
        total += step.reward
        if step.terminated or step.truncated:
            return observations, total, step.success


@needs_java
@pytest.mark.parametrize("action_format", ["react", "plain", "function", "code"])
def test_the_rewards_of_a_solution_add_up_to_one_in_every_format(
    action_format: ActionFormat,
) -> None:
    _, total, success = asyncio.run(
        solve(SciWorld(format=action_format, style="compact"), LIFESPAN)
    )
    assert success
    assert total == pytest.approx(1.0)


@needs_java
async def test_an_episode_does_not_depend_on_others_in_its_jvm() -> None:
    task_ids = [task_of("use-thermometer"), task_of("find-animal"), LIFESPAN]
    environments = [SciWorld(format="plain") for _ in task_ids]
    alone = [await solve(*each) for each in zip(environments, task_ids, strict=True)]
    more = [SciWorld(format="plain") for _ in range(6)]
    together = await asyncio.gather(
        *(solve(each, task_ids[index % 3]) for index, each in enumerate(more))
    )
    assert list(together) == alone * 2
    for environment in (*environments, *more):
        await environment.close()


@needs_java
async def test_a_score_below_zero_ends_the_episode() -> None:
    environment = SciWorld(format="plain")
    await environment.reset(task_of("find-animal", "find-living-thing"))
    step = await environment.step("focus on air")
    assert (step.terminated, step.success, step.reward, step.info) == (
        True,
        False,
        -1.0,
        {"score": -100},
    )
    with pytest.raises(EnvironmentFailure, match="is over"):
        await environment.step("look around")
    await environment.close()


@needs_java
async def test_an_episode_is_truncated_after_its_most_steps() -> None:
    environment = SciWorld(format="react")
    await environment.reset(LIFESPAN)
    steps = [await environment.step("no action") for _ in range(MAX_STEPS)]
    assert [step.truncated for step in steps] == [False] * (MAX_STEPS - 1) + [True]
    await environment.close()


@needs_java
async def test_a_dead_jvm_breaks_its_episodes_and_the_next_ones_have_another() -> None:
    environment, task_id = SciWorld(format="plain"), LIFESPAN
    first = (await environment.reset(task_id)).text
    for each in jvm._POOL:
        if each._process is not None:
            each._process.kill()
            each._process.wait()
    with pytest.raises(EnvironmentFailure, match="JVM"):
        await environment.step("look around")
    with pytest.raises(EnvironmentFailure, match="its last step failed"):
        await environment.step("look around")
    assert (await environment.reset(task_id)).text == first
    assert (await solve(environment, task_id))[2]
    await environment.close()


@needs_java
async def test_valid_actions_are_listed_on_demand_in_order_and_within_the_bound() -> None:
    environment = SciWorld(format="plain", style="compact", max_observation_chars=2_000)
    await environment.reset(task_of("use-thermometer"))
    listed = (await environment.step("valid actions")).observation
    assert len(listed) <= 2_000
    actions = listed.split(", ")[:-1]  # The last one is cut.
    assert actions == sorted(actions)
    assert any(action.startswith("close") for action in actions)
    await environment.close()


def test_without_java_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MissingDependency, match="needs Java 17 on the PATH"):
        SciWorld()


@needs_java
@pytest.mark.parametrize("task_id", ["", "-1", "4639", "boil"])
def test_a_task_that_does_not_exist_is_a_config_error(task_id: str) -> None:
    with pytest.raises(ConfigError, match="sciworld has no task"):
        asyncio.run(SciWorld().reset(task_id))


@needs_java
@pytest.mark.slow
@pytest.mark.timeout(3_600)
def test_the_expert_solves_every_test_task() -> None:
    async def run() -> list[str]:
        environment = SciWorld(format="plain")
        tests = [task.task_id for task in list_tasks() if task.split == "test"]
        failed = [task_id for task_id in tests if not (await solve(environment, task_id))[2]]
        await environment.close()
        return failed

    assert asyncio.run(run()) == []


@needs_java
async def test_agentgyms_style_has_no_rules_and_the_simulators_own_limit_of_moves() -> None:
    environment = SciWorld(style="agentgym", format="plain")
    first = (await environment.reset("606")).text  # AgentGym's number, which is not listed
    assert first.startswith("Your task is to measure the temperature of unknown substance B")
    assert first.splitlines()[1].startswith("This room is called the hallway.")
    # Takes no time.
    steps = [await environment.step("look around") for _ in range(MAX_STEPS + 1)]
    steps += [await environment.step("wait") for _ in range(10)]
    assert [step.truncated for step in steps] == [False] * (MAX_STEPS + 10) + [True]
    await environment.reset("606")
    lost = await environment.step("focus on door to kitchen")
    assert (lost.reward, lost.terminated) == (-1.0, True)
    assert DIALECTS["sciworld"].write_step(lost, lost.reward)["score"] == -100
    await environment.close()


@needs_java
def test_a_jvm_that_is_full_takes_no_further_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jvm, "SIMULATIONS", 0)
    with pytest.raises(EnvironmentFailure, match="run fewer episodes at a time"):
        asyncio.run(SciWorld().reset("3"))


@needs_java
def test_what_is_prepared_is_a_jvm_that_has_taken_some_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepared = jvm._POOL[0]
    simulations = prepared.simulations
    monkeypatch.setattr(jvm, "_POOL", (prepared,))
    monkeypatch.setattr(jvm, "WARM_STEPS", 2 * jvm.PIECE_STEPS)
    monkeypatch.setattr(prepared, "warm_steps", 0)
    assert SciWorld.prepare()
    assert not SciWorld.prepare()
    assert (prepared.warm_steps, prepared.simulations) == (2 * jvm.PIECE_STEPS, simulations)
