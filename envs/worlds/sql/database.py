"""A small in-memory sqlite database. An agent's SQL can only read it, in bounded time and memory."""

import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from horizonrl.envs.game import words

Row = tuple[str | int | float | None, ...]
MAX_ROWS = 1_000
MAX_CHARS = 200_000
"""Limit on the characters of all cells of an answer. Our answers have fewer than 1,000."""
INSTRUCTIONS = 200_000
"""A query is stopped after this many of sqlite's instructions, about 5 ms. Our queries need fewer than 10,000."""
CPU_S = 0.25
"""A query is also stopped after this CPU time, because one instruction may compare long texts. It is CPU time, not wall
time, so that a busy machine does not change the outcome."""

_FUNCTIONS = frozenset(
    words(
        "abs avg coalesce count cume_dist dense_rank first_value glob group_concat ifnull iif instr lag "
        "last_value lead length like lower ltrim max min nth_value ntile nullif percent_rank rank replace round "
        "row_number rtrim sign substr substring sum total trim typeof upper"
    )
)
"""The pure functions, since two machines must see the same rows: no random(), no 'now', no load_extension()."""
_READING = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE})
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 1_000,  # bytes of a cell, and of a row that sqlite stores
    sqlite3.SQLITE_LIMIT_COLUMN: 32,  # all three tables together have 13
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 2_000,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 100,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 20,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 100,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
}
_TICK = 200


class QueryRefused(Exception):
    """The query is not a single SELECT, has an error, or exceeds a limit. The agent reads the message."""


class Database:
    """Filled once, then only read: sqlite's authorizer rejects everything but SELECT before it runs."""

    def __init__(
        self, tables: Mapping[str, Sequence[str]], rows: Mapping[str, Iterable[Row]]
    ) -> None:
        self._connection = sqlite3.connect(":memory:", check_same_thread=False)
        for table, columns in tables.items():
            self._connection.execute(f"CREATE TABLE {table} ({', '.join(columns)})")
            places = ", ".join("?" * len(columns))
            self._connection.executemany(f"INSERT INTO {table} VALUES ({places})", rows[table])
        self._connection.commit()
        # After the tables are filled: the limits are for the agent's queries, not for our rows.
        for limit, value in _LIMITS.items():
            self._connection.setlimit(limit, value)
        self._ticks, self._until = 0, 0.0
        # After the rows, because from here on nobody can write, not even we.
        self._connection.set_authorizer(_authorize)
        self._connection.set_progress_handler(self._tick, _TICK)

    def query(self, sql: str) -> list[Row]:
        """Return the rows of a SELECT. Raises QueryRefused."""
        self._ticks, self._until = 0, time.thread_time() + CPU_S
        try:
            return _within_bounds(self._connection.execute(sql))
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            reason = {
                "interrupted": "it takes too long",
                "not authorized": "only SELECT is allowed",
            }
            raise QueryRefused(reason.get(str(error), str(error))) from None

    def close(self) -> None:
        self._connection.close()

    def _tick(self) -> int:
        self._ticks += 1
        return self._ticks > INSTRUCTIONS // _TICK or time.thread_time() > self._until


def _within_bounds(answer: Iterator[Row]) -> list[Row]:
    """Return the rows. They are fetched one at a time, so that an answer that is too large is never held in memory."""
    rows: list[Row] = []
    chars = 0
    for row in answer:
        rows.append(row)
        chars += sum(len(cell) for cell in row if isinstance(cell, str | bytes))
        if len(rows) > MAX_ROWS or chars > MAX_CHARS:
            raise QueryRefused(f"it returns more than {MAX_ROWS} rows or {MAX_CHARS} characters")
    return rows


def _authorize(
    action: int, table: str | None, column: str | None, database: str | None, source: str | None
) -> int:
    # For a function, sqlite passes the name in the place of the column.
    pure = action == sqlite3.SQLITE_FUNCTION and (column or "").lower() in _FUNCTIONS
    return sqlite3.SQLITE_OK if pure or action in _READING else sqlite3.SQLITE_DENY
