"""`python -m horizonrl.ops.pages.studies`: write a page of docs/studies/ from each committed study.

A study is the `results.json` of `horizonrl study learning`, kept as docs/studies/NAME.json. Its page is
docs/studies/NAME.md: how the study was made, a conclusion in words, and every number in tables.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from horizonrl.ops.studies.contrasts import END
from horizonrl.ops.studies.significance import holm, paired_test, student_interval

SECONDS = "seconds"
DIRECTORY = Path(__file__).parents[2] / "docs" / "studies"
INTERVALS = "Intervals (95 %) and p: [how to read them](../evidence.md#how-to-read-the-numbers)."

Results = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Note:
    """What a page says besides its numbers."""

    title: str
    conclusion: str
    axes: tuple[str, ...] = (END,)
    """Where contrasts are shown: at the end, and at an equal cost."""
    share_of: str | None = None
    """The cost until both arms have equal success, shown as a share of the second arm's."""
    played: bool = False
    """Whether training episodes are shown by horizon."""
    page: str | None = None
    """The page's name, where NAME.md is written by hand."""


NOTES: Mapping[str, Note] = {
    "asynchrony": Note(
        "Synchronous and asynchronous training",
        "Training on groups up to 8 versions old makes the same updates in a fraction of the time. A loss of several "
        'points of success is not excluded. The runs have `rl.stale = "drop"`, so slow tasks are trained less. The '
        "synchronous arm replaces groups without variance, and so plays more.",
        share_of=SECONDS,
    ),
    "context": Note(
        "A full context: stop, window, summarise",
        "A longer horizon helps only if the context can hold it, or with a window. This model's summaries are poor.",
        axes=(END, "environment_steps"),
    ),
    "curriculum": Note(
        "Curriculum: the pocket model",
        "`adaptive` needs fewer environment steps for equal success. At equal updates no difference shows.",
        axes=(END, "environment_steps", SECONDS),
        share_of="environment_steps",
    ),
    "curriculum-scenarios": Note(
        "Curriculum: games and search",
        "`adaptive` makes as many updates with fewer environment steps. No difference in success is significant.",
        axes=(END, "environment_steps"),
        share_of="environment_steps",
    ),
    "curriculum-smollm2": Note(
        "Curriculum: SmolLM2-135M",
        "`adaptive` needs fewer environment steps for equal success; `adaptive-1` nearly matches its groups' age.",
        axes=(END, "environment_steps"),
        share_of="environment_steps",
    ),
    "estimators": Note(
        "Nine advantages",
        "No advantage differs from `grpo` significantly. Those that compare siblings replace groups without variance, "
        "and so play four times as much for as many updates.",
        axes=(END, "environment_steps"),
    ),
    "horizon-claim": Note(
        "The horizon claim: the confirmation",
        "The verdict is [open](horizon-claim.md#the-confirmation).",
        axes=(END, "processed_tokens"),
        played=True,
        page="horizon-confirmation",
    ),
    "horizon-screen": Note(
        "The horizon claim: the screen",
        "It [names the cell](horizon-claim.md#the-screen) of the confirmation, and tests nothing.",
        axes=(END, "processed_tokens"),
    ),
    "horizons": Note(
        "Five horizon schedules",
        "No schedule differs from `long` significantly. The context ended most of the truncated episodes of `long`.",
        axes=(END, "processed_tokens"),
        played=True,
    ),
    "losses": Note(
        "Six losses",
        "Each loss improves the model. None differs from `ppo` significantly at this learning rate.",
    ),
    "make-train": Note(
        "The recipe of `make train`",
        "`after` is the recipe. It was chosen on these held-out tasks and with one of these seeds, so its lead is too "
        "favourable.",
    ),
    "sampling": Note(
        "Other ways of sampling a group",
        "A screen plays N of 8 episodes first, and the others if those differ. Stop ends a group if the first N to "
        "finish are equal. Smaller has groups of N. No rule makes a trained episode much cheaper, so none is built in.",
    ),
    "scenarios": Note(
        "The five scenarios",
        "Every estimate is a gain. Corrected over the six recipes, none is significant. `embodied` was lengthened "
        "because shorter runs were not significant, so its p is not a test.",
    ),
    "staleness": Note(
        "Staleness: four losses",
        "`ppo` and `dppo` survive groups 16 versions behind. Without a trust region around the behaviour policy, runs "
        "collapse.",
    ),
    "table": Note(
        "The paper's 27 tasks, on counterparts",
        "One run of the mix: up to five test tasks per row, seven episodes each, at temperature 0.7. Wilson's "
        "intervals over episodes are too narrow, because the seven of a task resemble each other. Turns are before and "
        "after RL. With tasks as the unit, no scenario gains significantly.",
    ),
}
"""By the study's name. Conclusions hold no numbers: those are in the tables."""


def pages() -> dict[Path, str]:
    """Return the text of each page, by its path."""
    return {
        DIRECTORY / f"{NOTES[study.stem].page or study.stem}.md": page(
            study.stem, json.loads(study.read_text(encoding="utf-8"))
        )
        for study in sorted(DIRECTORY.glob("*.json"))
    }


def page(name: str, results: Results) -> str:
    """Return the page of a study."""
    note = NOTES[name]
    parts = [
        f"# {note.title}",
        f"Generated from [{name}.json]({name}.json) by `make generated`.",
        note.conclusion,
        _facts(results),
    ]
    if "rules" in results:
        parts.append(_table(RULES, _rules(results)))
    if tables := [run["tables"] for run in results.get("runs", []) if run.get("tables")]:
        parts.append(_table(TASKS, _tasks(tables[0])))
    elif "variants" in results:
        parts += [INTERVALS, _variants(results, with_seconds=note.share_of == SECONDS)]
        parts += [_contrasts(results, note)] if results["contrasts"] else []
    if note.played:
        parts.append(_table(PLAYED, _played(results)))
    if (DIRECTORY.parent / "images" / f"{name}.svg").exists():
        parts.append(f"![{note.title}](../images/{name}.svg)")
    return "\n\n".join(parts) + "\n"


def _facts(results: Results) -> str:
    evaluation = re.sub(r" \([^)]*\)", "", results.get("evaluation", ""))  # without the tasks of each category
    measured = {"Held-out tasks": evaluation} if evaluation else {"Groups": f"{results['groups']} that runs consumed"}
    facts = {
        "Command": f"`{results['command'].strip('`')}`",
        "Seeds": results["seeds"],
        **measured,
        "Commit": results["commit"],
        "Machine": results["machine"],
    }
    return "\n".join(f"- {name}: {value}" for name, value in facts.items())


def _variants(results: Results, with_seconds: bool) -> str:
    rows = results["variants"]
    runs = {row["variant"]: [run for run in results["runs"] if run["variant"] == row["variant"]] for row in rows}
    gain_p = dict(zip(runs, _corrected(map(_p_of_gain, runs.values())), strict=True))
    columns = {
        "variant": [f"`{row['variant']}`" for row in rows],
        "start, %": [f"{100 * row['start']['mean']:.1f}" for row in rows],
        "end, %": [_percent(row["final"]) for row in rows],
        "gain": [_points(row["improvement"]) for row in rows],
        "its p": [_p(gain_p[row["variant"]]) for row in rows],
        "environment steps": [f"{row['environment_steps']:,.0f}" for row in rows],
        "mean age": [f"{row['staleness_mean']:.1f}" for row in rows],
        "least ESS": [f"{row['ess_min']:.2f}" for row in rows],
        "truncated, %": [f"{100 * row['truncated_share']:.0f}" for row in rows],
    }
    if with_seconds:
        columns["seconds"] = [f"{fmean(run['curve'][SECONDS][-1] for run in runs[row['variant']]):.0f}" for row in rows]
    for key, head in (("collapsed", "collapsed"), ("gave_up", "gave up")):
        if any(row[key] for row in rows):
            columns[head] = [f"{row[key]}/{len(row['seeds'])}" for row in rows]
    return _table(list(columns), zip(*columns.values(), strict=True))


def _p_of_gain(runs: Sequence[Results]) -> float | None:
    """Return the p of paired t over the seeds, of the end against the start."""
    after, before = (
        np.array([run[when]["successes"] / run[when]["episodes"] for run in runs]) for when in ("final", "start")
    )
    tested = paired_test(after, before)
    return None if tested is None else tested.p


def _corrected(p_values: Iterable[float | None]) -> list[float | None]:
    """Return Holm's correction of those that there are, in their places."""
    uncorrected = list(p_values)
    corrected = iter(holm([p for p in uncorrected if p is not None]))
    return [None if p is None else next(corrected) for p in uncorrected]


def _contrasts(results: Results, note: Note) -> str:
    head = ["contrast", "at equal", "difference, points", "p"]
    rows = [contrast for axis in note.axes for contrast in results["contrasts"] if contrast["axis"] == axis]
    cells = [
        [_names(row), _place(row), _points((row["tested"] or {}).get("interval", row["difference"])), _p(row["p"])]
        for row in rows
    ]
    if note.share_of is not None:
        head.append(f"{_words(note.share_of)} to equal success, share")
        shares = {_names(row): row["end_cost"] for row in results["contrasts"] if row["axis"] == note.share_of}
        cells = [[*cell, _share(shares[cell[0]])] for cell in cells]
    if note.share_of == SECONDS:
        head.append("times as fast")
        cells = [[*cell, _speed_up(results["runs"], row)] for cell, row in zip(cells, rows, strict=True)]
    if note.axes == (END,):  # all at equal updates
        head[1:3] = ["difference at equal updates, points"]
        cells = [[name, *others] for name, _, *others in cells]
    return _table(head, cells)


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
    return f"`{contrast['variant']}`−`{contrast['against']}`" + (" (primary)" if contrast["primary"] else "")


def _place(contrast: Results) -> str:
    return "updates" if contrast["budget"] is None else f"{contrast['budget']:,.0f} {_words(contrast['axis'])}"


def _share(cost: Results) -> str:
    """Return a share of a cost with its interval; - where one arm has the success from the start, or never."""
    ratio, low, high = ("-" if cost[key] is None else f"{cost[key]:.2f}" for key in ("ratio", "low", "high"))
    return f"{ratio} ({low}, {high})"


RULES = ("rule", "steps per trained group", "steps per trained episode", "informative groups lost", "their variance")
"""Shares of what the runs spent, and of the variance of the returns of all informative groups."""
TASKS = ("scenario", "task", "n", "before RL, %", "after RL, %", "turns")


def _rules(results: Results) -> Iterator[list[str]]:
    for rule in results["rules"].values():
        costs = (f"{rule[key]:.2f}" for key in ("steps_per_group", "steps_per_episode"))
        yield [f"`{rule['rule']}`", *costs, f"{100 * rule['lost']:.0f} %", f"{rule['spread']:.2f}"]


def _tasks(tables: Results) -> Iterator[list[str]]:
    """Yield a row per task: Wilson's intervals over its episodes. A scenario is named once."""
    named = ""
    before, after = (tables[when]["blocks"][0]["rows"] for when in ("before", "after"))
    for one, other in zip(before, after, strict=True):
        rates = (
            f"{100 * row['success_rate']:.0f} ({100 * row['low']:.0f}, {100 * row['high']:.0f})" for row in (one, other)
        )
        yield [
            one["scenario"] if one["scenario"] != named else "",
            one["task"],
            f"{one['episodes']}",
            *rates,
            f"{one['turns_mean']:.1f}, {other['turns_mean']:.1f}",
        ]
        named = one["scenario"]


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


def _played(results: Results) -> Iterator[list[str]]:
    """Yield a row per variant and horizon, over the training episodes of all seeds.

    Repetitions are those of unsolved episodes.
    """
    for row in results["variants"]:
        for group in row["played"]:
            shares = {
                key: f"{100 * group[f'{key}_share']:.1f}" for key in ("solved", "truncated", "context", "repeated")
            }
            turns = f"{group['turns_per_solved']:.1f}, {group['turns_per_unsolved']:.1f}"
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


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
