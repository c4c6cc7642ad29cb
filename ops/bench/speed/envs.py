"""`horizonrl bench envs`: the speed of each environment, in this process and served, with 1 client and with 32.

The clients replay games of the experts, so that only the environment and the connection to it take time. An environment
without an expert is sent made-up texts, as `horizonrl envs check` does.
"""

import asyncio
import json
import os
import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import psutil
import uvloop
from aiohttp import ClientSession
from rich.table import Column, Table

from horizonrl.common.children import bound
from horizonrl.common.errors import HorizonError, RunFailed
from horizonrl.common.lag import LoopLag, turn
from horizonrl.common.processes import horizonrl_command
from horizonrl.common.types import MAX_TURNS
from horizonrl.envs import registry
from horizonrl.envs.api import Environment, make_expert
from horizonrl.envs.bounds import readable
from horizonrl.envs.odd_texts import odd_texts
from horizonrl.envs.subject import BABBLED
from horizonrl.ops.terminal.console import plain_console
from horizonrl.ops.terminal.waiting import waiting

CLIENTS = (1, 32)
WORKERS = 2
GAMES = 16
"""Number of tasks whose games are replayed, spread over the task list."""
START_S = 60.0
LAG = re.compile(r"^horizonrl_event_loop_lag_seconds (\S+)$", re.MULTILINE)

Game = tuple[str, Sequence[str]]
"""A task and the replies to its observations."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One environment in one place."""

    place: str
    clients: int
    steps_per_s: float
    calls_per_s: float
    """Steps and resets per second."""
    lag_ms: float
    """The longest delay of the event loop that plays. With 1 client: the longest time for which one call blocks it."""
    memory_mib: float
    """Here: the growth of this process. Served: the memory of all server processes."""
    client_us: float
    """CPU time of this process per call. Here it includes the environment's own."""
    server_us: float
    """CPU time of the server's processes per call."""


def run(json_file: Path | None, only: Sequence[str], seconds: float) -> int:
    """Measure the named environments, by default all that are installed, and print a table.

    Returns 0, or the exit code of the last error.
    """
    registry.require_known(*only)
    report: dict[str, Any] = {"cores": os.cpu_count(), "load_before": os.getloadavg()[0], "seconds": seconds}
    table = Table(Column("environment", overflow="fold"))  # narrow enough for 80 columns
    for head in ("clients", "steps/s", "calls/s", "lag\nms", "MiB", "client\nµs", "server\nµs"):
        table.add_column(head, justify="right", no_wrap=True)
    environments: dict[str, Any] = {}
    report["environments"] = environments
    errors: list[HorizonError] = []
    for env_id in only or _playable():
        try:
            with (
                waiting(plain_console(stderr=True), f"measuring {env_id}", announced=True),
                registry.attributed(env_id, "cannot be measured"),
            ):
                measured = uvloop.run(_measure(env_id, seconds))
        except HorizonError as error:
            environments[env_id] = {"error": str(error)}
            errors.append(error)
            continue
        environments[env_id] = [asdict(each) for each in measured]
        table.add_section()
        table.add_row(env_id if registry.has_expert(env_id) else f"{env_id}, made-up texts")
        for each in measured:
            numbers = (each.steps_per_s, each.calls_per_s, each.lag_ms, each.memory_mib, each.client_us, each.server_us)
            table.add_row(f"  {each.place}", str(each.clients), *(f"{number:,.0f}" for number in numbers))
    report["load_after"] = os.getloadavg()[0]
    if table.rows:
        plain_console().print(table)
        print(f"{report['cores']} cores, load {report['load_before']:.1f} before and {report['load_after']:.1f} after")
    for failure in errors:
        print(f"error: {failure}", file=sys.stderr)
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return errors[-1].exit_code if errors else 0


def _playable() -> list[str]:
    """Return the environments that can be played here."""
    names = [name for name in registry.names() if name != "served" and not name.startswith("agentgym-")]
    return [name for name in names if not _needs_more(name)]


def _needs_more(env_id: str) -> bool:
    """Return whether an environment cannot be played as it is, because a dependency or a file is missing."""
    try:
        return registry.demonstrations_only(env_id) or not registry.tasks(env_id)
    except HorizonError:
        return True


async def _measure(env_id: str, seconds: float) -> list[Measured]:
    games = await _games(env_id)
    measured = []
    for clients in CLIENTS:
        measured.append(await _here(env_id, games, clients, seconds))
    for workers in (0, WORKERS):
        async with serving(env_id, workers) as (process, url):
            for clients in CLIENTS:
                measured.append(await _there(env_id, games, clients, seconds, (process, url, workers)))
    return measured


async def _games(env_id: str) -> list[Game]:
    """Play tasks that are spread over the list: the expert's replies, or made-up texts where there is none."""
    listed = registry.tasks(env_id)
    environment = registry.make(env_id)
    games: list[Game] = []
    for task in islice(listed[:: max(1, len(listed) // GAMES)], GAMES):
        observation = (await environment.reset(task.task_id)).text
        expert = make_expert(environment) if registry.has_expert(env_id) else None
        made_up = map(readable, odd_texts(observation)[:BABBLED])
        replies: list[str] = []
        while len(replies) < MAX_TURNS:
            reply = expert.act(observation) if expert else next(made_up, None)
            if reply is None:
                break
            replies.append(reply)
            step = await environment.step(replies[-1])
            if step.terminated or step.truncated:
                break
            observation = step.observation
        games.append((task.task_id, replies))
    await environment.close()
    return games


async def _here(env_id: str, games: Sequence[Game], clients: int, seconds: float) -> Measured:
    process, lag = psutil.Process(), LoopLag()
    before = process.memory_info().rss
    watch = asyncio.create_task(lag.watch())
    steps, resets, elapsed_s, cpu_s = await _play(lambda: registry.make(env_id), games, clients, seconds)
    watch.cancel()
    grown = max(0, process.memory_info().rss - before) / 2**20
    return _measured(("here", clients), (steps, resets, elapsed_s), lag.worst_s, grown, (cpu_s, 0.0))


async def _there(
    env_id: str, games: Sequence[Game], clients: int, seconds: float, server: tuple[psutil.Process, str, int]
) -> Measured:
    process, url, workers = server
    await _read_lag(url)  # reading resets the maximum, so earlier lag does not count
    before_s = sum(map(_cpu_s, _family(process)))
    options = {"env": env_id, "url": f"{url}/{env_id}"}
    played = await _play(lambda: registry.make("served", options), games, clients, seconds)
    cpu_s = sum(map(_cpu_s, _family(process))) - before_s
    memory = sum(member.memory_info().rss for member in _family(process)) / 2**20
    place = f"{workers} workers" if workers else "served"
    return _measured((place, clients), played[:3], await _read_lag(url), memory, (played[3], cpu_s))


async def _play(
    make: Callable[[], Environment], games: Sequence[Game], clients: int, seconds: float
) -> tuple[int, int, float, float]:
    """Replay games with `clients` clients; return steps, resets, seconds, and this process's CPU seconds."""
    counts = [0, 0]

    async def client(environment: Environment, order: Iterator[Game]) -> None:
        while time.perf_counter() < end:
            task_id, replies = next(order)
            await turn()  # as an actor does
            await environment.reset(task_id)
            counts[1] += 1
            for reply in replies:
                await turn()
                await environment.step(reply)
                counts[0] += 1
                await asyncio.sleep(0)  # an environment that never waits would keep the loop for itself
                if time.perf_counter() >= end:
                    return

    environments = [make() for _ in range(clients)]
    # Before the clock starts: a first reset may load tasks or open a connection.
    await asyncio.gather(*(environment.reset(games[0][0]) for environment in environments))
    cpu_s, began = time.process_time(), time.perf_counter()
    end = began + seconds
    orders = (islice(cycle(games), client_number % len(games), None) for client_number in range(clients))
    await asyncio.gather(*map(client, environments, orders))
    elapsed_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_s
    await asyncio.gather(*(environment.close() for environment in environments))
    return counts[0], counts[1], elapsed_s, cpu_s


def _measured(
    place: tuple[str, int], played: tuple[int, int, float], lag_s: float, mib: float, cpu_s: tuple[float, float]
) -> Measured:
    steps, resets, elapsed_s = played
    calls = max(1, steps + resets)
    client_us, server_us = (1e6 * each / calls for each in cpu_s)
    return Measured(*place, steps / elapsed_s, calls / elapsed_s, 1e3 * lag_s, mib, client_us, server_us)


@asynccontextmanager
async def serving(env_id: str, workers: int) -> AsyncIterator[tuple[psutil.Process, str]]:
    """Start `horizonrl envs serve`, yield its process and address, and end it afterwards."""
    process = await asyncio.create_subprocess_exec(
        *horizonrl_command("envs", "serve", env_id, "--port", "0", "--workers", str(workers)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        preexec_fn=bound(),
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START_S):
            line = (await process.stdout.readline()).decode()
        if not line:
            raise RunFailed(f"the server of {env_id} ended at startup: run `horizonrl envs serve {env_id}` to see why")
        yield psutil.Process(process.pid), line.split(": ")[1].strip().removesuffix(f"/{env_id}")
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _read_lag(url: str) -> float:
    async with ClientSession() as http, http.get(f"{url}/metrics") as answer:
        found = LAG.search(await answer.text())
    return float(found[1]) if found else 0.0


def _family(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
