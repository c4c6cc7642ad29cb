"""Weights that wait for the generations in progress: no generation has two versions, and nothing waits for ever."""

import asyncio
from pathlib import Path

import pytest

from horizonrl.actors.engines.drained import DrainedPolicy
from horizonrl.actors.engines.registry import start_policy
from horizonrl.actors.engines.scripted import ScriptedPolicy
from horizonrl.actors.policy import Generation, Policy
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import EngineDead, WeightsRejected
from horizonrl.common.types import PolicyVersion

TOKEN_S = 0.002
FIRST, SECOND = PolicyVersion(version=1), PolicyVersion(version=2)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    file = tmp_path / "weights.safetensors"
    file.touch()
    return file


def drained() -> DrainedPolicy:
    return DrainedPolicy(ScriptedPolicy(token_s=TOKEN_S))


async def ask(policy: Policy, max_tokens: int = 50) -> Generation:
    return await policy.generate(
        [11, 12], max_tokens=max_tokens, temperature=1.0, stop_ids=(), seed=None
    )


async def drain(
    policy: Policy, weights: Path, max_tokens: int = 50
) -> tuple[asyncio.Task[Generation], asyncio.Task[None]]:
    """Return a generation in progress, and the weights that wait for it."""
    running = asyncio.create_task(ask(policy, max_tokens))
    await asyncio.sleep(0.01)
    applied = asyncio.create_task(policy.apply(weights, FIRST))
    await asyncio.sleep(0.01)
    return running, applied


async def versions(policy: Policy, weights: Path) -> list[set[int]]:
    """Return the versions of each of 40 generations, while two versions are applied."""
    async with asyncio.TaskGroup() as group:
        asked = []
        for number in range(40):
            asked.append(group.create_task(ask(policy)))
            await asyncio.sleep(TOKEN_S * 5)
            if number in (10, 25):
                group.create_task(policy.apply(weights, FIRST if number == 10 else SECOND))
    return [{span.version for span in task.result().spans} for task in asked]


async def test_a_drained_generation_has_one_version_and_one_in_flight_may_have_two(
    weights: Path,
) -> None:
    apart, across = await asyncio.gather(
        versions(drained(), weights), versions(ScriptedPolicy(token_s=TOKEN_S), weights)
    )
    assert {len(found) for found in apart} == {1}
    assert set().union(*apart) == {0, 1, 2}
    assert max(len(found) for found in across) > 1


async def test_requests_wait_while_it_drains_and_get_the_new_version(weights: Path) -> None:
    policy = drained()
    running, applied = await drain(policy, weights)
    later = [asyncio.create_task(ask(policy, 2)) for _ in range(3)]
    await asyncio.sleep(0.02)
    assert not running.done()
    assert not applied.done()
    assert not any(task.done() for task in later), "they are held, so that the drain ends"
    assert {span.version for task in later for span in (await task).spans} == {1}
    assert running.done()
    assert applied.done()
    assert policy.version == FIRST


async def test_a_cancelled_drain_lets_the_waiting_requests_go_on_with_the_old_version(
    weights: Path,
) -> None:
    policy = drained()
    running, applied = await drain(policy, weights)
    later = asyncio.create_task(ask(policy, 2))
    await asyncio.sleep(0.01)
    applied.cancel()
    assert (await later).spans[0].version == 0
    assert not running.done(), "the held request did not wait for it"
    await policy.apply(weights, SECOND)
    assert (await running).spans[0].version == 0
    assert policy.version == SECOND


async def test_cancelled_requests_are_not_waited_for(weights: Path) -> None:
    policy = drained()
    running, applied = await drain(policy, weights, 900)
    held = asyncio.create_task(ask(policy, 2))
    await asyncio.sleep(0.01)
    held.cancel()
    running.cancel()
    await applied
    assert (await ask(policy, 2)).spans[0].version == 1


async def test_a_policy_that_is_closed_while_it_drains_ends_everybodys_wait(weights: Path) -> None:
    policy = drained()
    running, applied = await drain(policy, weights, 900)
    held = asyncio.create_task(ask(policy, 2))
    await asyncio.sleep(0.01)
    await policy.close()
    for request in (running, held):
        with pytest.raises(EngineDead):
            await request
    await asyncio.gather(applied, return_exceptions=True)


async def test_rejected_weights_leave_it_open(tmp_path: Path) -> None:
    policy = drained()
    with pytest.raises(WeightsRejected):
        await policy.apply(tmp_path / "nowhere.safetensors", FIRST)
    assert (await ask(policy, 2)).spans[0].version == 0


@pytest.mark.parametrize(
    ("weights", "kind"), [("in_flight", ScriptedPolicy), ("drained", DrainedPolicy)]
)
def test_the_config_chooses(weights: str, kind: type, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 7}')
    overrides = ["--actor.engine=scripted", f"--actor.weights={weights}"]
    config = RunConfig.load([], overrides)
    policy = asyncio.run(start_policy(config.actor, config.model, tmp_path, seed=0))
    assert type(policy) is kind
    assert policy.engine == "scripted"
