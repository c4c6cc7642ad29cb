"""A server of environments against pages in a browser, stuck workers and callers that begin nothing."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from horizonrl.common.errors import EnvironmentTimeout
from horizonrl.envs.serving import episodes, hosts
from horizonrl.envs.serving.hosts import WorkerHost
from tests.envs.serving.servers import WORLD, Caller, caller_of, server_of
from tests.envs.serving.test_server import workers_of


@pytest.fixture(autouse=True)
def _world(install: Callable[..., None]) -> None:
    install("world", WORLD)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": "http://127.0.0.1:9"}, 200),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "localhost"}, 200),
        ({"Host": "[::1]:36001"}, 200),
        ({"Host": "envs.cluster.local:36001"}, 200),
        ({"Host": "evil.example:36001"}, 421),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, 421),
    ],
)
async def test_a_page_in_a_browser_cannot_create_an_episode(
    headers: dict[str, str], status: int
) -> None:
    async with (
        server_of({"world": {}}, hosts=["envs.cluster.local"]) as url,
        ClientSession() as http,
    ):
        for path in ("/world/create", "/create"):
            async with http.post(f"{url}{path}", headers=headers) as answer:
                assert answer.status == status, await answer.text()
        async with http.get(f"{url}/world/ws", headers=headers) as answer:
            # 400: it is no WebSocket's handshake.
            assert answer.status == (400 if status == 200 else status)


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
async def test_a_form_is_no_call(content_type: str) -> None:
    async with server_of({"world": {}}) as url, ClientSession() as http:
        kind = {"Content-Type": content_type}
        async with http.post(f"{url}/world/reset", data=b'{"id": 1}', headers=kind) as answer:
            assert answer.status == 415


@pytest.mark.parametrize("task", [True, 1.5, [1], {"a": 1}])
async def test_a_websocket_that_sends_a_wrong_type_is_told_and_goes_on(task: Any) -> None:
    async with (
        server_of({"world": {}}) as url,
        ClientSession() as http,
        http.ws_connect(f"{url}/world/ws") as channel,
    ):
        for key in ("seed", "task_id"):
            await channel.send_json({"type": "reset", "data": {key: task}})
            assert (await channel.receive_json(timeout=5))["data"]["code"] == "bad_request"
        await channel.send_json({"type": "reset", "data": {"seed": 0}})
        assert (await channel.receive_json(timeout=5))["type"] == "observation"


async def test_an_episode_that_is_never_begun_is_closed_long_before_its_time_to_live(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(episodes, "BEGIN_WITHIN_S", 0.2)

    async with caller_of("world", "/world/served") as call:
        begun = await call.begin()
        await call("create")
        while 'horizonrl_served_episodes{env="world"} 2.0' in (await call.get("../../metrics"))[1]:
            await asyncio.sleep(0.02)
        assert (await call("step", {"id": begun, "text": "x"}))[0] == 200


async def test_a_reply_is_cut_before_the_environment_reads_it_and_half_a_character_is_no_failure() -> (
    None
):
    async with caller_of("world", "/world/served") as call:
        episode = await call.begin()
        late = "x" * 1_000_000 + "task a"
        assert (await call("step", {"id": episode, "text": late}))[1]["reward"] == 0.0
        assert (await call("step", {"id": episode, "text": "\ud800 task a"}))[1]["reward"] == 1.0


async def test_a_worker_that_is_stuck_in_a_call_is_ended_and_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hosts, "CALL_S", 5.0)
    monkeypatch.setattr(hosts, "GRACE_S", 0.0)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    host = WorkerHost("world", {}, 1)
    await host.reset(1, "task a")
    with pytest.raises(EnvironmentTimeout, match="worker was killed"):
        await host.step(1, "spin")
    await host.reset(1, "task a")
    assert (await host.step(1, "task a")).success
    await host.stop()


async def test_options_are_not_on_a_workers_command_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async with (
        server_of({"world": {"reward": 0.1234}}, workers=1) as url,
        ClientSession() as http,
    ):
        call = Caller(http, f"{url}/world/served")
        episode = await call.begin()
        (worker,) = workers_of(os.getpid())
        assert b"0.1234" not in Path(f"/proc/{worker}/cmdline").read_bytes()
        assert (await call("step", {"id": episode, "text": "task a"}))[1]["reward"] == 0.1234
