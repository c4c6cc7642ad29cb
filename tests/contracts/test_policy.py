"""What holds for every policy: ids in, ids out, each with its logprob and the version that sampled it."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from horizonrl.actors.engines.drained import DrainedPolicy
from horizonrl.actors.engines.scripted import ScriptedPolicy
from horizonrl.actors.policy import Generation
from horizonrl.common.errors import EngineDead, PolicyFailure, WeightsRejected
from horizonrl.common.types import PolicyVersion
from tests.engine import Played

PROMPT = (11, 12, 13, 14)


@pytest.fixture
def scripted_policy(tmp_path: Path) -> Iterator[Played]:
    weights = tmp_path / "weights.safetensors"
    weights.touch()
    with asyncio.Runner() as runner:
        yield Played(
            runner, ScriptedPolicy(max_context_tokens=256, token_s=0.002), weights, weights
        )


@pytest.fixture
def drained_policy(scripted_policy: Played) -> Played:
    """One whose weights wait for its generations: `test_drained.py` has what it does instead of splitting them."""
    return replace(scripted_policy, policy=DrainedPolicy(scripted_policy.policy))


VLLM = pytest.param("vllm_engine", marks=pytest.mark.process)


@pytest.fixture(params=["scripted_policy", "drained_policy", VLLM])
def played(request: pytest.FixtureRequest) -> Played:
    fixture: Played = request.getfixturevalue(request.param)
    return fixture


@pytest.fixture(params=["scripted_policy", VLLM])
def trainable(request: pytest.FixtureRequest) -> Played:
    """A policy whose new weights do not wait for its generations."""
    fixture: Played = request.getfixturevalue(request.param)
    return fixture


async def ask(
    played: Played, *, max_tokens: int = 16, stop_ids: Sequence[int] = (), seed: int | None = 7
) -> Generation:
    return await played.policy.generate(
        PROMPT, max_tokens=max_tokens, temperature=1.0, stop_ids=stop_ids, seed=seed
    )


def later(played: Played) -> PolicyVersion:
    return PolicyVersion(version=played.policy.version.version + 1, lineage=3)


def test_every_token_has_a_logprob_and_a_version(played: Played) -> None:
    generation = played.run(ask(played))
    assert len(generation.ids) == len(generation.logprobs) == 16
    assert all(logprob <= 0 for logprob in generation.logprobs)
    assert sum(span.tokens for span in generation.spans) == 16
    assert {(span.lineage, span.version) for span in generation.spans} == {
        (played.policy.version.lineage, played.policy.version.version)
    }


def test_a_seed_repeats_a_generation_and_another_one_does_not(played: Played) -> None:
    first, again, other = (played.run(ask(played, seed=seed)) for seed in (7, 7, 8))
    assert first == again
    assert first.ids != other.ids


def test_a_generation_ends_with_the_first_stop_token(played: Played) -> None:
    free = played.run(ask(played)).ids
    stop = free[5]
    stopped = played.run(ask(played, stop_ids=(stop,)))
    assert stopped.ids[-1] == stop
    assert stop not in stopped.ids[:-1]
    assert len(stopped.ids) <= 6


def test_a_prompt_that_fills_the_context_is_a_failed_request(played: Played) -> None:
    full = [11] * (played.policy.max_context_tokens + 1)
    with pytest.raises(PolicyFailure, match=r"\d"):
        played.run(
            played.policy.generate(full, max_tokens=1, temperature=1.0, stop_ids=(), seed=None)
        )


def test_weights_applied_between_two_tokens_split_the_generation_by_version(
    trainable: Played,
) -> None:
    async def update() -> Generation:
        running = asyncio.create_task(ask(trainable, max_tokens=200))
        await asyncio.sleep(0.1)
        await trainable.policy.apply(trainable.second, new)
        return await running

    old, new = trainable.policy.version, later(trainable)
    generation = trainable.run(update())
    spans = generation.spans
    assert [(span.lineage, span.version) for span in spans] == [
        (v.lineage, v.version) for v in (old, new)
    ]
    assert sum(span.tokens for span in spans) == len(generation.ids) == 200
    assert trainable.policy.version == new
    trainable.run(trainable.policy.apply(trainable.first, later(trainable)))


def test_requests_made_while_weights_are_applied_are_served(trainable: Played) -> None:
    async def update() -> list[Generation]:
        applied = asyncio.create_task(trainable.policy.apply(trainable.second, new))
        asked = []
        while not applied.done():
            asked.append(asyncio.create_task(ask(trainable, max_tokens=2)))
            await asyncio.sleep(0.005)
        await applied
        return [await request for request in asked]

    new = later(trainable)
    generations = trainable.run(update())
    assert all(len(generation.ids) == 2 for generation in generations)
    trainable.run(trainable.policy.apply(trainable.first, later(trainable)))


def test_a_file_that_is_not_there_is_rejected_and_the_old_weights_stay(played: Played) -> None:
    old = played.policy.version
    with pytest.raises(WeightsRejected, match="not applied"):
        played.run(played.policy.apply(Path("nowhere.safetensors"), later(played)))
    assert played.policy.version == old
    assert played.run(ask(played)).spans[0].version == old.version


def test_a_cancelled_request_leaves_the_policy_at_work(played: Played) -> None:
    async def cancel() -> None:
        running = asyncio.create_task(ask(played, max_tokens=200))
        await asyncio.sleep(0.05)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    played.run(cancel())
    assert len(played.run(ask(played)).ids) == 16


# vLLM's is shared, and closed by its own test
@pytest.mark.parametrize("name", ["scripted_policy", "drained_policy"])
def test_a_closed_policy_is_dead(name: str, request: pytest.FixtureRequest) -> None:
    played: Played = request.getfixturevalue(name)
    played.run(played.policy.close())
    with pytest.raises(EngineDead, match="closed"):
        played.run(ask(played))
