"""What `horizonrl status` shows of a run: one screen of a terminal, a line for a log, or JSON."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from horizonrl.common.state import Outcomes
from horizonrl.common.types import Phase, PolicyVersion
from horizonrl.learner.controller.curriculum import REPEATED_LABEL
from horizonrl.ops.rundir.broker_status import BrokerStatus
from horizonrl.ops.rundir.files import Line, evaluated_split
from horizonrl.ops.rundir.view import RunView
from horizonrl.ops.terminal.figures import (
    count_noun,
    duration,
    interval,
    mean_return,
    number,
    percent,
    sparkline,
)

TREND = 24
"""Width of a trend, in characters."""
MOST_DRAWS = 4
"""Most categories that one screen names; the report has more."""
MOST_TROUBLES = 5
TITLE = "bold cyan"
WIDEST = 110
"""Columns beyond which a line is no longer read at a glance."""
EVAL_KEYS = ("version", "success_rate", "low", "high", "episodes")

Rows = Iterator[tuple[str, str]]
"""Subject and text of each line."""


def screen(view: RunView) -> RenderableType:
    """Return one screen of a terminal of 80 columns and 24 lines, as long as little breaks."""
    parts: list[RenderableType] = [Text(headline(view), style="bold")]
    if view.steps:
        bar = Table.grid(padding=(0, 1, 0, 0))
        bar.add_row(
            ProgressBar(total=view.steps, completed=view.step, width=60), percent(view.share)
        )
        parts.append(bar)
    parts.append(_section("is it learning", learning(view)))
    if rows := list(moving(view)):
        parts.append(_section("is it moving", iter(rows)))
    if waits := waiting(view):
        parts.append(_list("what waits for what", waits))
    broken = view.broken()
    more = [f"and {len(broken) - MOST_TROUBLES} more"] if len(broken) > MOST_TROUBLES else []
    shown = [*broken[:MOST_TROUBLES], *more]
    parts.append(
        _list("what broke", shown, "yellow") if shown else _list("what broke", ["nothing"])
    )
    return Group(*parts)


def plain_line(view: RunView) -> str:
    """Return the headline and what is waited for in a line, for a log."""
    return "; ".join([headline(view), *waiting(view)])


def headline(view: RunView) -> str:
    """Return run, step and time left in one line."""
    total = "" if view.steps is None else f" of {view.steps}"
    phase_step = f" {view.progress.phase_step}" if view.progress else ""
    phase = f" ({view.phase}{phase_step})" if view.phase else ""
    remaining = f", {view.time_left}" if view.time_left and view.state == "running" else ""
    return f"{view.name}: {view.state}, step {view.step}{total}{phase}{remaining}"


def waiting(view: RunView) -> list[str]:
    """Return who waits for what, and which checkpoint is being written."""
    checkpoint = view.checkpoint() if view.broker else None
    return [*view.waits(), *([checkpoint] if checkpoint else [])]


def learning(view: RunView) -> Rows:
    """Yield what the last steps and evaluations came to."""
    files = view.files
    if not files.metrics:
        elsewhere = "only the learner's machine knows: run `horizonrl status RUN_DIR` there"
        yield "success", "no step yet" if view.run_dir else elsewhere
    elif files.rl:
        yield from _rl(view)
    else:
        losses = [line["loss"] for line in files.metrics]
        yield "loss", f"{number(losses[-1], 3)}  {sparkline(losses, TREND)}  of the demonstrations"
    if files.evals:
        last = files.evals[-1]
        trend = sparkline([line["success_rate"] for line in files.evals], TREND, 0.0, 1.0)
        played = f"{last['episodes']} {evaluated_split(last)} episodes"
        earned = f", {mean_return(last)}" if mean_return(last) else ""
        yield "eval", f"{interval(last)} at version {last['version']}, {played}{earned}"
        if len(files.evals) > 1:
            yield "", trend
            yield "", view.gain
    if view.tests:
        yield "test split", f"played {count_noun(view.tests, 'time')}"
    yield from _horizons(view)
    drawn = files.metrics[-1].get("curriculum", ()) if files.metrics else ()
    for index, share in enumerate(drawn[:MOST_DRAWS]):
        yield "" if index else "draws", _draw(share)


def _rl(view: RunView) -> Rows:
    lines, success, reward = view.files.rl, view.files.success, view.files.reward
    rates, rewards = (
        [line["success_rate"] for line in lines],
        [line["reward_mean"] for line in lines],
    )
    # Success is drawn from 0 to 1. A reward has no known range and takes that of its own values.
    texts = {
        "success": f"{percent(rates[-1]):>5}  {sparkline(rates, TREND, 0.0, 1.0)}",
        "reward": f"{number(rewards[-1]):>5}  {sparkline(rewards, TREND)}",
    }
    if len(lines) > success.steps:
        recent = f"in {success.steps} steps"
        texts["success"] += f"  {percent(success.last)} {recent}, {percent(success.first)} at first"
        texts["reward"] += f"  {number(reward.last)} {recent}, {number(reward.first)} at first"
    yield from texts.items()


def _horizons(view: RunView) -> Rows:
    text = ", ".join(f"{env} {count} turns" for env, count in view.horizons.items())
    if view.files.metrics:
        last = view.files.metrics[-1]
        text += (
            f"; {number(last['turns_mean'], 1)} taken, {percent(last['truncated_share'])} truncated"
        )
    if text:
        yield "horizon", text
    for growth in view.progress.growths if view.progress else ():
        why = f"{growth.from_turns} to {growth.to_turns} turns after {growth.phase_step} RL steps: {growth.reason}"
        yield "", f"{growth.env_id} grew from {why}"


def _draw(share: Line) -> str:
    """Return what an adaptive curriculum draws next, and why."""
    is_repeated = share["category"] == REPEATED_LABEL
    name = (
        f"{count_noun(share['tasks'], 'task')} that differed" if is_repeated else share["category"]
    )
    why = (
        "none seen yet"
        if share["differed"] is None
        else f"{percent(share['differed'])} of groups differ"
    )
    return f"{percent(share['share']):>5}  {share['env_id']}, {name} ({why})"


def moving(view: RunView) -> Rows:
    """Yield how fast the run is, how old its data is, and what became of its tickets."""
    if view.files.metrics:
        last = view.files.metrics[-1]
        timed = f"{number(last['step_s'], 1)} s and {number(last['wait_s'], 1)} s of waiting"
        yield (
            "pace",
            f"step {last['step']} ended {duration(view.now - last['time'])} ago; it took {timed}",
        )
        generated, trained = (
            number(last[f"{what}_tokens_per_s"], 0) for what in ("generated", "train")
        )
        yield "tokens/s", f"{generated} generated, {trained} trained"
        if last["phase"] == Phase.RL.value:
            bound = f" (at most {view.config.rl.max_staleness})" if view.config else ""
            stale = f"mean {number(last['staleness_mean'], 1)}, max {last['staleness_max']}{bound}"
            yield "stale by", f"{stale} versions; effective sample size {percent(last['ess'])}"
    if view.broker is not None and view.progress is not None:
        yield "learner", _learner(view.broker, view.progress.policy)
    for kind, text in view.accounts():
        yield f"{kind.value} tickets", text


def _learner(broker: BrokerStatus, policy: PolicyVersion) -> str:
    resumed = f", lineage {policy.lineage}" if policy.lineage else ""
    weights = ""
    if broker.weights is not None:
        size = f"{broker.weights.weights_bytes / 1e6:.0f} MB"
        weights = f"; published weights: version {broker.weights.policy.version} ({size})"
    return (
        f"version {policy.version}{resumed}, last report {duration(broker.silent_s)} ago{weights}"
    )


def as_json(view: RunView) -> dict[str, Any]:
    """Return a run for programs: numbers, and the sentences on waits and troubles."""
    files = view.files
    return {
        "run": view.name,
        "state": view.state,
        "step": view.step,
        "steps": view.steps,
        "phase": view.phase,
        "seconds_left": view.seconds_left,
        "success_recent": files.success.last,
        "success_first": files.success.first,
        "stages": [{"stage": stage.label} | _eval_json(stage.line) for stage in view.stages],
        "last_step": files.metrics[-1] if files.metrics else None,
        "last_eval": _eval_json(files.evals[-1]) if files.evals else None,
        "tests": view.tests,
        "broker": _broker_json(view.broker) if view.broker else None,
        "waits": waiting(view),
        "broke": view.broken(),
        "troubles": [
            {
                "part": trouble.part,
                "event": trouble.event,
                "count": trouble.count,
                "last": trouble.last,
                "log": str(trouble.log_file),
            }
            for trouble in view.troubles
        ],
        "time": view.now,
    }


def _eval_json(line: Line) -> dict[str, Any]:
    return {key: line[key] for key in EVAL_KEYS}


def _broker_json(broker: BrokerStatus) -> dict[str, Any]:
    progress = broker.progress
    return {
        "version": progress.policy.version if progress else None,
        "lineage": progress.policy.lineage if progress else None,
        "learner_heard_at": broker.reported_at,
        "weights_version": broker.weights.policy.version if broker.weights else None,
        "horizons": broker.horizons,
        "tickets": {
            kind.value: {"issued": issued, "outstanding": broker.outstanding(kind)}
            | broker.outcomes.get(kind, Outcomes()).model_dump(mode="json")
            for kind, issued in broker.issued.items()
        },
        "tickets_queued": broker.queue.waiting,
        "tickets_leased": broker.queue.leased,
        "actors_idle": broker.queue.idle,
        "groups_last_sequence": broker.log.last_sequence,
        "groups_unread": broker.unread,
        "groups_bytes": broker.log.stored_bytes,
        "batch": broker.batch,
        "dead_letters": broker.dead,
    }


def _section(title: str, rows: Rows) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(max_width=WIDEST, overflow="fold")
    for subject, text in rows:
        table.add_row(f"  {subject}", Text(text))
    return Group(Text(title, style=TITLE), table)


def _list(title: str, lines: Sequence[str], style: str = "") -> RenderableType:
    return Group(
        Text(title, style=TITLE),
        *(Padding(Text(line, style=style), (0, 0, 0, 2)) for line in lines),
    )
