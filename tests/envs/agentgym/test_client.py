"""The client's contract, against a stub of each of AgentGym's fifteen servers."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from horizonrl.actors.rollout.rollout import Rollout
from horizonrl.common.errors import ConfigError, EnvironmentFailure, EnvironmentTimeout
from horizonrl.common.types import Kind, Sampling, StopReason, Task, Ticket
from horizonrl.envs import registry
from horizonrl.envs.agentgym.dialects import DIALECTS
from horizonrl.envs.agentgym.handles import make_handles
from horizonrl.envs.api import Environment, Step
from tests.actors.players import SayingPolicy, make_chat
from tests.envs.agentgym.stub import FIRST, NEXT, WIRES, Stub, stub_of

every_id = pytest.mark.parametrize("name", WIRES)
TASK = "3"
BREAKING = [500, 422, "error", "false", "text", "empty"]
"""What no retry mends."""


def play(
    name: str, episode: Callable[[Environment, Stub], Awaitable[None]], **options: Any
) -> Stub:
    """Run an episode against a new stub, without the rules before its first observation."""

    async def run() -> Stub:
        async with stub_of(name) as stub:
            options.setdefault("test", "3-3")  # a stub knows one task
            options.setdefault("instructions", "")
            environment = registry.make(f"agentgym-{name}", {"url": stub.url, **options})
            try:
                await episode(environment, stub)
            finally:
                await environment.close()
            return stub

    return asyncio.run(run())


async def first_turn(environment: Environment) -> Step:
    await environment.reset(TASK)
    return await environment.step(WIRES[environment.env_id.removeprefix("agentgym-")].reply)


def test_there_is_a_client_for_each_of_the_fifteen_ids() -> None:
    clients = {
        name.removeprefix("agentgym-") for name in registry.names() if name.startswith("agentgym-")
    }
    assert clients == set(WIRES) == set(DIALECTS)
    assert len(clients) == 15
    for name in clients:
        assert registry.load(f"agentgym-{name}").env_id == f"agentgym-{name}"


@every_id
def test_an_episode_is_played_as_the_wire_examples_say(name: str) -> None:
    async def episode(environment: Environment, stub: Stub) -> None:
        first = (await environment.reset(TASK)).text
        assert first == WIRES[name].first if name != "wordle" else first.endswith(FIRST)
        step = await environment.step(WIRES[name].reply)
        assert (step.observation, step.terminated, step.truncated, step.success) == (
            NEXT,
            True,
            False,
            True,
        )
        assert (
            step.reward == step.info["score"] == {"babyai": 0.9, "sciworld": 100.0}.get(name, 1.0)
        )
        with pytest.raises(EnvironmentFailure, match="reset before the next step"):
            await environment.step(WIRES[name].reply)

    stub = play(name, episode)
    assert stub.counts["/create"] == stub.counts["/reset"] == stub.counts["/step"] == 1
    assert stub.counts["/close"] == WIRES[name].closes


@every_id
def test_the_rules_stand_before_the_first_observation_unless_the_user_has_his_own(
    name: str,
) -> None:
    async def ruled(environment: Environment, _: Stub) -> None:
        assert (await environment.reset(TASK)).text.startswith(DIALECTS[name].rules + "\n")

    async def instructed(environment: Environment, _: Stub) -> None:
        assert (await environment.reset(TASK)).text.startswith("Do well.")

    play(name, ruled, instructions=None)
    play(name, instructed, instructions="Do well.")


@every_id
@pytest.mark.parametrize("path", ["/create", "/reset", "/step"])
def test_an_error_breaks_the_episode_and_the_next_one_is_played(name: str, path: str) -> None:
    async def episode(environment: Environment, stub: Stub) -> None:
        for fault in BREAKING:
            if path == "/reset" and fault == "empty" and WIRES[name].key == "env_idx":
                continue  # nothing of that answer is read: the observation is asked for
            await environment.close()
            make_handles(stub.base).void_all()  # those without /close keep theirs
            stub.faults[path] = [fault]
            with pytest.raises(
                EnvironmentFailure, match=name if fault == "empty" else path
            ) as raised:
                await first_turn(environment)
            assert not isinstance(raised.value, EnvironmentTimeout)
            with pytest.raises(EnvironmentFailure, match="reset before the next step"):
                await environment.step(WIRES[name].reply)
            assert (await first_turn(environment)).success

    play(name, episode)


@pytest.mark.parametrize("name", ["textcraft", "webshop", "maze"])
@pytest.mark.parametrize("path", ["/create", "/reset", "/step"])
def test_a_server_that_hangs_is_a_timeout(name: str, path: str) -> None:
    async def episode(environment: Environment, stub: Stub) -> None:
        stub.faults[path] = ["hang"]
        with pytest.raises(EnvironmentTimeout, match=f"{path} gave no answer within 1 s"):
            await first_turn(environment)

    play(name, episode, timeout_s=1.0)


@pytest.mark.parametrize("name", ["textcraft", "webshop"])
def test_what_begins_nothing_twice_is_tried_again(name: str) -> None:
    async def episode(environment: Environment, stub: Stub) -> None:
        stub.faults = {"/create": ["drop", 429], "/reset": ["drop", 503]}
        assert (await first_turn(environment)).success

    stub = play(name, episode)
    # The broken connection of a reset gives the environment up: the server may have started anew.
    assert (stub.counts["/create"], stub.counts["/reset"], stub.counts["/step"]) == (4, 3, 1)


@every_id
def test_a_step_is_never_tried_again(name: str) -> None:
    async def episode(environment: Environment, stub: Stub) -> None:
        stub.faults = {"/step": ["drop", "drop"]}
        with pytest.raises(EnvironmentFailure, match="is the server running"):
            await first_turn(environment)

    assert play(name, episode).counts["/step"] == 1


def test_a_step_is_tried_again_under_its_key_where_the_server_knows_keys() -> None:
    async def episode(environment: Environment, stub: Stub) -> None:
        stub.repeatable, stub.faults = True, {"/step": ["drop", 503]}
        assert (await first_turn(environment)).success

    stub = play("textcraft", episode)
    assert stub.counts["/step"] == len(stub.keys) == 3
    assert len(set(stub.keys)) == 1


def test_a_refusal_by_a_proxy_says_nothing_about_the_server_behind_it() -> None:
    async def episode(environment: Environment, stub: Stub) -> None:
        stub.repeatable = True
        stub.answers = [{"observation": NEXT, "reward": 0, "done": False}] * 2
        await first_turn(environment)
        stub.faults["/step"] = [503, "drop"]
        await environment.step(WIRES["textcraft"].reply)
        assert (await environment.step(WIRES["textcraft"].reply)).success

    play("textcraft", episode)


@every_id
def test_a_death_in_mid_episode_breaks_it_and_a_server_started_again_is_used(name: str) -> None:
    async def episode(environment: Environment, stub: Stub) -> None:
        await environment.reset(TASK)
        await stub.die()
        with pytest.raises(EnvironmentFailure, match="is the server running"):
            await environment.step(WIRES[name].reply)
        await environment.close()
        await environment.close()
        await stub.start()
        await environment.reset(TASK)
        assert (await environment.step(WIRES[name].reply)).success

    play(name, episode)


@every_id
def test_close_is_harmless_when_repeated_unused_or_refused(name: str) -> None:
    async def episode(environment: Environment, stub: Stub) -> None:
        await environment.close()
        await environment.reset(TASK)
        stub.faults["/close"] = [500]
        await environment.close()
        await environment.close()
        with pytest.raises(EnvironmentFailure, match="reset before the next step"):
            await environment.step(WIRES[name].reply)

    assert play(name, episode).counts["/close"] == WIRES[name].closes


@every_id
def test_a_server_without_close_is_not_filled_with_environments(name: str) -> None:
    async def episode(environment: Environment, stub: Stub) -> None:
        for _ in range(3):
            await environment.reset(TASK)
            await environment.close()

    stub = play(name, episode)
    assert stub.counts["/create"] == (3 if WIRES[name].closes else 1)


def test_an_idle_environment_that_the_server_no_longer_knows_is_replaced() -> None:
    async def episode(environment: Environment, stub: Stub) -> None:
        await environment.reset(TASK)
        await environment.close()
        stub.faults["/reset"] = ["error"]
        assert (await environment.reset(TASK)).text == FIRST

    assert play("maze", episode).counts["/create"] == 2


@every_id
def test_a_cancelled_step_gives_the_servers_environment_up(name: str) -> None:
    async def episode(environment: Environment, stub: Stub) -> None:
        stub.faults["/step"] = ["hang"]
        await environment.reset(TASK)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await environment.step(WIRES[name].reply)
        await environment.reset(TASK)
        assert (await environment.step(WIRES[name].reply)).success

    stub = play(name, episode)
    assert stub.counts["/create"] == (1 if DIALECTS[name].shares else 2)
    assert stub.counts["/close"] == 2 * WIRES[name].closes


def test_a_score_is_that_of_the_episode_and_a_reward_that_of_the_step() -> None:
    async def episode(environment: Environment, stub: Stub) -> None:
        stub.answers = [
            {"observation": "", "reward": 9, "score": score, "done": False}
            for score in (10, 10, 40)
        ]
        await environment.reset(TASK)
        steps = [await environment.step(WIRES["sciworld"].reply) for _ in range(4)]
        assert [step.reward for step in steps] == [10, 0, 30, 60]
        assert [step.info["score"] for step in steps] == [10, 10, 40, 100]
        assert [step.success for step in steps] == [False, False, False, True]

    play("sciworld", episode)


def test_webarena_pays_at_the_end_alone_and_its_own_limit_is_a_truncation() -> None:
    cut = {"observation": NEXT, "reward": 1.0, "terminated": False, "truncated": True, "info": {}}

    async def episode(environment: Environment, stub: Stub) -> None:
        stub.answers = [cut]
        await environment.reset(TASK)
        step = await environment.step(WIRES["webarena"].reply)
        assert (step.reward, step.terminated, step.truncated, step.success) == (
            0.0,
            False,
            True,
            False,
        )

    play("webarena", episode)


def test_a_reset_that_webarena_gave_up_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    async def episode(environment: Environment, stub: Stub) -> None:
        monkeypatch.setitem(WIRES["webarena"].begun, "observation", "TimeoutError")
        with pytest.raises(EnvironmentTimeout, match="its sites may need a restart"):
            await environment.reset(TASK)

    play("webarena", episode)


@pytest.mark.parametrize(
    "broken", [{"reward": "1"}, {"reward": float("nan")}, {"done": None}, {"observation": 3}]
)
def test_an_answer_of_the_wrong_kind_is_no_reward(broken: dict[str, Any]) -> None:
    async def episode(environment: Environment, stub: Stub) -> None:
        stub.answers = [WIRES["textcraft"].stepped | broken]
        await environment.reset(TASK)
        with pytest.raises(EnvironmentFailure, match="textcraft: /step answered"):
            await environment.step(WIRES["textcraft"].reply)

    play("textcraft", episode)


def test_a_long_first_observation_is_refused_since_a_cut_one_may_lose_the_task() -> None:
    async def episode(environment: Environment, stub: Stub) -> None:
        with pytest.raises(
            ConfigError, match=r"has 217 characters and max_observation_chars is 216"
        ):
            await environment.reset(TASK)
        with pytest.raises(EnvironmentFailure, match="reset before the next step"):
            await environment.step(WIRES["textcraft"].reply)

    play("textcraft", episode, instructions="x" * 200, max_observation_chars=216)


def test_a_long_observation_is_cut() -> None:
    async def episode(environment: Environment, stub: Stub) -> None:
        stub.answers = [{"observation": "x" * 1000, "reward": 0, "done": False}]
        await environment.reset(TASK)
        assert len((await environment.step(WIRES["textcraft"].reply)).observation) == 100

    play("textcraft", episode, max_observation_chars=100)


def test_wordle_is_told_its_words() -> None:
    async def episode(environment: Environment, stub: Stub) -> None:
        assert "The words: s h i r e, p a n i c" in (await environment.reset(TASK)).text

    play("wordle", episode)


@pytest.mark.parametrize("url", [None, "127.0.0.1:36001", ""])
def test_a_client_without_an_address_says_what_to_set(url: str | None) -> None:
    with pytest.raises(ConfigError, match=r"needs the address of its server .* set options\.url"):
        registry.make("agentgym-webshop", {"url": url})


def test_an_unknown_task_is_refused_before_the_server_is_asked() -> None:
    async def episode(environment: Environment, stub: Stub) -> None:
        for task_id in ("999", "03", "-1", "x"):
            with pytest.raises(ConfigError, match=f"no task '{task_id}'"):
                await environment.reset(task_id)

    assert play("textcraft", episode, train="0-9").requests == []


def test_a_broken_server_breaks_the_episode_and_not_the_run() -> None:
    task = Task(env_id="agentgym-textcraft", task_id=TASK)
    ticket = Ticket(
        number=0,
        kind=Kind.TRAIN,
        task=task,
        group_size=2,
        horizon_turns=4,
        sampling=Sampling(max_turn_tokens=64),
    )
    chat = make_chat()
    rollout = Rollout(SayingPolicy(chat, WIRES["textcraft"].reply), chat, None, step_timeout_s=5.0)

    async def episode(environment: Environment, stub: Stub) -> None:
        stub.faults["/step"] = ["error"]
        broken = await rollout.episode(environment, ticket, 0)
        assert broken.stop is StopReason.ENV_ERROR
        assert "is not valid" in (broken.error or "")
        whole = await rollout.episode(environment, ticket, 1)
        assert (whole.stop, whole.success) == (StopReason.TERMINATED, True)

    play("textcraft", episode)
