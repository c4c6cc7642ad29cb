"""What the page shows besides episodes: state, headline, curves, evaluations, tickets, schedule and lineages.

Pure functions of the run directory's files. Whatever a run lacks is an empty list, and a sentence among the notices.
"""

import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.config.training import AdaptiveHorizon, StagedHorizon
from horizonrl.common.run_dir import EVALS, LEDGER, LINEAGES, METRICS
from horizonrl.common.types import DropReason, Kind, Phase
from horizonrl.learner.controller.horizon import horizon_turns
from horizonrl.ops.rundir.curves import Line, curves, evaluation_point
from horizonrl.ops.rundir.directory import model_label, to_toml
from horizonrl.ops.rundir.lines import read_lines
from horizonrl.ops.rundir.selection import tenths
from horizonrl.ops.terminal.figures import mean_success, percent

_PASSWORD = re.compile(r"://[^/@\s\"]*@")
"""The user and password in a broker's address, before its host."""


JOURNAL = (METRICS, LEDGER, EVALS, LINEAGES)
"""The files of a run's journal, as `Files` has them."""


@dataclass(frozen=True)
class Files:
    """The journal of a run directory, read."""

    metrics: Sequence[Line]
    ledger: Sequence[Line]
    evals: Sequence[Line]
    lineages: Sequence[Line]

    @classmethod
    def read(cls, run_dir: Path) -> "Files":
        return cls(*(read_lines(run_dir / name) for name in JOURNAL))

    @property
    def rl(self) -> list[Line]:
        return [line for line in self.metrics if line["phase"] == Phase.RL.value]


def facts(config: RunConfig, files: Files) -> dict[str, Any]:
    """Return what the page shows besides episodes, as JSON-able values."""
    return {
        "kind": "run",
        "name": config.run.name,
        "written": time.time(),
        "state": state(config, files),
        "headline": headline(files),
        "notices": notices(config, files),
        "curves": curves(files.metrics, files.evals),
        "resumes": [line["from_step"] for line in files.lineages if line["from_step"]],
        "imitation": max((line["step"] for line in files.metrics if line["phase"] == Phase.IMITATION.value), default=0),
        "evaluations": evaluations(files.evals),
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


class TicketEnd(NamedTuple):
    """What became of a ticket."""

    what: str
    step: int
    """The step that consumed it; for a held-out ticket, the version that was evaluated."""


def ends(files: Files) -> dict[str, TicketEnd]:
    """Return what became of each ticket that steps and evaluations have settled."""
    found: dict[str, TicketEnd] = {}
    for line in files.ledger:
        step = line["step"]
        found.update(
            (ticket, TicketEnd(f"trained into version {line['version']}", step)) for _, ticket in line["trained"]
        )
        found.update((ticket, TicketEnd(f"dropped: {reason}", step)) for _, ticket, reason in line["dropped"])
    for line in files.evals:
        version = line["version"]
        found.update((ticket, TicketEnd(f"evaluation of version {version}", version)) for _, ticket, _ in line["ends"])
    return found


def state(config: RunConfig, files: Files) -> dict[str, Any]:
    """Return whether the run was over when the page was written, and how far it was."""
    step, steps = (files.metrics[-1]["step"] if files.metrics else 0), config.total_steps
    # The last evaluation settles after the last step.
    finished = step >= steps and len(files.evals) >= config.eval_rounds
    return {
        "finished": finished,
        "step": step,
        "steps": steps,
        "started": files.lineages[0]["time"] if files.lineages else None,
        "last": files.metrics[-1]["time"] if files.metrics else None,
        "lineage": files.lineages[-1]["lineage"] if files.lineages else None,
    }


def headline(files: Files) -> list[dict[str, Any]]:
    """Return the few numbers that a person wants first, as {label, unit, value, note}. All are the policy's own."""
    numbers = []
    if files.evals:
        last = files.evals[-1]
        label = f"Success of version {last['version']}"
        numbers.append(
            {"label": label, "unit": "percent", "value": last["success_rate"], "note": held_out(files.evals)}
        )
    if rl := files.rl:
        early, late = rl[:5], rl[-5:]
        label = f"Training success, last {len(late)} steps"
        note = f"{percent(mean_success(early))} over the first {len(early)}"
        numbers.append({"label": label, "unit": "percent", "value": mean_success(late), "note": note})
        episodes, turns, generated, trained = (
            sum(line[key] for line in rl)
            for key in ("episodes", "environment_steps", "generated_tokens", "tokens_trained")
        )
        numbers.append({"label": "Episodes in RL", "unit": "count", "value": episodes, "note": f"{turns:,} turns"})
        note = f"{trained:,} trained in RL"
        numbers.append({"label": "Tokens generated in RL", "unit": "count", "value": generated, "note": note})
    if shown := [line for line in files.metrics if line["phase"] == Phase.IMITATION.value]:
        episodes, trained = (sum(line[key] for line in shown) for key in ("episodes", "tokens_trained"))
        note = f"an expert's: {trained:,} tokens trained"
        numbers.append({"label": "Demonstrations before RL", "unit": "count", "value": episodes, "note": note})
    return numbers


def held_out(evals: Sequence[Line]) -> str:
    """Return the note on the last evaluation's success: `held-out, up from 0 % (95 % CI 41-74)`."""
    first, last = evals[0], evals[-1]
    before, now = first["success_rate"], last["success_rate"]
    text = "held-out"
    if first is not last and before is not None and now is not None:
        way = "up from" if now > before else "down from" if now < before else "unchanged from"
        text += f", {way} {percent(before)}"
    text += f" (95\N{NO-BREAK SPACE}%\N{NO-BREAK SPACE}CI {100 * last['low']:.0f}-{100 * last['high']:.0f})"
    best = max(evals, key=lambda line: (line["success_rate"] or 0.0, line["version"]))
    if best is not last and (best["success_rate"] or 0.0) > (now or 0.0):
        text += f"; best, version {best['version']}: {percent(best['success_rate'])}"
    return text


def notices(config: RunConfig, files: Files) -> list[str]:
    """Return sentences on what a reader could miss or misread."""
    found = []
    if not files.metrics:
        found.append("No step has been taken yet: there is nothing to draw.")
    elif not files.rl:
        what = "has only imitation steps" if config.rl.steps == 0 else "has not reached its RL phase"
        found.append(
            f"The run {what}. Success and reward are those of the policy's own episodes, and there are none yet."
        )
    if not files.evals:
        why = "eval.every is 0" if config.eval.every == 0 else "no round was complete when the page was written"
        found.append(f"No evaluations: {why}.")
    unwritten = len(files.ledger) - len(files.metrics)
    if unwritten > 0:
        found.append(f"{unwritten} step of the ledger has no metrics: a learner is working on it, or was killed in it.")
    return found


def evaluations(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Return one row per evaluation: the whole, and each environment and category of tasks."""
    rows = []
    for line in lines:
        row = evaluation_point(line) | {
            "episodes": line["episodes"],
            "pass": line["pass_at"],
            "turns": line["turns_mean"],
        }
        row |= {"truncated": line["truncated_share"], "broken": line["broken"], "dropped": line["dropped"], "parts": []}
        for env, measured in line["environments"].items():
            for category, part in measured["categories"].items():
                row["parts"].append(
                    {
                        "name": f"{env} {category}",
                        **{key: part[key] for key in ("success_rate", "low", "high", "episodes")},
                    }
                )
        rows.append(row)
    return rows


def ticket_accounts(files: Files) -> dict[str, Any]:
    """Return how every ticket ended, by kind, and whether the last step's own count agrees: each ticket ends once."""
    counts: dict[str, Counter[str]] = {kind.value: Counter() for kind in Kind}
    step = files.metrics[-1]["step"] if files.metrics else 0
    later = 0
    for line_step, ticket, end in _ends(files):
        counts[ticket.partition("-")[0]][end] += 1
        # The ledger may be a step ahead of the metrics, whose counts of tickets the check below uses.
        later += line_step > step
    settled = sum(count.total() for count in counts.values())
    accounts: dict[str, Any] = {"kinds": counts, "settled": settled, "step": step}
    accounts["reasons"] = [
        reason.value for reason in DropReason if any(count[reason.value] for count in counts.values())
    ]
    accounts["repeats"] = sum(line["repeats"] for line in files.ledger)
    if files.metrics:
        last = files.metrics[-1]
        accounts |= {"issued": last["tickets_issued"], "outstanding": last["tickets_outstanding"], "later": later}
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
                        {"env_id": env.id, "phase_step": step, "from_turns": before, "to_turns": now, "reason": reason}
                    )
    return [
        dict(decision)
        | {"step": decision["phase_step"] + config.imitation.steps, "first_step": _first_step(files, decision)}
        for decision in made
    ]


def draws(files: Files) -> list[dict[str, Any]]:
    """Return what an adaptive curriculum drew: each place with its shares after the first and the last RL step."""
    lines = [line.get("curriculum", ()) for line in files.rl]
    if not lines or not lines[-1]:  # uniform, at least by now
        return []
    begun = next(line for line in lines if line)
    first, last = ({(one["env_id"], one["category"]): one for one in line} for line in (begun, lines[-1]))
    return [{**one, "first": first[name]["share"] if name in first else None} for name, one in last.items()]


def lineages(files: Files) -> list[dict[str, Any]]:
    """Return each start of a learner, its steps that were not rolled back, and what it changed in the config."""
    steps: dict[int, list[int]] = defaultdict(list)
    for line in files.ledger:
        steps[line["lineage"]].append(line["step"])
    return [
        {**line, "first": min(steps[line["lineage"]], default=None), "last": max(steps[line["lineage"]], default=None)}
        for line in files.lineages
    ]


def summary(config: RunConfig) -> list[list[str]]:
    """Return the config in a few lines, as [what, how]."""
    envs = ", ".join(f"{env.id} ({', '.join(env.categories)})" if env.categories else env.id for env in config.envs)
    schedule = ", ".join(map(str, config.horizon.horizons))
    return [
        ["Model", model_label(config)],
        ["Environments", envs],
        ["Horizon", f"{config.horizon.kind}: {schedule} turns"],
        ["Steps", f"{config.imitation.steps} imitation, {config.rl.steps} RL"],
        ["Batch", f"{config.rl.groups_per_step} groups of {config.rollout.group_size} episodes per step"],
        ["Staleness", f"at most {config.rl.max_staleness} versions; late groups: {config.rl.stale}"],
        ["Objective", f"{config.advantage.kind} advantage, {config.loss.kind} loss, learning rate {config.rl.lr:g}"],
        ["Actors", f"{config.actor.count} x {config.actor.slots} episodes at once, {config.actor.engine}"],
        ["Seed", str(config.run.seed)],
    ]


def _ends(files: Files) -> Iterator[tuple[int, str, str]]:
    """Yield the step in whose making each ticket ended, the ticket, and its end."""
    for line in files.ledger:
        yield from ((line["step"], ticket, "trained") for _, ticket in line["trained"])
        yield from ((line["step"], ticket, reason) for _, ticket, reason in line["dropped"])
        yield from ((line["step"], ticket, "void") for _, ticket in line["voids"])
    for line in files.evals:
        yield from ((line["settled_step"], ticket, end) for _, ticket, end in line["ends"])


def _first_step(files: Files, decision: Line) -> int | None:
    env_id, before, now = decision["env_id"], decision["from_turns"], decision["to_turns"]
    turns = ((line["step"], line["horizons"].get(env_id)) for line in files.rl)
    reached = (step for step, had in turns if had is not None and (had >= now if now > before else had <= now))
    return next(reached, None)
