"""Our client plays our server."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from horizonrl.envs import registry
from horizonrl.envs.agentgym import wire
from horizonrl.envs.agentgym.dialects import DIALECTS
from horizonrl.envs.agentgym.doors import number_tasks
from horizonrl.envs.api import Environment, Step
from horizonrl.envs.serving.hosts import WorkerHost
from tests.envs.serving.servers import WORLD, server_of

TASKS = ("oak_planks", "chest", "bookshelf")


async def expert_game(task_id: str, **options: Any) -> tuple[str, list[tuple[str, Step]]]:
    """Return the first observation here, and the expert's replies with their answers."""
    environment = registry.make("textcraft", options)
    first = observation = (await environment.reset(task_id)).text
    expert, turns = environment.expert(), []
    while not turns or not turns[-1][1].terminated:
        text = expert.act(observation)
        turns.append((text, await environment.step(text)))
        observation = turns[-1][1].observation
    return first, turns


async def replay(
    environment: Environment, task_id: str, turns: list[tuple[str, Step]]
) -> tuple[str, list[Step]]:
    first = (await environment.reset(task_id)).text
    return first, [await environment.step(text) for text, _ in turns]


@pytest.mark.parametrize("workers", [0, 2])
async def test_an_expert_earns_through_http_what_it_earns_here(workers: int) -> None:
    numbers = number_tasks("textcraft", registry.tasks("textcraft"))

    async with server_of({"textcraft": {}}, workers=workers) as url:
        own = registry.make("served", {"env": "textcraft", "url": f"{url}/textcraft"})
        numbered = registry.make("agentgym-textcraft", {"url": url, "instructions": ""})
        for task_id in TASKS:
            first, turns = await expert_game(task_id)
            assert await replay(own, task_id, turns) == (first, [
                Step(s.observation, s.reward, s.terminated, s.truncated, s.success, {"score": s.reward})
                for _, s in turns
            ])  # fmt: skip
            first, turns = await expert_game(task_id, style="agentgym", format="plain")
            turns = [(f"Action: {text}", step) for text, step in turns]
            there, steps = await replay(numbered, str(numbers[task_id]), turns)
            assert there == first
            assert [step.observation for step in steps] == [step.observation for _, step in turns]
            assert sum(step.reward for step in steps) == 1.0
            assert steps[-1].success
        await own.close()
        await numbered.close()


async def test_thirty_two_clients_play_at_once() -> None:
    first, turns = await expert_game("bookshelf")
    async with server_of({"textcraft": {}, "parity": {}}) as url:
        clients = [registry.make("served", {"url": f"{url}/textcraft"}) for _ in range(32)]
        games = await asyncio.gather(*(replay(client, "bookshelf", turns) for client in clients))
        assert all(game[0] == first and game[1][-1].success for game in games)
        await asyncio.gather(*(client.close() for client in clients))
    assert not wire._Pool._open


async def test_an_environment_that_agentgym_does_not_know_is_served_too() -> None:
    async with server_of({"parity": {}}) as url:
        client = registry.make("served", {"env": "parity", "url": f"{url}/parity"})
        await client.reset("round-00")
        steps = [await client.step(text) for text in ("ab", "abc", "", "ab")]
        assert [step.reward for step in steps] == [0.5, 0.0, 0.5, 0.5]
        assert [step.terminated for step in steps] == [False, False, False, True]
        assert not steps[-1].success
        await client.close()


REPLIES = {"webarena": "So ```{}```", "sqlgym": "```sql\n{}\n```"}


@pytest.mark.parametrize("name", [name for name in DIALECTS if name not in registry.names()])
async def test_every_dialect_is_written_as_it_is_read(
    name: str, install: Callable[..., None]
) -> None:
    install(name, WORLD)

    async with server_of({name: {"reward": 0.25}}) as url:
        client: Any = registry.make(
            f"agentgym-{name}", {"url": url, "instructions": "", "test": "0-3"}
        )
        say = REPLIES.get(name, "Thought: x\nAction: {}").format
        assert (await client.reset("2")).text == "Say task c.\nNow."
        assert (await client.step(say("wait"))).observation == "step 1"
        cut = await client.step(say("cut"))
        assert (cut.terminated, cut.truncated, cut.success) == (False, True, False)
        await client.reset("1")
        steps = [await client.step(say(text)) for text in ("wait", "task b")]
        assert [step.reward for step in steps] == [0.0, 0.25]
        assert (steps[-1].observation, steps[-1].terminated, steps[-1].success) == (
            "step 2",
            True,
            True,
        )
        await client.close()


PREPARES = '''
import os
from horizonrl.envs.api import Observation, Step, TaskSpec

class Ahead:
    """Says how many pieces of work its process has done ahead of need."""

    env_id = "ahead"
    version = "1"
    pieces = 0

    @classmethod
    def tasks(cls):
        return [TaskSpec("task", "train", "all")]

    @classmethod
    def prepare(cls, *, most=0):
        cls.pieces += 1
        if cls.pieces > most:
            raise ZeroDivisionError("one piece too many")
        return cls.pieces < most

    def __init__(self, *, most: int = 0, other: int = 0):
        pass

    async def reset(self, task_id):
        return Observation("begin")

    async def step(self, text):
        return Step(str(Ahead.pieces), 0.0, False)

    async def close(self): ...
'''


async def test_an_idle_worker_prepares_until_nothing_is_left_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, install: Callable[..., None]
) -> None:
    install("ahead", PREPARES, "Ahead")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    host = WorkerHost("ahead", {"most": 3, "other": 1}, 1)
    await host.reset(1, "task")
    async with asyncio.timeout(60):
        # Between two calls the worker is idle for longer than it takes to believe so.
        while (await host.step(1, "")).observation != "3":
            await asyncio.sleep(0.2)
    await asyncio.sleep(0.2)
    assert (await host.step(1, "")).observation == "3"
    await host.stop()
