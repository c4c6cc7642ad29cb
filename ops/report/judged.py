"""The directory of `horizonrl eval` as the page shows it: its table, its settings, and its episodes."""

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from horizonrl.common.types import Kind
from horizonrl.ops.evaluation.journal import Key, Line, read_journal
from horizonrl.ops.evaluation.report import RESULTS, read_results, title
from horizonrl.ops.report.episodes import Episodes, Group, pack


def read_judged(directory: Path) -> tuple[dict[str, Any], Episodes]:
    """Return the facts of an evaluation's page and its episodes. Raises ConfigError if the directory is none."""
    settings, lines = read_journal(directory)
    results = read_results(directory) if (directory / RESULTS).is_file() else None
    name = directory.resolve().name
    shown = {
        "kind": "evaluation",
        "name": name if results is None else f"{name}: {results['model']}",
        "written": time.time(),
        "headline": [] if results is None else _headline(results),
        "notices": list(_notices(results, lines)),
        "blocks": []
        if results is None
        else [
            {"title": title(one, results["split"]), "rows": one["rows"]}
            for one in results["blocks"]
        ],
        "samples": [1] if results is None else results["samples"],
        "settings": json.dumps(settings, indent=2),
        "curves": [],
        "resumes": [],
        "imitation": 0,
    }
    groups = list(_groups(settings, lines))
    return shown, pack(groups, {ticket: (0, "evaluated") for _, ticket, _ in groups})


def _headline(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return success, one number per scenario: its row of all tasks, or its only one."""
    # A scenario's last row is that of all.
    rows = {row["scenario"]: row for row in results["blocks"][-1]["rows"]}
    return [
        {
            "label": f"Success in {name}",
            "unit": "percent",
            "value": row["success_rate"],
            "note": f"95 % interval {100 * row['low']:.0f} to {100 * row['high']:.0f} %, {row['episodes']} episodes",
        }
        for name, row in rows.items()
    ]


def _notices(results: Mapping[str, Any] | None, lines: Mapping[Key, Line]) -> Iterator[str]:
    if results is None:
        yield "The evaluation is not complete, so there is no table. The same `horizonrl eval` resumes it."
    if broken := sum(line.stop.broken for line in lines.values()):
        yield f"{broken} of {len(lines)} episodes broke. They are no failures, and left out of every mean."
    if results is not None and results["samples"][-1] > 1:
        yield "The samples of one task are alike, so the intervals are somewhat too narrow."


def _groups(settings: Mapping[str, Any], lines: Mapping[Key, Line]) -> Iterator[Group]:
    """Yield the samples of each task as a group, in the order in which the tasks were first played."""
    by_task: dict[tuple[str, str], list[Line]] = {}
    for line in lines.values():
        by_task.setdefault((line.env, line.task), []).append(line)
    for number, played in enumerate(by_task.values()):
        ticket = f"{Kind.EVAL.value}-{number:08d}"
        horizon = settings["environments"][played[0].env]["turns"]
        yield (
            0,
            ticket,
            [
                _record(line, ticket, horizon)
                for line in sorted(played, key=lambda line: line.sample)
            ],
        )


def _record(line: Line, ticket: str, horizon: int) -> dict[str, Any]:
    """Return an episode as a run keeps it, without what nobody knows here: token ids and versions."""
    turns = [turn.model_dump() for turn in line.turns]
    return {
        "ticket": ticket,
        "env": line.env,
        "task": line.task,
        "horizon": horizon,
        "episode": line.sample,
        "stop": line.stop.value,
        "success": line.success,
        "return": sum(turn["reward"] for turn in turns),
        "error": line.error,
        "prompt": line.prompt,
        "turns": turns,
    }
