"""Rows of the environment servers: steps per second with 32 clients, ours and AgentGym's own.

Both are played by the same client of ours, in AgentGym's dialect, with the same tasks and the same replies of our
experts. Without a checkout of AgentGym, ours is held against its goals alone.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import cycle, islice

import uvloop

from horizonrl.envs import registry
from horizonrl.envs.agentgym.doors import numbers_of
from horizonrl.ops.bench.agentgym.games import Game, door, play
from horizonrl.ops.bench.agentgym.theirs import agentgym_server
from horizonrl.ops.bench.speed.envs import WORKERS, serving
from horizonrl.ops.bench.table.rows import Request, Row, against_limit

GOALS = {"textcraft": None, "babyai": 2_500.0, "sciworld": 200.0}
"""Steps per second to reach with 32 clients on two cores."""
SMALL_IDS = ("textcraft",)
CLIENTS, SMALL_CLIENTS = 32, 4
GAMES = 8
SECONDS, SMALL_SECONDS = 5.0, 0.5


def rows(request: Request) -> list[Row]:
    """Measure the servers in `request.rounds` rounds."""
    made: list[Row] = []
    for env_id in SMALL_IDS if request.small else GOALS:
        ours, theirs = uvloop.run(_measure(env_id, request))
        if theirs:
            made.append(Row(f"{env_id} served to {CLIENTS}", "AgentGym's own server", "steps/s", ours, theirs, 1.0))
        if (goal := GOALS[env_id]) is not None:
            made.append(against_limit(f"{env_id} served to {CLIENTS}", "steps/s", ours, goal, less_is_better=False))
        elif not theirs:
            made.append(Row(f"{env_id} served to {CLIENTS}", "none", "steps/s", ours, ()))
    return made


async def _measure(env_id: str, request: Request) -> tuple[list[float], list[float]]:
    """Return steps per second of our server and of AgentGym's, by round; nothing of theirs without a checkout."""
    games = await _games(env_id)
    clients, seconds = (SMALL_CLIENTS, SMALL_SECONDS) if request.small else (CLIENTS, SECONDS)
    ours, theirs = list[float](), list[float]()
    async with AsyncExitStack() as stack:
        _, url = await stack.enter_async_context(serving(env_id, WORKERS))
        there = None
        if request.agentgym is not None:
            peer = agentgym_server(request.agentgym, request.agentgym_python, env_id)
            there = await stack.enter_async_context(peer)
        for _ in range(request.rounds):
            ours.append(await _steps_per_s(f"{url}/{env_id}", env_id, games, clients, seconds))
            if there is not None:
                theirs.append(await _steps_per_s(there, env_id, games, clients, seconds))
    return ours, theirs


async def _games(env_id: str) -> list[Game]:
    numbers = numbers_of(env_id, registry.tasks(env_id, door(env_id).options)).values()
    played = [await play(env_id, number) for number in islice(numbers, GAMES)]
    return [game for game in played if game is not None]


async def _steps_per_s(url: str, env_id: str, games: Sequence[Game], clients: int, seconds: float) -> float:
    """Replay games with `clients` clients for `seconds`; a reset takes its time and counts as no step."""
    steps = 0
    named = f"{min(game.number for game in games)}-{max(game.number for game in games)}"
    options = {"url": url, "instructions": "", "train": named, "test": named}
    environments = [registry.make(f"agentgym-{env_id}", options) for _ in range(clients)]
    # Before the clock starts: a first episode opens a connection, and may start what the server plays with.
    await asyncio.gather(*(environment.reset(str(games[0].number)) for environment in environments))
    end = time.perf_counter() + seconds

    async def client(number: int) -> None:
        nonlocal steps
        for game in cycle([*games[number % len(games) :], *games[: number % len(games)]]):
            await environments[number].reset(str(game.number))
            for reply in game.replies:
                if time.perf_counter() >= end:
                    return
                step = await environments[number].step(reply)
                steps += 1
                if step.terminated or step.truncated:
                    break

    started = time.perf_counter()
    await asyncio.gather(*map(client, range(clients)))
    rate = steps / (time.perf_counter() - started)
    await asyncio.gather(*(environment.close() for environment in environments))
    return rate
