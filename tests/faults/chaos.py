"""`python -m tests.faults chaos`: kill, stop, delay and repeat at random, then see that nothing is lost or done twice.

A seeded plan (`plan.py`, `storm.py`) disturbs a real run of every role. The run then finishes by itself and is judged
by what it left behind (`ops/history/verify.py`). Last, `horizonrl history replay` trains the same log once more without
any disturbance and has to get the same weights in every step.
"""

import asyncio
import json
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from horizonrl.common.errors import HorizonError, RunFailed
from horizonrl.common.logs import last_lines
from horizonrl.common.processes import Child, horizonrl_command
from horizonrl.ops.history.verify import Verdict, gather, judge
from horizonrl.ops.rundir.files import Files
from horizonrl.ops.terminal.console import plain_console
from tests.faults.cluster import Cluster, cluster, workplace
from tests.faults.damage import MOST_STEPS
from tests.faults.plan import make_plan
from tests.faults.storm import Storm
from tests.faults.witness import Witness

LAST_STEPS = 10
"""RL steps at the end of the run, without disturbance."""
FINISH_S = 300.0
REPLAY_S = 1_800.0
MOST_CUT = 3 * MOST_STEPS
"""Steps that may be lost with a store that goes back: it waits for up to MOST_STEPS, and more are taken meanwhile."""


@dataclass(frozen=True, slots=True)
class ChaosRequest:
    kills: int
    """Number of events."""
    seed: int
    servers: int = 1
    """Servers of the broker; with several, each holds a copy of every stream."""
    overrides: Sequence[str] = ()


def run(request: ChaosRequest, json_file: Path | None = None, directory: Path | None = None) -> int:
    """Fire the events at a run. Return 0 if it passes; otherwise print where its files are and return 1."""
    console, servers = plain_console(), request.servers
    with workplace("chaos", directory) as place:
        what = f"{request.kills} events with seed {request.seed} on {servers} server{'s' if servers > 1 else ''}"
        console.print(f"chaos: {what} in {place}", soft_wrap=True)
        report = uvloop.run(_chaos(request, place, console))
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    console.print(_table(report))
    for finding in report["findings"]:
        console.print(finding, style="red", highlight=False, soft_wrap=True)
    if not report["passed"]:
        console.print(
            f"the run, its logs and its broker's files are kept in {place}", soft_wrap=True
        )
    elif directory is None:
        shutil.rmtree(place)
    return 0 if report["passed"] else 1


async def _chaos(request: ChaosRequest, place: Path, console: Console) -> dict[str, Any]:
    started, seed = time.monotonic(), request.seed
    plan = make_plan(request.kills, seed, request.servers)
    # The verdict and the replay read every entry. By default a run frees the log below its oldest checkpoint.
    # And a replay goes on behind a part of the log that the broker has lost, from the checkpoint that a learner did.
    settings = ["--learner.keep_log=true", "--learner.keep_checkpoints=1000", *request.overrides]
    if request.servers > 1:
        settings.append(f"--broker.nats.replicas={request.servers}")
    async with cluster("chaos", place, seed, settings) as whole:
        findings: list[str] = []
        witness = Witness()
        storm = Storm(
            whole, plan, lambda line: console.print(line, highlight=False, soft_wrap=True), witness
        )
        try:
            async with witness.watching(
                whole.config.broker.model_copy(update={"url": whole.servers.url})
            ):
                await storm.rage()
                await finish(whole, settings)
        except* HorizonError as failures:
            # A run that does not finish is judged all the same: what it left behind says why.
            findings = [f"unfinished: {failure}" for failure in failures.exceptions]
        files = Files.read(whole.config.run_dir)
        evidence = await gather(whole.config, files, whole.transport)
        verdict = judge(evidence)
        spans = evidence.comparable()
        replay = await replayed(whole, spans)
        findings += [*storm.findings, *verdict.findings, *witness.findings()]
        compared = sum(to - after for after, to in spans)
        if (cut := verdict.steps - compared) > MOST_CUT * storm.stores_back:
            findings.append(
                f"the log lacks {cut} steps, more than {storm.stores_back} stores that went back explain"
            )
        if not replay["equal"]:
            findings.append(
                f"replay: {replay.get('error', 'an undisturbed run over the same log has other digests')}"
            )
        elif len(replay["steps"]) != compared:
            # Digests that were never compared would otherwise pass as equal.
            findings.append(f"replay: {len(replay['steps'])} of {compared} steps were compared")
        return {
            "passed": not findings,
            "seed": seed,
            "servers": request.servers,
            **storm.counts(),
            **_counts(verdict),
            "acknowledged": len(witness.acknowledged),
            "acknowledged_lost": witness.lost,
            "acknowledged_doubled": witness.doubled,
            "digest_equal": replay["equal"],
            "digests_compared": len(replay.get("steps", ())),
            "stores_back": storm.stores_back,
            "learner_restarts": whole.roles["learner"].restarts,
            "crashes": {name: role.crashes for name, role in whole.roles.items() if role.crashes},
            "wall_s": round(time.monotonic() - started, 1),
            "findings": findings,
        }


async def finish(whole: Cluster, settings: Sequence[str]) -> None:
    """Let the run take LAST_STEPS more steps undisturbed, until every role has ended by itself with code 0.

    Raises RunFailed if the run does not end in time, or if a role fails before.
    """
    step = whole.last_step
    await whole.until(
        "a step after the last event", lambda: whole.last_step > step and whole.serving, FINISH_S
    )
    # Earlier crashes may be the work of events, such as a fence. From here on nothing excuses one.
    crashes = whole.crashes
    for name in ("controller", "learner"):
        whole.roles[name].signal(signal.SIGTERM)
    await whole.ended("controller", "learner", timeout_s=FINISH_S)
    # Counted from the furthest step of any learner: its tickets were issued, and a shorter run would leave them open.
    rl_steps = whole.furthest_step - whole.config.imitation.steps + LAST_STEPS
    for name in ("controller", "learner"):
        whole.start(name, *settings, f"--rl.steps={rl_steps}")
    await whole.ended(*whole.roles, timeout_s=FINISH_S)
    if whole.crashes > crashes:
        raise RunFailed(
            f"{whole.crashes - crashes} roles failed after the last event; see {whole.directory / 'logs'}"
        )


async def replayed(whole: Cluster, spans: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Train the log once more with `horizonrl history replay`, span by span (after, to); return its reports as one."""
    steps: list[Any] = []
    for after, to in spans:
        report = await _replayed(whole, after, to)
        if not report["equal"]:
            return report | {"steps": steps}
        steps += report["steps"]
    return {"equal": True, "steps": steps}


async def _replayed(whole: Cluster, after: int, to: int) -> dict[str, Any]:
    answer, log_file = (
        whole.directory / f"replay-{after}.json",
        whole.directory / "logs" / f"replay-{after}.log",
    )
    # Past the proxies: nothing disturbs the replay.
    past = f"--broker.url={whole.servers.direct_url}"
    words = (
        "history",
        "replay",
        str(whole.config.run_dir),
        "--from",
        str(after),
        "--to",
        str(to),
        "--json",
        str(answer),
        past,
    )
    replay = Child(horizonrl_command(*words), log_file, stop_within_s=0)
    await replay.start()
    try:
        code = await asyncio.wait_for(replay.wait(), REPLAY_S)
    except TimeoutError:
        await replay.stop()
        return {"equal": False, "error": f"it took longer than {REPLAY_S} s"}
    if not answer.exists():
        return {"equal": False, "error": f"it ended with code {code}:\n{last_lines(log_file)}"}
    report: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return report


def _counts(verdict: Verdict) -> dict[str, Any]:
    return {
        "issued": verdict.issued,
        "trained": verdict.trained,
        "evaluated": verdict.evaluated,
        "dropped": verdict.dropped,
        "void": verdict.void,
        "repeats": verdict.repeats,
        "steps": verdict.steps,
        "lineages": verdict.lineages,
        "lost": len(verdict.lost),
        "doubled": len(verdict.doubled),
        "staleness_violations": len(verdict.staleness_violations),
        "horizon_violations": len(verdict.horizon_violations),
        "ledger_consistent": not verdict.ledger_violations,
    }


def _table(report: dict[str, Any]) -> Table:
    table = Table("chaos", "", title="passed" if report["passed"] else "FAILED")
    for key, value in report.items():
        if key not in ("passed", "findings"):
            shown = (
                ", ".join(f"{name} {count}" for name, count in value.items())
                if isinstance(value, dict)
                else value
            )
            table.add_row(key.replace("_", " "), str(shown))
    return table
