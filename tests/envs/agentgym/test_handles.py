"""Whose environment a number is: on servers that hand them out in turn, and on servers that have started anew."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import ClientSession, web

from horizonrl.common.errors import EnvironmentFailure
from horizonrl.envs import registry
from horizonrl.envs.api import Environment
from tests.envs.agentgym.stub import FIRST, REACT, Stub, stub_of


class Turns:
    """A server like SQLGym's: it makes two environments, then hands them out in turn, whoever uses them."""

    def __init__(self) -> None:
        self.questions: dict[int, int] = {}
        self.created = 0
        self.url = ""

    async def create(self, _: web.Request) -> web.Response:
        self.created += 1
        return web.json_response((40, 41)[self.created % 2])

    async def reset(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.questions[body["env_idx"]] = body["item_id"]
        return web.json_response([f"Question {body['item_id']}", None])

    async def observation(self, request: web.Request) -> web.Response:
        return web.json_response(f"Question {self.questions[int(request.query['env_idx'])]}")

    async def step(self, request: web.Request) -> web.Response:
        body = await request.json()
        right = body["action"] == f"SELECT {self.questions[body['env_idx']]}"
        return web.json_response(
            {"state": "[]", "reward": float(right), "done": True, "info": None}
        )


def on_turns(scenario: Callable[[Turns], Awaitable[None]]) -> None:
    async def run() -> None:
        server, application = Turns(), web.Application()
        application.add_routes(
            [web.post(f"/{name}", getattr(server, name)) for name in ("create", "reset", "step")]
        )
        application.add_routes([web.get("/observation", server.observation)])
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            await scenario(server)
        finally:
            await runner.cleanup()

    asyncio.run(run())


def sqlgym(server: Turns, **options: Any) -> Environment:
    return registry.make("agentgym-sqlgym", {"url": server.url, "instructions": "", **options})


def test_an_environment_that_is_handed_out_twice_has_one_episode_at_a_time() -> None:
    async def play(server: Turns, task: int) -> float:
        environment = sqlgym(server)
        assert (await environment.reset(str(task))).text == f"Question {task}"
        await asyncio.sleep(0.01)  # the agent thinks
        step = await environment.step(f"```sql\nSELECT {task}\n```")
        await environment.close()
        return step.reward

    async def scenario(server: Turns) -> None:
        assert await asyncio.gather(*(play(server, task) for task in range(16))) == [1.0] * 16

    on_turns(scenario)


def test_an_episode_for_which_no_environment_becomes_free_is_a_failure_that_says_why() -> None:
    async def scenario(server: Turns) -> None:
        held = [sqlgym(server), sqlgym(server)]
        for environment in held:
            await environment.reset("1")
        third = sqlgym(server, timeout_s=0.2)
        with pytest.raises(
            EnvironmentFailure, match=r"none was free for 0\.2 s: run fewer episodes"
        ):
            await third.reset("2")
        for environment in (*held, third):
            await environment.close()

    on_turns(scenario)


def test_what_another_process_did_in_the_environment_is_a_failure_and_never_a_reward() -> None:
    async def scenario(server: Turns) -> None:
        environment = sqlgym(server)
        await environment.reset("1")
        async with ClientSession() as other:  # was given the same environment
            await other.post(
                f"{server.url}/reset", json={"env_idx": next(iter(server.questions)), "item_id": 2}
            )
        with pytest.raises(
            EnvironmentFailure, match="gave this episode's environment to another client"
        ):
            await environment.step("SELECT 2")
        await environment.reset("1")
        assert (await environment.step("SELECT 1")).reward == 1.0
        await environment.close()

    on_turns(scenario)


def on_stub(scenario: Callable[[Stub, Environment, Environment], Awaitable[None]]) -> None:
    """Run a scenario with two environments of one server that counts from 0."""

    async def run() -> None:
        async with stub_of("textcraft", counts=True) as stub:
            one, other = (
                registry.make(
                    "agentgym-textcraft", {"url": stub.url, "instructions": "", "test": "3-3"}
                )
                for _ in range(2)
            )
            await scenario(stub, one, other)
            await one.close()
            await other.close()

    asyncio.run(run())


def test_once_a_connection_broke_no_episode_acts_under_its_old_number() -> None:
    async def scenario(stub: Stub, one: Environment, other: Environment) -> None:
        await one.reset("3")
        await other.reset("3")
        await stub.die()
        with pytest.raises(EnvironmentFailure, match="is the server running"):
            await one.step(REACT)
        await stub.start()
        steps, closes = stub.counts["/step"], stub.counts["/close"]
        with pytest.raises(
            EnvironmentFailure, match="environment with that number belongs to another episode"
        ):
            await other.step(REACT)
        assert (await other.reset("3")).text == FIRST
        assert (await other.step(REACT)).success
        assert (stub.counts["/step"], stub.counts["/close"]) == (steps + 1, closes)

    on_stub(scenario)


def test_a_server_that_closes_connections_with_a_request_in_them_costs_no_episode() -> None:
    async def scenario(stub: Stub, one: Environment, other: Environment) -> None:
        stub.drops_kept = True
        await one.reset("3")
        await other.reset("3")
        assert (await one.step(REACT)).success
        assert (await other.step(REACT)).success

    on_stub(scenario)


def test_a_server_that_counts_from_0_again_has_started_anew() -> None:
    async def scenario(stub: Stub, one: Environment, other: Environment) -> None:
        await one.reset("3")
        stub.created = 0  # between two calls, when no connection was open
        await other.reset("3")
        with pytest.raises(
            EnvironmentFailure, match="environment with that number belongs to another episode"
        ):
            await one.step(REACT)
        assert (await other.step(REACT)).success

    on_stub(scenario)
