"""The facts of a run's page as JSON-able values: numbers, curves, evaluations, accounts, schedule and lineages.

Pure functions of a run's view. Whatever a run lacks is an empty list, and a sentence among the notices.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.config.training import AdaptiveHorizon, StagedHorizon
from horizonrl.common.types import DropReason
from horizonrl.learner.controller.horizon import horizon_turns
from horizonrl.ops.report.curves import curves
from horizonrl.ops.rundir.directory import model_label, to_toml
from horizonrl.ops.rundir.files import Files, Line, Stage, evaluated_split
from horizonrl.ops.rundir.trained_by_duration import tenths
from horizonrl.ops.rundir.view import RunView
from horizonrl.ops.terminal.figures import count_noun, mean_return, number, percent

_PASSWORD = re.compile(r"://[^/@\s\"]*@")
"""The user and password in a broker's address, before its host."""
NARROW = "\N{NO-BREAK SPACE}"


def facts(view: RunView, config: RunConfig) -> dict[str, Any]:
    """Return what the page shows besides episodes, as JSON-able values."""
    files = view.files
    return {
        "kind": "run",
        "name": config.run.name,
        "written": view.now,
        "state": state(view),
        "headline": headline(view),
        "notices": [*notices(config, files), *_tests(view)],
        "curves": curves(files.metrics, files.evals, view.stages),
        "resumes": [line["from_step"] for line in files.lineages if line["from_step"]],
        "imitation": files.imitation_steps,
        "evaluations": [evaluation_row(line) for line in files.evals],
        "accounts": ticket_accounts(files),
        "decisions": decisions(config, files),
        "draws": draws(files),
        "selection": [asdict(tenth) | {"share": tenth.share} for tenth in tenths(files.metrics)],
        "lineages": lineages(files),
        # `to_toml` leaves out the password's key. This is for one in an address, should any get there: the page is
        # shared.
        "config": _PASSWORD.sub("://", to_toml(config)),
        "summary": summary(config),
    }


def state(view: RunView) -> dict[str, Any]:
    """Return whether the run was over when the page was written, and how far it was."""
    metrics, starts = view.files.metrics, view.files.lineages
    return {
        "finished": view.finished,
        "step": view.step,
        "steps": view.steps,
        "started": starts[0]["time"] if starts else None,
        "last": metrics[-1]["time"] if metrics else None,
    }


def headline(view: RunView) -> list[dict[str, Any]]:
    """Return the few numbers that a person wants first: held-out success, then those of the policy, then the expert's.

    Each has a label, a unit, a value and a note.
    """
    files, tiles = view.files, []
    if stages := view.stages:
        last = stages[-1]
        tiles.append(
            _tile(
                f"Success {last.label}",
                last.line["success_rate"],
                held_out(stages, files),
                "percent",
            )
        )
    if rl := files.rl:
        success, reward = files.success, files.reward
        note = f"{percent(success.first)} over the first {success.steps}"
        tiles.append(
            _tile(f"Training success, last {success.steps} steps", success.last, note, "percent")
        )
        if reward != success:
            note = f"{number(reward.first)} over the first {reward.steps}"
            label = f"Training reward, last {reward.steps} steps"
            tiles.append(_tile(label, reward.last, note, "number"))
        tiles.append(
            _tile(
                "Episodes in RL",
                _total(rl, "episodes"),
                f"{_total(rl, 'environment_steps'):,} turns",
            )
        )
        note = f"{_total(rl, 'tokens_trained'):,} trained in RL"
        tiles.append(_tile("Tokens generated in RL", _total(rl, "generated_tokens"), note))
    if imitation := files.imitation:
        note = f"an expert's: {_total(imitation, 'tokens_trained'):,} tokens trained"
        tiles.append(_tile("Demonstrations before RL", _total(imitation, "episodes"), note))
    return tiles


def _tile(label: str, value: float | None, note: str, unit: str = "count") -> dict[str, Any]:
    return {"label": label, "unit": unit, "value": value, "note": note}


def _total(lines: list[Line], key: str) -> int:
    return sum(line[key] for line in lines)


def held_out(stages: list[Stage], files: Files) -> str:
    """Return the note on the last stage's success: `validation; 0 % before training, ... (...)`."""
    *earlier, (_, _, last) = stages
    split = evaluated_split(last)
    text = "; ".join(filter(None, [split, mean_return(last), ", ".join(map(str, earlier))]))
    text += f" (95{NARROW}%{NARROW}CI {100 * last['low']:.0f}-{100 * last['high']:.0f})"
    best = max(files.evals, key=lambda line: (line["success_rate"] or 0.0, line["version"]))
    if best is not last and (best["success_rate"] or 0.0) > last["success_rate"]:
        text += f"; best, version {best['version']}: {percent(best['success_rate'])}"
    return text


def _tests(view: RunView) -> Iterator[str]:
    """Yield how often test tasks were played, if they were."""
    if view.tests:
        times = count_noun(view.tests, "time")
        yield f"The split test was played {times}. A choice by it flatters its numbers."


def notices(config: RunConfig, files: Files) -> Iterator[str]:
    """Yield sentences on what a reader could miss or misread."""
    if not files.metrics:
        yield "No step has been taken yet: there is nothing to draw."
    elif not files.rl:
        phase = (
            "has only imitation steps" if config.rl.steps == 0 else "has not reached its RL phase"
        )
        yield f"The run {phase}. Success and reward are those of the policy's own episodes, and there are none yet."
    if not files.evals:
        why = (
            "eval.every is 0"
            if config.eval.every == 0
            else "no round was complete when the page was written"
        )
        yield f"No evaluations: {why}."
    unwritten = len(files.ledger) - len(files.metrics)
    if unwritten > 0:
        yield f"{unwritten} step of the ledger has no metrics: a learner is working on it, or was killed in it."


def evaluation_row(line: Line) -> dict[str, Any]:
    """Return an evaluation's row: the whole, and each environment and category of tasks."""
    keys = ("success_rate", "low", "high", "episodes")
    return {
        "version": line["version"],
        "value": line["success_rate"],
        **{key: line[key] for key in ("low", "high", "episodes", "broken", "dropped")},
        "pass": line["pass_at"],
        "return": line.get("return_mean"),
        "turns": line["turns_mean"],
        "truncated": line["truncated_share"],
        "parts": [
            {"name": f"{env} {category}"} | {key: part[key] for key in keys}
            for env, measured in line["environments"].items()
            for category, part in measured["categories"].items()
        ],
    }


def ticket_accounts(files: Files) -> dict[str, Any]:
    """Return how every ticket ended, by kind, and whether the last step's own count agrees: each ticket ends once."""
    counts = files.end_counts()
    settled = sum(count.total() for count in counts.values())
    accounts: dict[str, Any] = {
        "kinds": {kind.value: count for kind, count in counts.items()},
        "settled": settled,
        "step": files.step,
        "reasons": [
            reason.value for reason in DropReason if any(count[reason] for count in counts.values())
        ],
        "repeats": sum(line["repeats"] for line in files.ledger),
    }
    if files.metrics:
        last = files.metrics[-1]
        # The ledger may be a step ahead of the metrics, whose counts of tickets the check uses.
        later = sum(end.step > files.step for end in files.ends())
        accounts |= {
            "issued": last["tickets_issued"],
            "outstanding": last["tickets_outstanding"],
            "later": later,
        }
        accounts["open"] = last["tickets_issued"] - last["tickets_outstanding"] - (settled - later)
    return accounts


def decisions(config: RunConfig, files: Files) -> list[dict[str, Any]]:
    """Return each change of a horizon: when it was decided, and the first step that consumed a group under it."""
    rl_steps = len(files.rl)
    made = []
    schedule = config.horizon
    if isinstance(schedule, AdaptiveHorizon):
        made = [growth for line in files.rl for growth in line["growths"]]
    # With shuffled, every ticket has its own; fixed never changes.
    elif isinstance(schedule, StagedHorizon) and schedule.kind != "shuffled":
        for env in config.envs:
            horizons = config.horizons(env.id)
            turns = [horizon_turns(schedule, horizons, step) for step in range(rl_steps + 1)]
            for step, (before, now) in enumerate(pairwise(turns), 1):
                if now != before:
                    reason = f"{schedule.kind}, {schedule.steps_per_stage} steps per stage"
                    made.append(
                        {
                            "env_id": env.id,
                            "phase_step": step,
                            "from_turns": before,
                            "to_turns": now,
                            "reason": reason,
                        }
                    )
    return [
        dict(decision)
        | {
            "step": decision["phase_step"] + config.imitation.steps,
            "first_step": _first_step(files, decision),
        }
        for decision in made
    ]


def draws(files: Files) -> list[dict[str, Any]]:
    """Return what an adaptive curriculum drew: each source with its shares after the first and the last RL step."""
    lines = [line.get("curriculum", ()) for line in files.rl]
    if not lines or not lines[-1]:  # uniform, at least by now
        return []
    first = {
        (draw["env_id"], draw["category"]): draw["share"] for draw in next(filter(None, lines))
    }
    return [{**draw, "first": first.get((draw["env_id"], draw["category"]))} for draw in lines[-1]]


def lineages(files: Files) -> list[dict[str, Any]]:
    """Return each start of a learner, its steps that were not rolled back, and what it changed in the config."""
    steps: dict[int, list[int]] = defaultdict(list)
    for line in files.ledger:
        steps[line["lineage"]].append(line["step"])
    return [
        {
            **line,
            "first": min(steps[line["lineage"]], default=None),
            "last": max(steps[line["lineage"]], default=None),
        }
        for line in files.lineages
    ]


def summary(config: RunConfig) -> list[list[str]]:
    """Return the config in a few lines, as [what, how]."""
    envs = ", ".join(
        f"{env.id} ({', '.join(env.categories)})" if env.categories else env.id
        for env in config.envs
    )
    schedule = ", ".join(map(str, config.horizon.horizons))
    return [
        ["Model", model_label(config)],
        ["Environments", envs],
        ["Horizon", f"{config.horizon.kind}: {schedule} turns"],
        ["Steps", f"{config.imitation.steps} imitation, {config.rl.steps} RL"],
        [
            "Batch",
            f"{config.rl.groups_per_step} groups of {config.rollout.group_size} episodes per step",
        ],
        [
            "Staleness",
            f"at most {config.rl.max_staleness} versions; late groups: {config.rl.stale}",
        ],
        [
            "Objective",
            f"{config.advantage.kind} advantage, {config.loss.kind} loss, learning rate {config.rl.lr:g}",
        ],
        [
            "Actors",
            f"{config.actor.count} x {config.actor.slots} episodes at once, {config.actor.engine}",
        ],
        ["Seed", str(config.run.seed)],
    ]


def _first_step(files: Files, decision: Line) -> int | None:
    env_id, before, now = decision["env_id"], decision["from_turns"], decision["to_turns"]
    turns = ((line["step"], line["horizons"].get(env_id)) for line in files.rl)
    reached = (
        step
        for step, had in turns
        if had is not None and (had >= now if now > before else had <= now)
    )
    return next(reached, None)
