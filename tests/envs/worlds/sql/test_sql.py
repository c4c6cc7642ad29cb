import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from horizonrl.envs import registry
from horizonrl.envs.api import Step, TaskSpec, ToolCall
from horizonrl.envs.worlds.sql.database import Database, QueryRefused
from horizonrl.envs.worlds.sql.env import Sql


@pytest.fixture
def database() -> Iterator[Database]:
    tables = {"pets": ("id INTEGER PRIMARY KEY", "name TEXT")}
    database = Database(tables, {"pets": [(n, f"pet {n}") for n in range(60)]})
    yield database
    database.close()


def play(*replies: str, attempts: int = 1) -> list[Step]:
    async def episode() -> list[Step]:
        environment = Sql(attempts=attempts)
        await environment.reset("library-0000")
        return [await environment.step(reply) for reply in replies]

    return asyncio.run(episode())


def test_the_gold_query_answers_every_test_question() -> None:
    async def solved(tested: Sequence[TaskSpec]) -> int:
        environment, solved = Sql(style="compact"), 0
        for task in tested:
            await environment.reset(task.task_id)
            solved += (await environment.step(environment.expert().act(""))).success
        return solved

    assert asyncio.run(solved(registry.select("sql", "test"))) == 1_534
    assert len(registry.select("sql", "train")) == 8_249


def test_a_third_of_the_questions_is_of_each_difficulty() -> None:
    assert set(Counter(task.category for task in registry.tasks("sql")).values()) == {3_654}


@pytest.mark.parametrize(
    "sql",
    [
        "DROP TABLE pets",
        "DELETE FROM pets",
        "INSERT INTO pets VALUES (99, 'x')",
        "UPDATE pets SET name = 'x'",
        "ATTACH 'x.db' AS other",
        "PRAGMA user_version = 3",
        "PRAGMA table_info(pets)",
        "CREATE TEMP TABLE x (a)",
        "SELECT load_extension('x')",
        "SELECT random()",
        "SELECT CURRENT_TIMESTAMP",
        "VACUUM INTO 'x.db'",
        "BEGIN",
        "SELECT 1; SELECT 2",
        "SELECT 1; DROP TABLE pets",
        "",
        "SELEC",
        "SELECT '\0'",
        "SELECT '\ud800'",
    ],
)
def test_what_is_no_single_pure_select_is_refused_and_changes_nothing(
    database: Database, sql: str
) -> None:
    try:
        assert database.query(sql) == []  # Nothing but an empty text runs and finds nothing.
        assert not sql
    except QueryRefused:
        pass
    assert database.query("SELECT COUNT(*), MAX(name) FROM pets") == [(60, "pet 9")]


@pytest.mark.parametrize(
    "sql",
    [
        "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT COUNT(*) FROM n",
        "SELECT COUNT(*) FROM pets a, pets b, pets c, pets d, pets e",
        "SELECT * FROM pets a, pets b",
        "SELECT group_concat(a.name || b.name || c.name) FROM pets a, pets b, pets c",
        "SELECT printf('%.*c', 900000000, 'x')",  # sqlite would be at it for half a minute before it gives up
    ],
)
def test_a_runaway_query_is_stopped_in_milliseconds(database: Database, sql: str) -> None:
    began = time.process_time()
    with pytest.raises(QueryRefused):
        database.query(sql)
    assert time.process_time() - began < 0.1
    assert database.query("SELECT 1") == [(1,)]


def test_rows_are_compared_as_a_set() -> None:
    (step,) = play("Action: SELECT COUNT(id) + 0.0 FROM books WHERE pages > 218 UNION SELECT 7")
    assert step.success


def test_a_fenced_block_may_have_several_lines_and_the_last_counts() -> None:
    (step,) = play(
        "```sql\nSELECT 1\n```\nNo:\n```sql\nSELECT COUNT(*)\nFROM books\nWHERE pages > 218;\n```"
    )
    assert (step.reward, step.terminated, step.success) == (1, True, True)


COMMENTED = (
    "-- books longer\n-- than 218 pages\nSELECT COUNT(*)\n  FROM books WHERE pages > 218 -- done"
)


@pytest.mark.parametrize(
    ("options", "reply"),
    [
        ({"format": "react"}, f"Thought: count\n```sql\n{COMMENTED}\n```"),
        ({"format": "plain"}, f"```sql\n{COMMENTED}\n```"),
        ({"format": "plain", "style": "agentgym"}, COMMENTED),
        (
            {"format": "function"},
            json.dumps({"function_name": "query", "arguments": {"sql": COMMENTED}}),
        ),
        ({"format": "code"}, f"```python\nquery({COMMENTED!r})\n```"),
        ({"format": "native"}, ToolCall("query", json.dumps({"sql": COMMENTED}))),
    ],
    ids=["react", "plain", "agentgym", "function", "code", "native"],
)
def test_a_comment_in_a_query_ends_with_its_line(
    options: dict[str, Any], reply: str | ToolCall
) -> None:
    async def answer() -> Step:
        environment = Sql(**options)
        await environment.reset("library-0000")
        return await (
            environment.step(reply) if isinstance(reply, str) else environment.call(reply)
        )

    step = asyncio.run(answer())
    assert step.success, step.observation


def test_a_wrong_query_is_answered_by_its_rows_until_the_attempts_are_spent() -> None:
    steps = play("Action: SELECT 1", "Action: SELECT colour", attempts=2)
    assert [step.terminated for step in steps] == [False, True]
    assert steps[0].observation == "1\nThat is not the answer."
    assert steps[1].observation.startswith("The query failed: no such column: colour.")
    assert [step.reward for step in steps] == [0, 0]
