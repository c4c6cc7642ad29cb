"""Rows of the environment servers: steps per second with 32 clients, ours and AgentGym's own.

Both are played by the same client of ours, in AgentGym's dialect, with the same tasks and the same replies of our
experts. Without a checkout of AgentGym, ours is held against its goals alone.
"""

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from horizonrl.common.errors import HorizonError, RunFailed
from horizonrl.envs import registry
from horizonrl.envs.agentgym.doors import number_tasks
from horizonrl.envs.api import Environment
from horizonrl.ops.bench.case import Case, Request, Side, constant
from horizonrl.ops.bench.envs import WORKERS, serving
from horizonrl.ops.bench.run import measure_and_print
from tests.peers.agentgym.games import Game, door, play
from tests.peers.agentgym.theirs import agentgym_server

GOALS = {"textcraft": None, "babyai": 2_500.0, "sciworld": 200.0}
"""Steps per second to reach with 32 clients on two cores."""
SMALL_IDS = ("textcraft",)
CLIENTS, SMALL_CLIENTS = 32, 4
THEIR_CLIENTS = {"sciworld": 8}
"""AgentGym's server starts a JVM for each client: 32 take 10 GB and minutes to begin. With fewer it is faster."""
GAMES = {"textcraft": 32, "babyai": 32, "sciworld": 8}
"""Games that are replayed, spread over the list of tasks. SciWorld's expert takes a second for each."""
SECONDS, SMALL_SECONDS = 5.0, 0.5
BEGIN_S = 180.0
"""The clients of a side begin their first episodes within this time, or the side is left out."""
CALL_S = 30.0
"""Longest wait for one call: what a round lasts beyond its seconds, at most."""

CHECKOUT: dict[str, Any] = {"agentgym": None, "python": sys.executable}
"""AgentGym's, and a Python with its dependencies: where the peers come from."""

Player = AsyncGenerator[int, None]


def run(request: Request, agentgym: Path | None, python: str, json_file: Path | None) -> int:
    """Measure the rows and print them as `horizonrl bench` does its own."""
    CHECKOUT.update(agentgym=agentgym, python=python)
    return measure_and_print({"servers": __name__}, request, json_file)


async def cases(request: Request) -> AsyncIterator[Case]:
    """Yield a case per environment."""
    clients = SMALL_CLIENTS if request.small else CLIENTS
    for env_id in SMALL_IDS if request.small else GOALS:
        try:
            games = await _games(env_id)
            async with AsyncExitStack() as stack:
                _, url = await stack.enter_async_context(serving(env_id, WORKERS))
                here = await stack.enter_async_context(
                    _begun(f"{url}/{env_id}", env_id, games, clients)
                )
                sides = {"ours": partial(_steps_per_s, here, request.small)}
                peer = await _peer(stack, env_id, games, clients, request)
                goals = dict.fromkeys(peer, 1.0)
                if (goal := GOALS[env_id]) is not None:
                    peer[f"goal of {goal:g} steps/s"] = constant("steps/s", goal)
                    goals[f"goal of {goal:g} steps/s"] = 1.0
                # In the first round levels are drawn and a JVM compiles: episodes go on between rounds.
                yield Case(f"{env_id} served to {clients}", sides | peer, goals, warms_up=True)
        except HorizonError as error:  # one environment that needs Java must not cost the others
            request.absent[f"{env_id} served"] = error


async def _peer(
    stack: AsyncExitStack, env_id: str, games: Sequence[Game], clients: int, request: Request
) -> dict[str, Side]:
    """Start AgentGym's own server; return its side, or none without a checkout."""
    agentgym, python = CHECKOUT["agentgym"], CHECKOUT["python"]
    if agentgym is None:
        return {}
    fewer = THEIR_CLIENTS.get(env_id, clients)
    name = f"AgentGym's own server, {fewer} clients"
    try:
        url = await stack.enter_async_context(agentgym_server(agentgym, python, env_id))
        there = await stack.enter_async_context(_begun(url, env_id, games, fewer))
    except HorizonError as error:
        request.absent[f"AgentGym's {env_id}"] = error
        return {}
    return {name: partial(_steps_per_s, there, request.small)}


async def _games(env_id: str) -> list[Game]:
    numbers = list(number_tasks(env_id, registry.tasks(env_id, door(env_id).options)).values())
    count = GAMES[env_id]
    played = [
        await play(env_id, number) for number in islice(numbers[:: len(numbers) // count], count)
    ]
    return [game for game in played if game is not None]


@asynccontextmanager
async def _begun(
    url: str, env_id: str, games: Sequence[Game], clients: int
) -> AsyncIterator[Sequence[Player]]:
    """Yield the players of a server, each in an episode: beginning may start what the server plays with."""
    named = f"{min(game.number for game in games)}-{max(game.number for game in games)}"
    options = {"url": url, "instructions": "", "train": named, "test": named, "timeout_s": BEGIN_S}
    environments = [registry.make(f"agentgym-{env_id}", options) for _ in range(clients)]
    players = [
        _play(each, [*games[k % len(games) :], *games[: k % len(games)]])
        for k, each in enumerate(environments)
    ]
    try:
        try:
            async with asyncio.timeout(BEGIN_S):
                await asyncio.gather(*map(anext, players))
        except TimeoutError:
            raise RunFailed(
                f"{url} has not begun {clients} episodes within {BEGIN_S:g} s"
            ) from None
        yield players
    finally:
        for player in players:
            await player.aclose()
        await asyncio.gather(*(environment.close() for environment in environments))


async def _play(environment: Environment, games: Sequence[Game]) -> Player:
    """Play the games for ever, and yield after each call how many steps it was: none for a reset."""
    for game in cycle(games):
        await environment.reset(str(game.number))
        yield 0
        for reply in game.replies:
            step = await environment.step(reply)
            yield 1
            if step.terminated or step.truncated:
                break


async def _steps_per_s(players: Sequence[Player], small: bool) -> Mapping[str, float]:
    """Let everybody play on for some seconds; a reset takes its time and counts as no step."""
    started, seconds = time.perf_counter(), SMALL_SECONDS if small else SECONDS

    async def client(player: Player) -> int:
        steps = 0
        while time.perf_counter() < started + seconds:
            async with asyncio.timeout(CALL_S):
                steps += await anext(player)
        return steps

    try:
        steps = sum(await asyncio.gather(*map(client, players)))
    except TimeoutError:
        raise RunFailed(f"a call was not answered within {CALL_S:g} s") from None
    return {"steps/s": steps / (time.perf_counter() - started)}
