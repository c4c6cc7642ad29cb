"""AgentGym's SQLGym server with our questions in BIRD's file format, so that the server can be tried without BIRD.

The server has eight environments and hands them out in turn, so more than eight concurrent episodes share them. Every
second episode answers its own question and the others answer the next one's, which exposes a reward that belongs to
another episode.
"""

import asyncio
import json
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from horizonrl.common.errors import EnvironmentFailure
from horizonrl.envs import registry
from horizonrl.envs.agentgym.doors import number_tasks
from horizonrl.envs.worlds.sql.problems import Problem, make_problem
from tests.peers.agentgym.comparison import GameComparison


def write_bird(folder: Path, count: int) -> list[Problem]:
    """Write our first `count` questions as BIRD's train set. AgentGym's item ids are the positions in it."""
    tasks = registry.tasks("sql")
    numbers = number_tasks("sql", tasks)
    problems = [
        make_problem(task)[0]
        for task in sorted(tasks, key=lambda task: numbers[task.task_id])[:count]
    ]
    items, tables = [], []
    for number, problem in enumerate(problems):
        name = f"db{number}"
        items.append(
            {"db_id": name, "question": problem.question, "evidence": "", "SQL": problem.gold}
        )
        tables.append(_described(name, problem))
        _write_database(folder / "train" / "train_databases" / name / f"{name}.sqlite", problem)
    for file, content in (("train.json", items), ("train_tables.json", tables)):
        (folder / "train" / file).write_text(json.dumps(content), encoding="utf-8")
    return problems


def _described(name: str, problem: Problem) -> dict[str, Any]:
    columns: list[list[Any]] = [[-1, "*"]]
    for table_number, declared in enumerate(problem.tables.values()):
        columns += [[table_number, column.split()[0]] for column in declared]
    names = list(problem.tables)
    return {
        "db_id": name,
        "table_names": names,
        "column_names": columns,
        "primary_keys": [],
        "foreign_keys": [],
    }


def _write_database(file: Path, problem: Problem) -> None:
    file.parent.mkdir(parents=True)
    connection = sqlite3.connect(file)
    for table, declared in problem.tables.items():
        connection.execute(f"CREATE TABLE {table} ({', '.join(declared)})")
        places = ", ".join("?" * len(declared))
        connection.executemany(f"INSERT INTO {table} VALUES ({places})", problem.rows[table])
    connection.commit()
    connection.close()


async def play_all(url: str, problems: Sequence[Problem], parallel: int) -> GameComparison:
    """Play every question with our client. Odd-numbered questions get the next question's query as the answer."""
    found, slots = GameComparison("sql"), asyncio.Semaphore(parallel)
    began = time.monotonic()

    async def play(number: int) -> None:
        async with slots:
            try:
                await _play(url, problems, number, found)
            except EnvironmentFailure as failure:
                found.failures += 1
                found.differences.append(f"task {number}: {failure}"[:300])

    await asyncio.gather(*(play(number) for number in range(len(problems))))
    found.turns_per_s = round(found.turns / (time.monotonic() - began), 1)
    return found


async def _play(url: str, problems: Sequence[Problem], number: int, found: GameComparison) -> None:
    tasks = f"{number}-{number}"
    there = registry.make(
        "agentgym-sqlgym", {"url": url, "instructions": "", "train": tasks, "test": tasks}
    )
    own = number % 2 == 0
    try:
        first = (await there.reset(str(number))).text
        await asyncio.sleep(0.01)  # the agent thinks
        query = problems[number if own else (number + 1) % len(problems)].gold
        step = await there.step(f"```sql\n{query}\n```")
    finally:
        await there.close()
    found.episodes, found.turns, found.solved = (
        found.episodes + 1,
        found.turns + 1,
        found.solved + step.success,
    )
    found.same_goal += first.endswith(problems[number].question)
    found.same_score += step.reward == float(own)
    found.same_end += step.terminated
    if step.reward != float(own):
        found.differences.append(f"task {number}: reward {step.reward} and not {float(own)}")
