"""Episodes of programs: what ends them, what breaks them, and that a linear one is what a rollout would have played."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from horizonrl.actors.rollout import programs
from horizonrl.actors.rollout.rollout import Rollout, play
from horizonrl.common.errors import (
    EngineDead,
    EnvironmentFailure,
    EnvironmentTimeout,
    PolicyFailure,
)
from horizonrl.common.types import Episode, StopReason, Ticket
from horizonrl.envs.api import Endpoint, Outcome
from tests.actors.gateway.served import (
    CHAT,
    Played,
    Remembering,
    assert_trained_is_sampled,
    gateway_of,
    ticket,
)
from tests.actors.gateway.test_retries import Failing
from tests.actors.players import Echo

Run = Callable[[Endpoint], Awaitable[object]]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "GRACE_S", 0.05)


async def ask(endpoint: Endpoint, text: str = "hello", history: Any = (), retries: int = 0) -> str:
    async with AsyncOpenAI(
        base_url=endpoint.base_url, api_key=endpoint.key, max_retries=retries
    ) as client:
        messages = [*history, {"role": "user", "content": text}]
        reply = await client.chat.completions.create(model="m", messages=messages)
        return reply.choices[0].message.content or ""


def played(
    run: Run | Played, order: Ticket | None = None, policy: Any = None, gateway: bool = True
) -> tuple[Episode, Played]:
    async def scenario() -> tuple[Episode, Played]:
        program = run if isinstance(run, Played) else Played(run)
        async with gateway_of(policy or Remembering(lambda read: "ok")) as served:
            rollout = Rollout(served.policy, CHAT, None, 5.0, gateway=served if gateway else None)
            return await play(lambda: program, rollout, order or ticket(), 0), program

    return asyncio.run(scenario())


def test_a_program_that_ends_by_itself_is_terminated_and_graded() -> None:
    episode, program = played(lambda endpoint: ask(endpoint))
    assert (episode.stop, episode.success, episode.episode_return) == (
        StopReason.TERMINATED,
        True,
        1.0,
    )
    assert program.finished == [True]
    assert episode.generate_s > 0
    assert episode.environment_s > 0


def test_a_program_that_fails_at_its_task_earns_nothing_and_is_not_broken() -> None:
    episode, _ = played(Played(ask, reward=0.0))
    assert (episode.stop, episode.valid, episode.episode_return) == (
        StopReason.TERMINATED,
        True,
        0.0,
    )


async def crash(endpoint: Endpoint) -> None:
    await ask(endpoint)
    raise EnvironmentFailure("the program ended with exit code 1: oops \ud83d")


async def hang(endpoint: Endpoint) -> None:
    await ask(endpoint)
    raise EnvironmentTimeout("the program ran for longer than 1 s")


async def silent(endpoint: Endpoint) -> None: ...


async def too_long(endpoint: Endpoint) -> None:
    await ask(endpoint, "x" * 9000)


class Slow(Played):
    async def grade(self, finished: bool) -> Outcome:
        raise EnvironmentTimeout("the grader ran for longer than 1 s")


class Ungradable(Played):
    async def grade(self, finished: bool) -> Outcome:
        raise RuntimeError("no verdict")


@pytest.mark.parametrize(
    ("run", "stop", "error"),
    [
        (crash, StopReason.ENV_ERROR, "exit code 1: oops"),
        (hang, StopReason.ENV_TIMEOUT, "longer than 1 s"),
        (silent, StopReason.ENV_ERROR, "without a call of the model"),
        (too_long, StopReason.UNFIT, "does not fit"),
        (Ungradable(ask), StopReason.ENV_ERROR, "RuntimeError: no verdict"),
        (Slow(ask), StopReason.ENV_TIMEOUT, "the grader ran for longer"),
    ],
)
def test_what_is_not_the_agents_failure_is_broken_and_never_a_zero(
    run: Run | Played, stop: StopReason, error: str
) -> None:
    episode, program = played(run)
    assert (episode.stop, episode.valid) == (stop, False)
    assert error in (episode.error or "")
    assert program.finished == []


def test_an_episode_says_how_many_of_its_requests_were_refused_as_wrong_and_why_the_last() -> None:
    async def run(endpoint: Endpoint) -> None:
        image: Any = [{"type": "image_url", "image_url": {"url": "x"}}]
        async with AsyncOpenAI(
            base_url=endpoint.base_url, api_key=endpoint.key, max_retries=0
        ) as client:
            for wrong in ([], [{"role": "user", "content": image}]):
                with pytest.raises(BadRequestError):
                    await client.chat.completions.create(model="m", messages=wrong)
        await ask(endpoint)
        with pytest.raises(BadRequestError, match="horizon"):
            await ask(endpoint)

    for _ in range(2):
        episode, _ = played(run, ticket(horizon_turns=1))
        assert (episode.stop, episode.refused) == (StopReason.HORIZON, 2)
        assert episode.refusal is not None and "image_url" in episode.refusal
    episode, _ = played(ask)
    assert (episode.refused, episode.refusal) == (0, None)


def test_a_call_beyond_the_horizon_truncates_the_episode_and_what_there_is_is_graded() -> None:
    async def endless(endpoint: Endpoint) -> None:
        for _ in range(9):
            await ask(endpoint)

    episode, program = played(endless, ticket(horizon_turns=3))
    assert (episode.stop, len(episode.turns), program.finished) == (StopReason.HORIZON, 3, [False])
    assert episode.episode_return == 1.0


def test_a_program_that_uses_every_call_and_no_more_is_not_truncated() -> None:
    episode, _ = played(ask, ticket(horizon_turns=1))
    assert episode.stop is StopReason.TERMINATED


def test_a_program_that_ignores_the_end_of_its_calls_is_ended() -> None:
    async def deaf(endpoint: Endpoint) -> None:
        await ask(endpoint)
        with pytest.raises(BadRequestError):
            await ask(endpoint)
        await asyncio.Event().wait()

    episode, _ = played(deaf, ticket(horizon_turns=1))
    assert (episode.stop, len(episode.turns)) == (StopReason.HORIZON, 1)


@pytest.mark.parametrize("first", [0, 1])
def test_calls_within_the_horizon_are_sampled_to_their_end_although_one_too_many_was_refused(
    first: int,
) -> None:
    """An agent's parallel calls: grace begins when the last of them has its answer."""

    async def fans_out(endpoint: Endpoint) -> None:
        for _ in range(first):
            await ask(endpoint)
        answers = await asyncio.gather(*(ask(endpoint) for _ in range(3)), return_exceptions=True)
        assert sum(isinstance(answer, str) for answer in answers) == 2

    policy = Remembering(token_s=0.02)  # 0.3 s for a call, and 0.05 s of grace
    episode, program = played(fans_out, ticket(horizon_turns=2 + first, max_turn_tokens=16), policy)
    assert (episode.stop, len(episode.turns), program.finished) == (
        StopReason.HORIZON,
        2 + first,
        [False],
    )


@pytest.mark.parametrize("compacts", [False, True])
def test_a_full_context_truncates_unless_the_program_goes_on_without_it(compacts: bool) -> None:
    async def grows(endpoint: Endpoint) -> None:
        await ask(endpoint)
        with pytest.raises(BadRequestError) as full:
            await ask(endpoint, "x" * 9000)
        assert full.value.code == "context_length_exceeded"
        if compacts:
            await ask(endpoint, "in short")

    episode, _ = played(grows)
    assert episode.stop is (StopReason.TERMINATED if compacts else StopReason.CONTEXT)


def test_an_engine_that_failed_a_call_for_good_is_a_policy_error() -> None:
    async def tries(endpoint: Endpoint) -> None:
        await ask(endpoint)

    episode, _ = played(tries, policy=Failing(PolicyFailure("aborted")))
    assert (episode.stop, episode.error) == (StopReason.POLICY_ERROR, "PolicyFailure: aborted")
    episode, _ = played(
        lambda endpoint: ask(endpoint, retries=2), policy=Failing(PolicyFailure("aborted"))
    )
    assert episode.stop is StopReason.TERMINATED


def test_without_an_engine_there_is_no_next_episode() -> None:
    with pytest.raises(EngineDead):
        played(ask, policy=Failing(EngineDead("gone")))


def test_a_policy_that_is_not_served_breaks_the_episode() -> None:
    episode, _ = played(ask, gateway=False)
    assert "not served" in (episode.error or "")


async def test_a_cancelled_episode_ends_its_program() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def waits(endpoint: Endpoint) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with gateway_of(Remembering()) as served:
        rollout = Rollout(served.policy, CHAT, None, 5.0, gateway=served)
        playing = asyncio.create_task(play(lambda: Played(waits), rollout, ticket(), 0))
        await begun.wait()
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert ended.is_set()


@pytest.mark.parametrize("announce", [False, True])
def test_a_linear_program_gives_the_episode_that_a_rollout_gives(announce: bool) -> None:
    """Bit for bit: the same ids, logprobs and spans, under the same seed."""
    order = ticket(horizon_turns=3, max_turn_tokens=16, announce=announce, seed=7)

    async def echo(endpoint: Endpoint) -> None:
        environment, history = Echo(last=3), []
        observation = (await environment.reset("say")).text
        for _ in range(3):
            reply = await ask(endpoint, observation, history)
            history += [
                {"role": "user", "content": observation},
                {"role": "assistant", "content": reply},
            ]
            observation = (await environment.step(reply)).observation

    policies = Remembering(seed=3), Remembering(seed=3)
    served, _ = played(echo, order, policies[0])
    native = asyncio.run(Rollout(policies[1], CHAT, None, 5.0).episode(Echo(last=3), order, 0))
    assert served.branches == ()
    keep = {"prompt_ids", "prompt", "stop", "success"}
    assert served.model_dump(include=keep) == native.model_dump(include=keep)
    for ours, theirs in zip(served.turns, native.turns, strict=True):
        keep = {"output_ids", "logprobs", "spans", "observation_ids", "reward", "branch", "trained"}
        assert ours.model_dump(include=keep) == theirs.model_dump(include=keep)
    assert_trained_is_sampled(served, policies[0])
