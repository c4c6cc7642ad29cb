"""What an evaluation says: a row a task and scenario, a block a value of `--turns`, a column a value of `--samples`."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.box
from rich.table import Table

from horizonrl.common.errors import ConfigError
from horizonrl.learner.records.evaluation import Result, measures
from horizonrl.ops.evaluation.journal import Key, Line
from horizonrl.ops.evaluation.plan import ALL, EvalPart, Plan
from horizonrl.ops.terminal.figures import interval, number, percent

RESULTS, TABLE_MD = "results.json", "table.md"


def blocks_of(plan: Plan, lines: Mapping[Key, Line]) -> list[dict[str, Any]]:
    """Return a block for each number of turns, all from one set of episodes."""
    most = max(len(part.turns) for part in plan.parts)
    return [
        {
            "turns": {part.env.id: part.turns[block] for part in plan.parts},
            "rows": [
                row
                for part in plan.parts
                for row in _rows(part, part.turns[block], plan.samples[-1], lines)
            ],
        }
        for block in range(most)
    ]


def _rows(
    part: EvalPart, turns: int, samples: int, lines: Mapping[Key, Line]
) -> Iterable[dict[str, Any]]:
    for label, category in part.rows.items():
        tasks = [task for task in part.tasks if category is None or task.category == category]
        results = []
        for task in tasks:
            keys = [(part.env.id, task.task.task_id, sample) for sample in range(samples)]
            ended = [lines[key].within(turns) for key in keys if key in lines]
            valid = tuple(played for played in ended if played is not None)
            broken = len(ended) - len(valid)
            results.append(
                (task, Result(sequence=0, number=0, how="evaluated", broken=broken, episodes=valid))
            )
        measured = measures(results, samples)
        played = measured["episodes"] + measured["broken"]
        yield {
            "scenario": part.scenario,
            "task": label,
            "env": part.env.id,
            "tasks": len(tasks),
            **measured,
            "broken_share": measured["broken"] / played if played else None,
        }


def write_report(
    directory: Path, facts: Mapping[str, Any], plan: Plan, blocks: Sequence[Mapping[str, Any]]
) -> None:
    """Write `results.json` and `table.md`."""
    text = json.dumps(
        {**facts, "samples": list(plan.samples), "blocks": blocks}, indent=2, default=str
    )
    (directory / RESULTS).write_text(text + "\n", encoding="utf-8")
    (directory / TABLE_MD).write_text(
        "\n\n".join(_markdown(block, plan) for block in blocks) + "\n", encoding="utf-8"
    )


def read_results(directory: Path) -> dict[str, Any]:
    """Return the `results.json` of an evaluation. Raises ConfigError if there is none, or one that cannot be read."""
    try:
        results: dict[str, Any] = json.loads((directory / RESULTS).read_text(encoding="utf-8"))
    except OSError:
        raise ConfigError(
            f"{directory} holds no {RESULTS}: it is no evaluation, or one that is not complete. The same "
            "`horizonrl eval` resumes it"
        ) from None
    except ValueError as error:
        raise ConfigError(
            f"{directory / RESULTS} is cut short or damaged ({error}): the same `horizonrl eval` writes it again"
        ) from None
    return results


def rich_tables(plan: Plan, blocks: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Return a table for each block."""
    tables = []
    for block in blocks:
        table = Table(
            box=rich.box.SIMPLE_HEAD,
            title=title(block, plan.split),
            title_justify="left",
            pad_edge=False,
        )
        for column, name in enumerate(header(plan.samples)):
            table.add_column(name, justify="left" if column < 2 else "right")
        for row in block["rows"]:
            table.add_row(*cells(row, plan.samples), end_section=row["task"] == ALL)
        tables.append(table)
    return tables


def title(block: Mapping[str, Any], split: str) -> str:
    values = set(block["turns"].values())
    turns = f"{values.pop()} turns"
    if values:
        turns = ", ".join(f"{most} turns of {env_id}" for env_id, most in block["turns"].items())
    return f"At most {turns}, split {split}"


def header(samples: Sequence[int]) -> list[str]:
    return [
        "scenario",
        "task",
        "n",
        "success (95 %)",
        *(f"pass@{k}" for k in _shown(samples)),
        *LAST,
    ]


LAST = ("return", "turns", "tokens", "broken")


def cells(row: Mapping[str, Any], samples: Sequence[int]) -> list[str]:
    """Return a row as it is read: n counts episodes; return, turns and generated tokens are means of an episode."""
    return [
        row["scenario"],
        row["task"],
        str(row["episodes"]),
        success(row),
        *(percent(row["pass_at"][str(k)]) for k in _shown(samples)),
        number(row["return_mean"]),
        number(row["turns_mean"], 1),
        number(row["tokens_mean"], 0),
        percent(row["broken_share"]),
    ]


def success(row: Mapping[str, Any]) -> str:
    """Return a row's success and its interval, or a dash if no episode was valid."""
    return interval(row) if row["episodes"] else "-"


def _shown(samples: Sequence[int]) -> Sequence[int]:
    """Return the k that say more than the success does."""
    return [k for k in samples if samples[-1] > 1]


def _markdown(block: Mapping[str, Any], plan: Plan) -> str:
    rows = [cells(row, plan.samples) for row in block["rows"]]
    return f"{title(block, plan.split)}:\n\n{markdown_table(header(plan.samples), rows)}"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], words: int = 2) -> str:
    """Return a table whose first `words` columns are words, as scenario and task, and whose others are numbers."""
    rule = ["---"] * words + ["---:"] * (len(head) - words)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))
