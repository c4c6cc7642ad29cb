"""AgentGym's own package plays whole episodes on our servers, with its Evaluator, tasks, clients and agent.

The agent's endpoint replies as our expert does. The texts that AgentGym's client reads must equal our environment's
answers.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from horizonrl.common.errors import RunFailed
from horizonrl.common.types import MAX_TURNS
from horizonrl.envs import registry
from horizonrl.envs.agentgym.doors import number_tasks
from tests.peers.agentgym.games import Game, door, play

TASKS: Mapping[str, str] = {
    "textcraft": "TextCraftTask", "babyai": "BabyAITask", "sciworld": "SciworldTask", "household": "AlfWorldTask",
    "shop": "WebshopTask", "sql": "SqlGymTask", "deepsearch": "SearchQATask", "webnav": "WebarenaTask",
    "maze": "MazeTask", "wordle": "WordleTask", "weather": "WeatherTask", "movie": "MovieTask",
    "academia": "AcademiaTask", "sheet": "SheetTask", "todo": "TodoTask",
}  # fmt: skip
"""AgentGym's task class for each of our environments."""


@dataclass(frozen=True, slots=True)
class Driven:
    """The result of AgentGym's client in one environment."""

    env: str
    agentgym: str
    episodes: int
    turns: int
    whole: int
    """Episodes in which every text, the reward and the end equal our environment's answers."""
    solved: int
    seconds: float
    """Time in AgentGym's package: clients, requests and agent."""
    first_difference: str = ""


async def drive(agentgym: Path, python: str, env_ids: Sequence[str], episodes: int) -> list[Driven]:
    """Let AgentGym's package play the first test tasks of each environment."""
    games = {env_id: await _games(env_id, episodes) for env_id in env_ids}
    async with _server(env_ids) as url, _endpoint(games) as endpoint:
        jobs = [
            {
                "env": env_id,
                "task": TASKS[env_id],
                "url": f"{url}/{env_id}",
                "numbers": [game.number for game in games[env_id]],
                "max_rounds": MAX_TURNS,
            }
            for env_id in env_ids
        ]
        found = await _run_driver(agentgym, python, {"endpoint": endpoint, "jobs": jobs})
    return [
        _compare(env_id, games[env_id], [entry for entry in found if entry["env"] == env_id])
        for env_id in env_ids
    ]


async def _games(env_id: str, episodes: int) -> list[Game]:
    """Return the expert's games on the first test tasks that it solves."""
    tasks = registry.tasks(env_id, door(env_id).options)
    numbers = number_tasks(env_id, tasks)
    games: list[Game] = []
    for task in (task for task in tasks if task.split == "test"):
        if (game := await play(env_id, numbers[task.task_id])) is not None and game.solved:
            games.append(game)
        if len(games) == episodes:
            break
    return games


def _compare(env_id: str, games: Sequence[Game], found: Sequence[Any]) -> Driven:
    dialect = door(env_id).dialect
    played = {entry["number"]: entry for entry in found}
    differences = [
        _difference(env_id, game, played.get(game.number, {"error": "not played"}))
        for game in games
    ]
    return Driven(
        env=env_id,
        agentgym=dialect.name,
        episodes=len(games),
        turns=sum(len(game.replies) for game in games),
        whole=differences.count(""),
        solved=sum(entry.get("reward", 0) >= dialect.solved_at for entry in found),
        seconds=round(sum(entry["seconds"] for entry in found), 1),
        first_difference=next(filter(None, differences), ""),
    )


def _difference(env_id: str, game: Game, entry: Mapping[str, Any]) -> str:
    """Return the first difference between an episode and ours; an empty text if there is none."""
    if "error" in entry:
        return f"task {game.number}: {entry['error']}"
    dialect = door(env_id).dialect
    texts = [message["content"] for message in entry["conversation"]][2:]
    total, expected = 0.0, [game.first]
    for reply, step in zip(game.replies, game.answers, strict=True):
        total += step.reward
        expected += [reply, dialect.write_observation(step.observation)]
    if env_id == "wordle" or (env_id == "maze" and texts[0].endswith(f"\n{game.first}")):
        # AgentGym's clients put the rules before the first observation, or in its place.
        expected[0] = texts[0]
    for turn, (there, here) in enumerate(zip(texts, expected, strict=False)):
        if there != here:
            return f"task {game.number}, text {turn}: {there[-200:]!r} and not {here[-200:]!r}"
    answer = dialect.write_step(game.answers[-1], total)
    if len(texts) != len(expected) or entry["reward"] != answer[dialect.score]:
        return f"task {game.number}: {len(texts)} texts, reward {entry['reward']}; here {len(expected)}, {total}"
    return ""


async def _run_driver(agentgym: Path, python: str, job: Mapping[str, Any]) -> list[Any]:
    driver = Path(__file__).with_name("driver.py")
    process = await asyncio.create_subprocess_exec(
        python, str(driver), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(agentgym / "agentenv")},
    )  # fmt: skip
    out, errors = await process.communicate(json.dumps(job).encode())
    if process.returncode != 0:
        raise RunFailed(
            f"AgentGym's package did not run: {errors.decode(errors='replace')[-2000:]}"
        )
    return [json.loads(line) for line in out.splitlines()]


@asynccontextmanager
async def _server(env_ids: Sequence[str]) -> AsyncIterator[str]:
    """Run `horizonrl envs serve` as a child process and yield its address."""
    command = (
        sys.executable,
        "-m",
        "horizonrl.ops.cli.main",
        "envs",
        "serve",
        *env_ids,
        "--port",
        "0",
    )
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        line = (await process.stdout.readline()).decode()
        if ": " not in line:
            raise RunFailed(f"the server did not start: {' '.join(command)}")
        yield line.partition(": ")[2].strip().rpartition("/")[0]
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def _endpoint(games: Mapping[str, Sequence[Game]]) -> AsyncIterator[str]:
    """Serve the expert's replies as chat completions. The model's name identifies the episode."""

    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        env_id, _, number = body["model"].partition("/")
        game = next(game for game in games[env_id] if game.number == int(number))
        # AgentGym's conversations begin with its instruction and a set answer to it, which is no turn.
        turn = sum(message["role"] == "assistant" for message in body["messages"]) - 1
        content = game.replies[turn] if turn < len(game.replies) else "nothing"
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": content},
        }
        return web.json_response(
            {
                "id": "0",
                "object": "chat.completion",
                "created": 0,
                "model": "expert",
                "choices": [choice],
            }
        )

    application = web.Application(client_max_size=1 << 24)
    application.add_routes([web.post("/v1/chat/completions", complete)])
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()
