"""The client of OpenEnv's protocol against servers that fail, and against a server of ours."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from horizonrl.common.errors import ConfigError, EnvironmentFailure, EnvironmentTimeout
from horizonrl.envs import registry
from horizonrl.envs.api import Environment, Step
from tests.envs.serving.servers import server_of

Answer = Callable[[dict[str, Any]], Any]


@asynccontextmanager
async def stub(answer: Answer) -> AsyncIterator[str]:
    """A server that answers each message with what `answer` makes of it; None closes the connection."""

    async def converse(request: web.Request) -> web.WebSocketResponse:
        channel = web.WebSocketResponse()
        await channel.prepare(request)
        async for message in channel:
            if (made := answer(message.json())) is None:
                break
            await (channel.send_str(made) if isinstance(made, str) else channel.send_json(made))
        return channel

    application = web.Application()
    application.router.add_get("/ws", converse)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def write_observation(
    observation: Any, reward: float | None = None, done: bool = False
) -> dict[str, Any]:
    return {
        "type": "observation",
        "data": {"observation": observation, "reward": reward, "done": done},
    }


def played(answer: Answer, *replies: str, **options: Any) -> tuple[str, list[Step]]:
    async def play() -> tuple[str, list[Step]]:
        async with stub(answer) as url:
            environment = registry.make("openenv", {"url": url, **options})
            try:
                first = (await environment.reset("seed-3")).text
                return first, [await environment.step(reply) for reply in replies]
            finally:
                await environment.close()

    return asyncio.run(play())


def test_the_seed_the_reply_and_the_constants_are_sent_as_the_options_say() -> None:
    heard: list[dict[str, Any]] = []

    def answer(message: dict[str, Any]) -> dict[str, Any]:
        heard.append(message)
        return write_observation({"text": "hello"}, 1.0, message["type"] == "step")

    first, (step,) = played(
        answer, "hi", action="code", constants={"player": 2}, instructions="Be kind."
    )
    assert heard == [
        {"type": "reset", "data": {"seed": 3}},
        {"type": "step", "data": {"player": 2, "code": "hi"}},
    ]
    assert first == "Be kind.\n\nhello"
    assert (step.reward, step.terminated, step.success) == (1.0, True, True)


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        ({"text": "a", "x": 1}, "a"),
        ({"board": [1, 2]}, '{"board": [1, 2]}'),
        ({"result": {"a": 1}}, '{"a": 1}'),
    ],
)
def test_an_observation_is_its_text_or_all_of_it(observation: dict[str, Any], text: str) -> None:
    assert played(lambda _: write_observation(observation))[0] == text


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "the server closed the connection at step"),
        ("no json", "no message of the protocol"),
        ({"type": "observation"}, "no message of the protocol"),
        (
            {"type": "error", "data": {"code": "EXECUTION_ERROR"}},
            "the server answered step with .*EXECUTION_ERROR",
        ),
        (
            write_observation({"text": "end"}, None, True),
            "the episode ended with reward None, and no step paid one",
        ),
    ],
)
def test_a_servers_failure_is_a_broken_episode_and_no_reward_of_zero(
    answer: Any, message: str
) -> None:
    with pytest.raises(EnvironmentFailure, match=message):
        played(
            lambda heard: write_observation({"text": "go"}) if heard["type"] == "reset" else answer,
            "hi",
        )


async def test_a_server_that_does_not_answer_in_time_is_a_broken_episode() -> None:
    connections: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_server(
        lambda _, writer: connections.append(writer), "127.0.0.1", 0
    )
    async with silent:
        url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
        environment = registry.make("openenv", {"url": url, "timeout_s": 0.2})
        with pytest.raises(EnvironmentTimeout, match=r"no answer to reset within 0.2 s"):
            await environment.reset("seed-0")
        await environment.close()
        for connection in connections:
            connection.close()
            await connection.wait_closed()


async def test_nobody_there_is_a_broken_episode() -> None:
    environment = registry.make("openenv", {"url": "http://127.0.0.1:9"})
    with pytest.raises(EnvironmentFailure, match="does not answer"):
        await environment.reset("seed-0")
    await environment.close()


@pytest.mark.parametrize("url", [None, "", "127.0.0.1:8000"])
def test_an_address_is_required(url: str | None) -> None:
    with pytest.raises(
        ConfigError, match=r"openenv needs the address of a server .* set options.url"
    ):
        registry.make("openenv", {"url": url})


def test_an_environment_of_ours_is_played_over_it_and_each_seed_is_a_task() -> None:
    async def play() -> list[Step]:
        async with server_of({"parity": {}}) as url:
            environment: Environment = registry.make(
                "openenv", {"url": f"{url}/parity", "action": "action"}
            )
            assert "This is round-05." in (await environment.reset("seed-5")).text
            steps = [await environment.step(reply) for reply in ("even", "odd", "even", "even")]
            with pytest.raises(EnvironmentFailure, match="no episode is in progress"):
                await environment.step("even")
            await environment.close()
            return steps

    steps = asyncio.run(play())
    assert [step.reward for step in steps] == [0.5, 0.0, 0.5, 0.5]
    assert steps[
        -1
    ].success  # a return of 1.5: the wire does not say what the environment says of success
