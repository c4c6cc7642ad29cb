"""SQL: answer a question with a query. The reward is 1 if its rows, as a set, equal those of the right query, else 0.

Queries can only read (envs/worlds/sql/database.py) and are stopped if they take long.
"""

from collections.abc import Sequence
from functools import cache
from typing import Annotated

from pydantic import Field, validate_call

from horizonrl.envs.api import Step, TaskSpec
from horizonrl.envs.formats import ActionFormat, Command, Unreadable, bound_length, find_fenced
from horizonrl.envs.game import GameEnvironment, Move, Style
from horizonrl.envs.text_limits import Chars
from horizonrl.envs.worlds.sql.database import Database, QueryRefused, Row
from horizonrl.envs.worlds.sql.problems import Problem, list_tasks, make_problem

COMMANDS = (Command("query", "{sql}", "answer with one SELECT of sqlite, on one line", lines=True),)
SHOWN_ROWS = 10


class Answering:
    """One question, until a query answers it or the attempts are spent."""

    def __init__(self, problem: Problem, database: Database, attempts: int) -> None:
        self._problem = problem
        self._database = database
        self._attempts = attempts
        self._gold = frozenset(database.query(problem.gold))

    def follow(self, action: str) -> Step:
        """Run a query and judge its rows. A wrong query is answered with its rows or its error."""
        self._attempts -= 1
        try:
            rows = self._database.query(action)
            right, observation = frozenset(rows) == self._gold, format_table(rows)
        except QueryRefused as refused:
            right, observation = False, f"The query failed: {refused}."
        if right:
            return Step(observation, reward=1.0, terminated=True, success=True)
        # A wrong query may be mended while attempts are left; the last one ends the task, unsolved.
        return Step(
            f"{observation}\nThat is not the answer.", reward=0.0, terminated=not self._attempts
        )

    def advise(self) -> Move:
        """Give the query from which the question was made."""
        return Move(self._problem.gold, "This query answers the question.")


class Sql(GameEnvironment[Answering]):
    """One question at a time.

    attempts: number of queries per episode; after a wrong one the agent sees its rows or its error
    format: how the agent names its action (envs/formats.py); in `react` and `plain` the last fenced sql block counts
    style: `full` shows three rows of each table, `compact` only the columns
    max_observation_chars: bound of every observation
    """

    env_id = "sql"
    version = "2"
    commands = COMMANDS

    @validate_call
    def __init__(
        self,
        *,
        attempts: Annotated[int, Field(ge=1, le=20)] = 1,
        format: ActionFormat = "react",
        style: Style = "full",
        max_observation_chars: Chars = 4_096,
    ) -> None:
        super().__init__(format, style, max_observation_chars)
        self._attempts = attempts

    @classmethod
    def tasks(cls) -> Sequence[TaskSpec]:
        """Return the 10,962 tasks."""
        return list_tasks()

    def load(self) -> None:
        """List the tasks, once in a program."""
        _by_id()

    def begin(self, task_id: str) -> tuple[str, Answering]:
        """Return the tables and the question."""
        task = self.find(_by_id(), task_id)
        problem, database = make_problem(task)
        full = self._style != "compact"
        schema = "\n".join(
            f"{table}({', '.join(columns if full else [column.split()[0] for column in columns])})"
            + (f"\n{format_table(problem.rows[table][:3])}" if full else "")
            for table, columns in problem.tables.items()
        )
        rules = f"Answer a question about a sqlite database. Attempts: {self._attempts}."
        text = self.introduce(rules, f"Tables:\n{schema}\nQuestion: {problem.question}")
        return text, Answering(problem, database, self._attempts)

    def read(self, text: str) -> str | Unreadable:
        """Return the query in a reply, with its lines: a comment ends with one.

        In AgentGym's style, its client has already removed the fence.
        """
        if self._style == "agentgym" and self._format == "plain" and text.strip():
            return bound_length(text.strip())
        blocks = find_fenced(text, "sql") if self._format in ("react", "plain") else []
        if not blocks:
            return super().read(text)
        return bound_length(blocks[-1].strip() or Unreadable("The block is empty."))


def format_table(rows: Sequence[Row]) -> str:
    """Return the first ten rows as lines of text."""
    lines = [
        " | ".join("NULL" if value is None else str(value) for value in row)
        for row in rows[:SHOWN_ROWS]
    ]
    more = [f"... {len(rows)} rows in all"] if len(rows) > SHOWN_ROWS else []
    return "\n".join(lines + more) or "(no rows)"


@cache
def _by_id() -> dict[str, TaskSpec]:
    return {task.task_id: task for task in list_tasks()}
