"""The report of a study in Markdown, made of its `results.json`: how it was made, and every number in tables.

`horizonrl study learning` writes it as `report.md`; ops/pages/studies.py makes the pages of docs/studies of it.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from horizonrl.ops.studies.contrasts import END
from horizonrl.ops.studies.significance import holm, paired_test, student_interval
from horizonrl.ops.studies.tables import PAIRED
from horizonrl.ops.terminal.figures import number

SECONDS = "seconds"
METHOD = """\
Intervals are 95 %: success and gain by bootstrap over seeds and episodes, differences by paired t over seeds.
Each p is Holm's."""

Results = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """Which of a study's results a report shows."""

    axes: Sequence[str] | None = None
    """Where contrasts are shown: at the end, and at an equal cost; None means everywhere."""
    share_of: str | None = None
    """The cost until both arms have equal success, shown as a share of the second arm's."""
    played: bool = True
    """Whether training episodes are shown by horizon."""
    tables: bool = False
    """Whether the paper's tasks, if they were played, are shown instead of the variants."""
    method: str = METHOD


def results_to_markdown(results: Results, shown: ReportOptions) -> list[str]:
    """Return the parts of a report: facts, then tables."""
    parts = [_facts(results)]
    tables = [run["tables"] for run in results["runs"] if run.get("tables")]
    if tables and shown.tables:
        parts.append(_tasks(tables[0]))
    else:
        parts.append(shown.method)
        parts.append(_variants(results, with_seconds=shown.share_of == SECONDS))
        parts += [_contrasts(results, shown)] if results["contrasts"] else []
    if shown.played and any(row["played"] for row in results["variants"]):
        parts.append(_table(PLAYED, _played_rows(results)))
    return parts


def _facts(results: Results) -> str:
    # Without the tasks of each category.
    evaluation = re.sub(r" \([^)]*\)", "", results["evaluation"])
    facts = {
        "Command": f"`{results['command'].strip('`')}`",
        "Seeds": results["seeds"],
        f"Evaluated on {results['split']}": evaluation,
        "Commit": results["commit"],
        "Machine": results["machine"],
    }
    return "\n".join(f"- {name}: {value}" for name, value in facts.items())


def _variants(results: Results, with_seconds: bool) -> str:
    rows = results["variants"]
    runs = {
        row["variant"]: [run for run in results["runs"] if run["variant"] == row["variant"]]
        for row in rows
    }
    gain_p = dict(zip(runs, _correct(map(_p_of_gain, runs.values())), strict=True))
    columns = {
        "variant": [f"`{row['variant']}`" for row in rows],
        f"start on {results['split']}, %": [f"{100 * row['start']['mean']:.1f}" for row in rows],
        f"end on {results['split']}, %": [_percent(row["final"]) for row in rows],
        "gain": [_points(row["improvement"]) for row in rows],
        "its p": [_p(gain_p[row["variant"]]) for row in rows],
        "environment steps": [f"{row['environment_steps']:,.0f}" for row in rows],
        "mean age": [number(row["staleness_mean"], 1) for row in rows],
        "least ESS": [number(row["ess_min"]) for row in rows],
        "truncated, %": [_share_percent(row["truncated_share"], 0) for row in rows],
    }
    if with_seconds:
        columns["seconds"] = [
            f"{fmean(run['curve'][SECONDS][-1] for run in runs[row['variant']]):.0f}"
            for row in rows
        ]
    for key, head in (("collapsed", "collapsed"), ("gave_up", "gave up")):
        if any(row[key] for row in rows):
            columns[head] = [f"{row[key]}/{len(row['seeds'])}" for row in rows]
    return _table_of_columns(columns)


def _p_of_gain(runs: Sequence[Results]) -> float | None:
    """Return the p of paired t over the seeds, of the end against the start."""
    after, before = (
        np.array([run[when]["successes"] / run[when]["episodes"] for run in runs])
        for when in ("final", "start")
    )
    tested = paired_test(after, before)
    return None if tested is None else tested.p


def _correct(p_values: Iterable[float | None]) -> list[float | None]:
    """Return Holm's correction of those that there are, in their places."""
    uncorrected = list(p_values)
    corrected = iter(holm([p for p in uncorrected if p is not None]))
    return [None if p is None else next(corrected) for p in uncorrected]


def _contrasts(results: Results, shown: ReportOptions) -> str:
    axes = shown.axes or tuple(dict.fromkeys(row["axis"] for row in results["contrasts"]))
    rows = [row for axis in axes for row in results["contrasts"] if row["axis"] == axis]
    differences = [
        _points((row["tested"] or {}).get("interval", row["difference"])) for row in rows
    ]
    columns = {f"contrast on {results['split']}": [_names(row) for row in rows]}
    if axes == (END,):  # all at equal updates
        columns["difference at equal updates, points"] = differences
    else:
        columns |= {
            "at equal": [_place(row) for row in rows],
            "difference, points": differences,
        }
    columns["p"] = [_p(row["p"]) for row in rows]
    if shown.share_of is not None:
        costs = {
            (row["variant"], row["against"]): row["end_cost"]
            for row in results["contrasts"]
            if row["axis"] == shown.share_of
        }
        columns[f"{_words(shown.share_of)} to equal success, share"] = [
            _share(costs.get((row["variant"], row["against"]))) for row in rows
        ]
    if shown.share_of == SECONDS:
        columns["times as fast"] = [_speed_up(results["runs"], row) for row in rows]
    return _table_of_columns(columns)


def _speed_up(runs: Sequence[Results], contrast: Results) -> str:
    """Return how many times as fast the first arm made its updates: geometric mean over seeds, with its t interval."""
    seconds = {(run["variant"], run["seed"]): run["curve"][SECONDS][-1] for run in runs}
    arms = contrast["against"], contrast["variant"]
    logs = [np.log([seconds[arm, seed] for seed in contrast["seeds"]]) for arm in arms]
    interval = student_interval(logs[0] - logs[1])
    if interval is None:
        return ""
    mean, low, high = np.exp([interval.mean, interval.low, interval.high])
    return f"{mean:.1f} ({low:.1f}, {high:.1f})"


def _names(contrast: Results) -> str:
    return f"`{contrast['variant']}`−`{contrast['against']}`" + (
        " (primary)" if contrast["primary"] else ""
    )


def _place(contrast: Results) -> str:
    return (
        "updates"
        if contrast["budget"] is None
        else f"{contrast['budget']:,.0f} {_words(contrast['axis'])}"
    )


def _share(cost: Results | None) -> str:
    """Return a share of a cost with its interval; - where one arm has the success from the start, or never."""
    if cost is None:
        return "-"
    ratio, low, high = (
        "-" if cost[key] is None else f"{cost[key]:.2f}" for key in ("ratio", "low", "high")
    )
    return f"{ratio} ({low}, {high})"


TASKS = ("scenario", "task", "n")
PAIRED_TASKS = ("scenario", "tasks", "RL adds, points", "p")


def _tasks(tables: Results) -> str:
    split = tables["after"]["split"]
    rates = (f"{when} RL on {split}, %" for when in ("before", "after"))
    return _table([*TASKS, *rates, "turns"], _task_rows(tables))


def _task_rows(tables: Results) -> Iterator[list[str]]:
    """Yield a row per task: Wilson's intervals over its episodes. A scenario is named once."""
    named = ""
    before, after = (tables[when]["blocks"][0]["rows"] for when in ("before", "after"))
    for one, other in zip(before, after, strict=True):
        rates = (
            f"{100 * row['success_rate']:.0f} ({100 * row['low']:.0f}, {100 * row['high']:.0f})"
            for row in (one, other)
        )
        yield [
            one["scenario"] if one["scenario"] != named else "",
            one["task"],
            f"{one['episodes']}",
            *rates,
            f"{one['turns_mean']:.1f}, {other['turns_mean']:.1f}",
        ]
        named = one["scenario"]


def tables_to_markdown(name: str, tables: Results) -> str:
    """Return a run's tables as a section of a report, with what RL adds in each scenario."""
    parts = [f"## The 27 tasks: {name}", _tasks(tables)]
    if paired := tables.get(PAIRED):  # a run of an earlier release has none
        parts.append(_table(PAIRED_TASKS, map(_paired_row, paired)))
    return "\n\n".join(parts)


def _paired_row(row: Results) -> Sequence[str]:
    added = "-" if row["difference"] is None else f"{100 * row['difference']:+.1f}"
    if row["tested"] is not None:
        added = _points(row["tested"]["interval"])
    return row["scenario"], str(row["tasks"]), added, _p(row["p"])


PLAYED = [
    "variant",
    "horizon",
    "episodes",
    "solved, %",
    "truncated, %",
    "by the context, %",
    "turns: solved, unsolved",
    "repeated actions, %",
]


def _played_rows(results: Results) -> Iterator[list[str]]:
    """Yield a row per variant and horizon, over the training episodes of all seeds.

    Repetitions are those of unsolved episodes.
    """
    for row in results["variants"]:
        for group in row["played"]:
            shares = {
                key: _share_percent(group[f"{key}_share"], 1)
                for key in ("solved", "truncated", "context", "repeated")
            }
            turns = ", ".join(
                number(group[f"turns_per_{end}"], 1) for end in ("solved", "unsolved")
            )
            counts = [f"{group['horizon']}", f"{group['episodes']:,}"]
            yield [
                f"`{row['variant']}`",
                *counts,
                shares["solved"],
                shares["truncated"],
                shares["context"],
                turns,
                shares["repeated"],
            ]


def _percent(interval: Results) -> str:
    mean, low, high = (100 * interval[key] for key in ("mean", "low", "high"))
    return f"{mean:.1f} ({low:.1f}, {high:.1f})"


def _share_percent(share: float | None, digits: int) -> str:
    return "-" if share is None else number(100 * share, digits)


def _points(interval: Results) -> str:
    mean, low, high = (100 * interval[key] for key in ("mean", "low", "high"))
    return f"{mean:+.1f} ({low:+.1f}, {high:+.1f})"


def _p(value: float | None) -> str:
    if value is None:
        return ""
    return "<0.001" if value < 0.0005 else f"{value:.3f}"


def _words(axis: str) -> str:
    return axis.replace("_", " ")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = (head, ["---"] * len(head), *rows)
    return "\n".join(f"|{'|'.join(line)}|" for line in lines)


def _table_of_columns(columns: Mapping[str, Sequence[str]]) -> str:
    return _table(list(columns), zip(*columns.values(), strict=True))
