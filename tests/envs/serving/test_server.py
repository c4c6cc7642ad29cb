"""What the server promises to any client: ids, locks, keys, codes, limits."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import ClientSession

from horizonrl.common.errors import ConfigError
from horizonrl.envs.serving import episodes, hosts
from horizonrl.envs.serving.server import Serving
from horizonrl.ops.cli.main import main
from tests.envs.serving.servers import WORLD, Caller, caller_of, server_of
from tests.processes import command_line

Scenario = Callable[[Caller], Awaitable[None]]


@pytest.fixture(autouse=True)
def _world(install: Callable[..., None]) -> None:
    install("world", WORLD)


def run(scenario: Scenario, **options: Any) -> None:
    async def served() -> None:
        async with caller_of("world", "/world/served", **options) as caller:
            await scenario(caller)

    asyncio.run(served())


def refused(answer: tuple[int, Any]) -> tuple[int, str]:
    return answer[0], answer[1]["code"]


def test_wrong_calls_are_refused_with_a_status_and_a_code() -> None:
    async def scenario(call: Caller) -> None:
        _, created = await call("create")
        episode = created["id"]
        assert refused(await call("step", {"id": episode, "text": "x"})) == (409, "no_episode")
        assert refused(await call("reset", {"id": episode, "task_id": "nowhere"})) == (
            400,
            "unknown_task",
        )
        assert refused(await call("reset", {"id": episode, "task_id": 4})) == (400, "unknown_task")
        assert refused(await call("reset", {"id": episode, "task_id": True})) == (
            400,
            "bad_request",
        )
        assert refused(await call("reset", {"id": episode + 1})) == (404, "unknown_episode")
        assert refused(await call("reset", {"id": "x"})) == (400, "bad_request")
        assert refused(await call("reset", [1])) == (400, "bad_request")
        assert refused(await call("step", {"id": episode, "text": 3})) == (400, "bad_request")
        await call("reset", {"id": episode, "task_id": 1})
        assert (await call("step", {"id": episode, "text": "task b"}))[1]["success"]
        assert refused(await call("step", {"id": episode, "text": "task b"})) == (409, "no_episode")
        assert (
            (await call("close", {"id": episode}))[0]
            == (await call("close", {"id": episode}))[0]
            == 200
        )
        assert refused(await call("step", {"id": episode, "text": "x"})) == (404, "unknown_episode")

    run(scenario)


def test_an_environment_that_breaks_is_an_error_of_its_episode_and_can_begin_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hosts, "CALL_S", 1.0)

    async def scenario(call: Caller) -> None:
        episode = await call.begin()
        for text, code in (
            ("break", (500, "environment_failed")),
            ("defect", (500, "environment_failed")),
            ("hang", (504, "environment_timeout")),
        ):
            assert refused(await call("step", {"id": episode, "text": text})) == code
            assert refused(await call("step", {"id": episode, "text": text})) == (409, "no_episode")
            await call("reset", {"id": episode})
        assert (await call("step", {"id": episode, "text": "task a"}))[1]["success"]

    run(scenario)


def test_in_compatible_mode_an_error_is_a_200() -> None:
    async def scenario(call: Caller) -> None:
        status, answer = await call("step", {"id": 5, "text": "x"})
        assert status == 200
        assert answer["error"].startswith("no episode 5")

    run(scenario, compatible=True)


def test_a_step_of_a_known_key_is_answered_and_not_taken() -> None:
    async def scenario(call: Caller) -> None:
        episode = await call.begin()
        body = {"id": episode, "text": "slow"}
        both = await asyncio.gather(*(call("step", body, Idempotency_Key="k") for _ in range(2)))
        assert both[0] == both[1]
        for key, observation in (("a", "step 2"), ("a", "step 2"), ("b", "step 3")):
            answer = await call("step", {"id": episode, "text": "x"}, Idempotency_Key=key)
            assert answer[1]["observation"] == observation
        won = [
            await call("step", {"id": episode, "text": "task a"}, Idempotency_Key="c")
            for _ in range(2)
        ]
        assert won[0] == won[1]

    run(scenario)


def test_an_episode_takes_one_step_at_a_time_and_another_does_not_wait() -> None:
    async def scenario(call: Caller) -> None:
        one, other = await call.begin(), await call.begin()
        slow = [call("step", {"id": one, "text": "slow"}) for _ in range(4)]
        assert [answer[1]["observation"] for answer in await asyncio.gather(*slow)] == ["alone"] * 4
        held = asyncio.create_task(call("step", {"id": one, "text": "hold"}))
        assert (await call("step", {"id": other, "text": "x"}))[1]["observation"] == "step 1"
        assert not held.done()
        await call("step", {"id": other, "text": "release"})
        assert (await held)[1]["observation"] == "released"

    run(scenario)


def test_an_episode_that_is_closed_in_a_call_closes_its_environment_when_the_call_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(episodes, "CLOSE_S", 0.05)

    async def scenario(call: Caller) -> None:
        one, other = await call.begin(0), await call.begin(1)
        held = asyncio.create_task(call("step", {"id": one, "text": "hold"}))
        waiting = asyncio.create_task(call("reset", {"id": one}))
        await call("step", {"id": one + 1, "text": "x"})  # so that the two before it have arrived
        assert (await call("close", {"id": one}))[0] == 200
        assert (await call("step", {"id": other, "text": "closed"}))[1]["observation"] == ""
        await call("step", {"id": other, "text": "release"})
        assert (await held)[1]["observation"] == "released"
        assert refused(await waiting) == (404, "unknown_episode")
        assert (await call("step", {"id": other, "text": "closed"}))[1]["observation"] == "task a"

    run(scenario)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_step_of_numpys_numbers_is_taken_and_one_that_is_none_breaks_its_episode_alone(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")

    async def scenario(call: Caller) -> None:
        one, other = await call.begin(), await call.begin()
        answer = (await call("step", {"id": one, "text": "numbers"}))[1]
        assert (answer["observation"], answer["reward"], answer["success"]) == (
            "numbers",
            0.5,
            True,
        )
        for text in ("no text", "no number"):
            await call("reset", {"id": one, "task_id": 0})
            assert refused(await call("step", {"id": one, "text": text})) == (
                500,
                "environment_failed",
            )
        assert (await call("step", {"id": other, "text": "x"}))[1]["observation"] == "step 1"

    run(scenario, workers=workers)


def test_a_full_server_says_when_to_come_again() -> None:
    async def scenario(call: Caller) -> None:
        episode = await call.begin()
        await call("create")
        assert refused(await call("create")) == (429, "full")
        await call("close", {"id": episode})
        assert (await call("create"))[0] == 200

    run(scenario, capacity=2)


def test_an_episode_that_nobody_calls_is_closed() -> None:
    async def scenario(call: Caller) -> None:
        idle, used = await call.begin(), await call.begin()
        while 'horizonrl_served_episodes{env="world"} 2.0' in (await call.get("../../metrics"))[1]:
            await call("step", {"id": used, "text": "x"})
            await asyncio.sleep(0.05)
        assert refused(await call("step", {"id": idle, "text": "x"})) == (404, "unknown_episode")
        assert (await call("step", {"id": used, "text": "x"}))[0] == 200

    run(scenario, ttl_s=2.0)


def test_ids_are_not_guessed_and_fit_into_a_double() -> None:
    async def scenario(call: Caller) -> None:
        ids = [(await call("create"))[1]["id"] for _ in range(100)]
        assert len(set(ids)) == 100
        assert all(0 <= episode < 1 << 53 for episode in ids)
        assert max(ids) > 1 << 45

    run(scenario)


def test_health_metrics_and_tasks_are_answered() -> None:
    async def scenario(call: Caller) -> None:
        assert (await call.get("../../healthz"))[0] == 200
        assert (await call.get("../../readyz"))[0] == 200
        await call("step", {"id": 5, "text": "x"})
        metrics = (await call.get("../../metrics"))[1]
        assert (
            'horizonrl_served_refusals_total{env="world",reason="unknown_episode"} 1.0' in metrics
        )
        assert "horizonrl_event_loop_lag_seconds" in metrics
        tasks = json.loads((await call.get("../tasks"))[1])
        assert tasks[2] == {"task_id": "task c", "split": "train", "category": "all", "number": 2}

    run(scenario)


async def test_a_worker_that_dies_breaks_its_episodes_alone_and_is_replaced() -> None:
    async with server_of({"parity": {}}, workers=2) as url, ClientSession() as http:
        call = Caller(http, f"{url}/parity/served")
        ids = [await call.begin() for _ in range(4)]
        first, second = workers_of(os.getpid())
        os.kill(first, signal.SIGKILL)
        answers = [await call("step", {"id": episode, "text": "ab"}) for episode in ids]
        assert sorted(status for status, _ in answers) == [200, 200, 500, 500]
        for episode in ids:
            await call("reset", {"id": episode})
            assert (await call("step", {"id": episode, "text": "ab"}))[1]["reward"] == 0.5
        assert second in workers_of(os.getpid())
    assert workers_of(os.getpid()) == []


def workers_of(parent: int) -> list[int]:
    """Return the workers among the living children of a process."""
    children = psutil.Process(parent).children()
    return [
        child.pid
        for child in children
        if any("serving.worker" in part for part in command_line(child))
    ]


async def test_openenvs_websocket_plays_an_episode() -> None:
    async with (
        server_of({"world": {}}) as url,
        ClientSession() as http,
        http.ws_connect(f"{url}/world/ws") as channel,
    ):

        async def say(kind: str, **data: Any) -> Any:
            await channel.send_json({"type": kind, "data": data})
            return await channel.receive_json(timeout=5)

        assert (await say("step", action="x"))["data"]["code"] == "no_episode"
        assert await say("reset", seed=3) == {
            "type": "observation",
            "data": {
                "observation": {"text": "Say task d.\nNow."},
                "reward": None,
                "done": False,
            },
        }
        assert (await say("dance"))["data"]["code"] == "bad_request"
        assert (await say("step", action="task d"))["data"] == {
            "observation": {"text": "step 1"}, "reward": 1.0, "done": True,
        }  # fmt: skip
        assert "episode_id" in (await say("state"))["data"]
        await channel.send_str("[]")
        assert (await channel.receive_json(timeout=5))["type"] == "error"
        await channel.send_json({"type": "close"})
        assert (await channel.receive(timeout=5)).data == 1000


def test_options_that_the_environment_cannot_take_are_refused_before_anybody_calls() -> None:
    async def scenario() -> None:
        async with server_of({"world": {"punishment": 1}}):
            pass

    with pytest.raises(ConfigError, match="no option 'punishment'"):
        asyncio.run(scenario())


def test_only_this_machine_may_call_unless_told_otherwise() -> None:
    assert Serving({}).host == "127.0.0.1"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["envs", "serve"], "which environments?"),
        (["envs", "serve", "nowhere"], "no environment 'nowhere'"),
        (
            ["envs", "serve", "parity", "--textcraft.style", "compact"],
            "--textcraft names no environment that is served here",
        ),
    ],
)
def test_asking_wrongly_is_one_clear_message(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) != 0
    assert message in capsys.readouterr().err


@pytest.mark.process
def test_the_command_serves_until_sigterm() -> None:
    command = [
        sys.executable,
        "-m",
        "horizonrl.ops.cli.main",
        "envs",
        "serve",
        "textcraft",
        "parity",
        "--port",
        "0",
    ]
    with subprocess.Popen(
        [*command, "--textcraft.style", "compact"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        assert server.stdout is not None
        addresses = [server.stdout.readline().split(": ")[1].strip() for _ in range(2)]
        assert addresses[0].endswith("/textcraft")
        with urllib.request.urlopen(addresses[1] + "/tasks", timeout=10) as answer:
            assert len(json.load(answer)) == 64
        server.send_signal(signal.SIGTERM)
        assert server.wait(15) == 0
