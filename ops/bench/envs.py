"""The speed of each environment, in this process and served, with 1 client and with 32.

The clients replay games of the experts, so that only the environment and the connection to it take time. An environment
without an expert is sent made-up texts, as `horizonrl envs check` does. `ms of lag` is the longest delay of the event
loop that plays; with 1 client, the longest time for which one call blocks it.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import cycle, islice

import psutil
from aiohttp import ClientSession

from horizonrl.common.children import bound
from horizonrl.common.errors import HorizonError, RunFailed
from horizonrl.common.lag import LoopLag, turn
from horizonrl.common.processes import horizonrl_command
from horizonrl.common.types import MAX_TURNS
from horizonrl.envs import registry
from horizonrl.envs.api import Environment, make_expert
from horizonrl.envs.odd_texts import odd_texts
from horizonrl.envs.subject import BABBLED
from horizonrl.envs.text_limits import readable
from horizonrl.ops.bench.case import Case, Request

CLIENTS = (1, 32)
WORKERS = 2
GAMES = 16
"""Number of tasks whose games are replayed, spread over the task list."""
SECONDS, SMALL_SECONDS = 3.0, 0.3
"""Of each measurement."""
START_S = 60.0
LAG = re.compile(r"^horizonrl_event_loop_lag_seconds (\S+)$", re.MULTILINE)

Game = tuple[str, Sequence[str]]
"""A task and the replies to its observations."""


async def cases(request: Request) -> AsyncIterator[Case]:
    """Yield six cases for each environment that is installed, or for the one that was named."""
    seconds = SMALL_SECONDS if request.small else SECONDS
    for env_id in [request.only] if request.only else _playable():
        try:
            with registry.attributed(env_id, "cannot be measured"):
                games = await _games(env_id)
            for clients in CLIENTS:
                side = partial(_here, env_id, games, clients, seconds)
                yield Case(f"{env_id} here, {clients} clients", {"ours": side}, rounds=1)
            for workers in (0, WORKERS):
                served = f"{env_id} served by {workers} workers" if workers else f"{env_id} served"
                async with serving(env_id, workers) as (process, url):
                    for clients in CLIENTS:
                        side = partial(_there, env_id, games, clients, seconds, process, url)
                        yield Case(f"{served}, {clients} clients", {"ours": side}, rounds=1)
        except HorizonError as error:  # must not cost the others
            request.absent[env_id] = error


def _playable() -> list[str]:
    """Return the environments that can be played here."""
    names = [
        name for name in registry.names() if name != "served" and not name.startswith("agentgym-")
    ]
    return [name for name in names if not _needs_more(name)]


def _needs_more(env_id: str) -> bool:
    """Return whether an environment cannot be played as it is, because a dependency or a file is missing."""
    try:
        return registry.demonstrations_only(env_id) or not registry.tasks(env_id)
    except HorizonError:
        return True


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


async def _here(
    env_id: str, games: Sequence[Game], clients: int, seconds: float
) -> Mapping[str, float]:
    process, lag = psutil.Process(), LoopLag()
    before = process.memory_info().rss
    watch = asyncio.create_task(lag.watch())
    reached = await _play(lambda: registry.make(env_id), games, clients, seconds)
    watch.cancel()
    grown = max(0, process.memory_info().rss - before)
    return {**reached, "ms of lag": 1e3 * lag.worst_s, "MiB more": grown / 2**20}


async def _there(
    env_id: str,
    games: Sequence[Game],
    clients: int,
    seconds: float,
    process: psutil.Process,
    url: str,
) -> Mapping[str, float]:
    await _read_lag(url)  # reading resets the maximum, so earlier lag does not count
    options = {"env": env_id, "url": f"{url}/{env_id}"}
    reached = await _play(lambda: registry.make("served", options), games, clients, seconds)
    family = [process, *process.children(recursive=True)]
    memory = sum(member.memory_info().rss for member in family)
    return {**reached, "ms of lag": 1e3 * await _read_lag(url), "MiB": memory / 2**20}


async def _play(
    make: Callable[[], Environment], games: Sequence[Game], clients: int, seconds: float
) -> Mapping[str, float]:
    """Replay games with `clients` clients; return steps per second, and this process's CPU time for each."""
    steps = 0

    async def client(environment: Environment, order: Iterator[Game]) -> None:
        nonlocal steps
        while time.perf_counter() < end:
            task_id, replies = next(order)
            await turn()  # as an actor does
            await environment.reset(task_id)
            for reply in replies:
                await turn()
                await environment.step(reply)
                steps += 1
                # An environment that never waits would keep the loop for itself.
                await asyncio.sleep(0)
                if time.perf_counter() >= end:
                    return

    environments = [make() for _ in range(clients)]
    # Before the clock starts: a first reset may load tasks or open a connection.
    await asyncio.gather(*(environment.reset(games[0][0]) for environment in environments))
    cpu_s, began = time.process_time(), time.perf_counter()
    end = began + seconds
    orders = (
        islice(cycle(games), client_number % len(games), None) for client_number in range(clients)
    )
    await asyncio.gather(*map(client, environments, orders))
    elapsed_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_s
    await asyncio.gather(*(environment.close() for environment in environments))
    return {"steps/s": steps / elapsed_s, "µs of the client's CPU": 1e6 * cpu_s / max(1, steps)}


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
            raise RunFailed(
                f"the server of {env_id} ended at startup: run `horizonrl envs serve {env_id}` to see why"
            )
        yield psutil.Process(process.pid), line.split(": ")[1].strip().removesuffix(f"/{env_id}")
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _read_lag(url: str) -> float:
    async with ClientSession() as http, http.get(f"{url}/metrics") as answer:
        match = LAG.search(await answer.text())
    return float(match[1]) if match else 0.0
