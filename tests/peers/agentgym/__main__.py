"""The real AgentGym against ours, both ways: its client on our servers, and our client on its servers.

    python -m tests.peers.agentgym ours --agentgym DIR                its package plays on our servers
    python -m tests.peers.agentgym theirs --agentgym DIR              our client plays on its servers
    python -m tests.peers.agentgym games --agentgym DIR --lmrl DIR    Maze and Wordle, turn by turn
    python -m tests.peers.agentgym speed --agentgym DIR               rows of the performance table: steps per second

    ours        whole episodes of an expert, played by AgentGym's Evaluator (driver.py runs in its Python)
    theirs      one task on both sides at once, up to 32 episodes in parallel; bird.py makes the questions for SQLGym
    lmrl        our Maze and Wordle against LMRL-Gym's, in this process
    games       an expert's episodes in the form that AgentGym's prompts ask for
    comparison  the counts of `theirs`

How to read it: `whole`, `same` and the `same_*` columns count matches and should equal `episodes` or `turns`.
`first_difference` and `differences` quote both sides where they do not. docs/environments/agentgym.md has the results.

DIR is a checkout of https://github.com/WooooDyy/AgentGym or https://github.com/abdulhaim/LMRL-Gym. `--python` is a
Python with AgentGym's dependencies: for `ours` those of its `agentenv` package (torch, transformers, requests, openai),
for `theirs` and `speed` those of its servers (docs/environments/agentgym.md).
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from horizonrl.common.errors import HorizonError
from horizonrl.ops.bench.case import Request
from horizonrl.ops.terminal.console import plain_console
from tests.peers.agentgym import lmrl, ours, speed, theirs


def main() -> int:
    """Run one comparison and print its table."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.peers.agentgym",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("ours", "theirs", "games", "speed"), help="see above")
    parser.add_argument(
        "ids", nargs="*", metavar="ID", help="our environments to compare; default: all"
    )
    parser.add_argument(
        "--agentgym", type=Path, metavar="DIR", help="checkout of AgentGym; optional for speed"
    )
    parser.add_argument(
        "--lmrl", type=Path, metavar="DIR", help="checkout of LMRL-Gym; required by games"
    )
    parser.add_argument(
        "--python",
        default=sys.executable,
        help="Python with AgentGym's dependencies; default: this one",
    )
    parser.add_argument(
        "--episodes",
        type=int,
        default=0,
        help="episodes per environment; default: 5 for ours, 64 for theirs",
    )
    parser.add_argument(
        "--parallel", type=int, default=32, help="episodes at a time, for theirs; default: 32"
    )
    parser.add_argument(
        "--small", action="store_true", help="for speed: seconds instead of minutes, as in CI"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
    options = parser.parse_args()
    if options.what == "speed":
        return speed.run(Request(options.small), options.agentgym, options.python, options.json)
    if options.agentgym is None:
        parser.error(f"{options.what} needs --agentgym DIR")
    if options.what == "games" and options.lmrl is None:
        parser.error("games needs --lmrl DIR")
    rows: list[dict[str, Any]] = []
    try:
        asyncio.run(_run(options, rows))
    finally:  # those before a server that does not start, too
        if rows:
            _print(rows)
        if options.json is not None:
            options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return 0


async def _run(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    match options.what:
        case "ours":
            ids = options.ids or list(ours.TASKS)
            rows += map(
                asdict,
                await ours.drive(options.agentgym, options.python, ids, options.episodes or 5),
            )
        case "theirs":
            for env_id in options.ids or theirs.SERVERS:
                row = await theirs.compare(
                    options.agentgym,
                    options.python,
                    env_id,
                    options.episodes or 64,
                    options.parallel,
                )
                rows.append(asdict(row))
        case _:
            rows += map(asdict, await lmrl.compare(options.agentgym, options.lmrl))


def _print(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    plain_console(width=240).print(table)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except HorizonError as error:
        sys.exit(f"error: {error}")
