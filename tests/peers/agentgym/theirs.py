"""Our client plays on AgentGym's own servers, many episodes at a time, beside our environment in AgentGym's style.

Every episode is played twice at once: there by our client, here in the environment that our server gives AgentGym's
clients. An expert here says what both do. What they answer is compared turn by turn.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from socket import socket
from tempfile import TemporaryDirectory

from aiohttp import ClientError, ClientSession

from horizonrl.common.errors import EnvironmentFailure, RunFailed
from horizonrl.envs import registry
from horizonrl.envs.agentgym.doors import number_tasks, task_named
from horizonrl.envs.api import Expert, make_expert
from horizonrl.envs.worlds.textcraft.tasks import load_book
from tests.peers.agentgym.bird import play_all, write_bird
from tests.peers.agentgym.comparison import GameComparison
from tests.peers.agentgym.games import answer, door, make, reply_of

SERVERS: Mapping[str, tuple[str, str]] = {
    "textcraft": ("agentenv-textcraft", "agentenv_textcraft:app"),
    "babyai": ("agentenv-babyai", "agentenv_babyai:app"),
    "sciworld": ("agentenv-sciworld", "agentenv_sciworld:app"),
    "sql": ("agentenv-sqlgym", "agentenv_sqlgym:app"),
}
"""AgentGym's folder of each server that runs without data or services of others, and its application."""
START_S = 120.0
TURNS = 30
_RUN = "import sys, uvicorn; uvicorn.run(sys.argv[1], host='127.0.0.1', port=int(sys.argv[2]), log_level='error')"


async def compare(
    agentgym: Path, python: str, env_id: str, episodes: int, parallel: int
) -> GameComparison:
    """Play test tasks on the real server of an environment. Raises RunFailed if it does not start."""
    return await (_compare_sql if env_id == "sql" else _compare)(
        agentgym, python, env_id, episodes, parallel
    )


async def _compare_sql(
    agentgym: Path, python: str, env_id: str, episodes: int, parallel: int
) -> GameComparison:
    with TemporaryDirectory() as folder:
        problems = write_bird(Path(folder), episodes)
        async with agentgym_server(
            agentgym, python, env_id, AGENTENV_SQLGYM_BIRD_PATH=folder
        ) as url:
            return await play_all(url, problems, parallel)


async def _compare(
    agentgym: Path, python: str, env_id: str, episodes: int, parallel: int
) -> GameComparison:
    tasks = registry.tasks(env_id, door(env_id).options)
    numbers = list(
        number_tasks(env_id, [task for task in tasks if task.split == "test"] or tasks).values()
    )
    if env_id == "textcraft":
        # Theirs depend on directory order and hash seed, so a split of ours means nothing there.
        numbers = list(range(len(tasks)))
    chosen = Random(0).sample(numbers, min(episodes, len(numbers)))
    found, slots = GameComparison(env_id), asyncio.Semaphore(parallel)
    async with agentgym_server(agentgym, python, env_id) as url:
        began = time.monotonic()

        async def play(number: int) -> None:
            async with slots:
                try:
                    await _play(url, env_id, number, found)
                except EnvironmentFailure as failure:
                    found.failures += 1
                    found.differences.append(f"task {number}: {failure}"[:300])

        await asyncio.gather(*(play(number) for number in chosen))
        found.turns_per_s = round(found.turns / (time.monotonic() - began), 1)
    found.differences = found.differences[:5]
    return found


async def _play(url: str, env_id: str, number: int, found: GameComparison) -> None:
    """Play one task on both sides, as the expert here says, else at random."""
    tasks = f"{number}-{number}"
    there = registry.make(
        f"agentgym-{env_id}", {"url": url, "instructions": "", "train": tasks, "test": tasks}
    )
    here, draw = make(env_id), Random(number)
    try:
        first = (await there.reset(str(number))).text
        own = (await here.reset(_own_task(env_id, number, first))).text
        found.episodes += 1
        found.same_goal += _goal(env_id, first) == _goal(env_id, own)
        found.same_first += _is_same_first(env_id, first, own)
        total, observation, expert = 0.0, own, make_expert(here)
        for _ in range(TURNS):
            reply = reply_of(door(env_id).dialect, _act(expert, observation, draw))
            theirs, ours = await there.step(reply), await answer(here, door(env_id).dialect, reply)
            total, observation = total + ours.reward * door(env_id).dialect.unit, ours.observation
            found.turns += 1
            found.same_text += theirs.observation == ours.observation
            found.same_words += _words(env_id, theirs.observation) == _words(
                env_id, ours.observation
            )
            found.same_score += (
                abs(
                    float(theirs.info["score"])
                    - (total if door(env_id).dialect.cumulative else ours.reward)
                )
                < 1e-6
            )
            ended = ours.terminated or ours.truncated
            found.same_end += (theirs.terminated or theirs.truncated) == ended
            if theirs.observation != ours.observation:
                found.differences.append(
                    f"task {number}: {theirs.observation[:150]!r} and not {ours.observation[:150]!r}"
                )
            if ended or theirs.terminated:
                found.solved += theirs.success
                return
    finally:
        await there.close()
        await here.close()


def _act(expert: Expert, observation: str, draw: Random) -> str:
    """Return the expert's action, or a blind one where it knows no way: AgentGym's rules are not always ours."""
    try:
        return expert.act(observation)
    except EnvironmentFailure:
        return draw.choice(["turn left", "turn right", "move forward"])


def _own_task(env_id: str, number: int, first: str) -> str:
    """Return our task. TextCraft's number means another goal on every machine: ours is found by its goal."""
    if env_id == "textcraft":
        return _goal(env_id, first).replace(" ", "_")
    named = task_named(env_id, registry.tasks(env_id, door(env_id).options))(number)
    assert named is not None
    return named


def _goal(env_id: str, first: str) -> str:
    """Return the goal that a first observation tells."""
    match env_id:
        case "textcraft":
            return first.rpartition("Goal: craft ")[2].rstrip(".")
        case "babyai" | "sciworld":
            return first.partition("\n")[0]
    return first


def _is_same_first(env_id: str, first: str, own: str) -> bool:
    """Return whether two first observations tell the same, whatever the order. TextCraft adds ten recipes at random."""
    if env_id != "textcraft":
        return _words(env_id, first) == _words(env_id, own)
    listed = {line for line in first.splitlines() if line.startswith("craft ")}
    needed = {str(recipe) for recipe in load_book().reachable(_goal(env_id, own))}
    return needed <= listed and len(listed - needed) <= 10


def _words(env_id: str, text: str) -> Sequence[str]:
    """Return what a text says, whatever the order: TextCraft shuffles its recipes, SciWorld what is in a place."""
    match env_id:
        case "textcraft" | "sciworld":
            return sorted(text.replace(",", "\n").replace(".", "\n").split())
    return [text]


@asynccontextmanager
async def agentgym_server(
    agentgym: Path, python: str, env_id: str, **variables: str
) -> AsyncIterator[str]:
    """Run one of AgentGym's servers; yield its address."""
    folder, application = SERVERS[env_id]
    # AgentGym's server takes a number, not a socket. Nobody holds the port until the server binds it.
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        python, "-c", _RUN, application, str(port), cwd=agentgym / folder, start_new_session=True,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL, env={**os.environ, **variables},
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        await _until_up(url, process)
        yield url
    finally:
        # The group, since the server runs in a session of its own and may have children.
        if process.returncode is None:
            os.killpg(process.pid, 15)
            await process.wait()


async def _until_up(url: str, process: asyncio.subprocess.Process) -> None:
    async with ClientSession() as http, asyncio.timeout(START_S):
        while True:
            if process.returncode is not None:
                raise RunFailed(
                    "AgentGym's server ended: run it by hand in the folder of that environment to see why"
                )
            try:
                async with http.get(url) as response:
                    if response.status == 200:
                        return
            except ClientError:
                await asyncio.sleep(0.2)
