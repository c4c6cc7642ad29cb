"""`horizonrl status`: where a run stands, from its directory, its broker, or both."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from horizonrl.broker.access import Role
from horizonrl.broker.api import Key, Transport
from horizonrl.broker.connect import connect
from horizonrl.broker.state import StateStore
from horizonrl.broker.tickets import TicketQueue
from horizonrl.common.config import RunConfig
from horizonrl.common.errors import BrokerUnreachable, ConfigError
from horizonrl.common.types import HorizonState, Kind, Progress, WeightsManifest
from horizonrl.ops.console import interval, number, percent
from horizonrl.ops.rundir import ADDRESS, EVALS, METRICS, read_config, read_lines

REFRESH_S = 2.0


def show_status(run_dir: Path | None, run: str | None, overrides: Sequence[str], *, watch: bool) -> int:
    """Print the table of a run once, or keep it up to date."""
    config = _config(run_dir, run, overrides)
    if not watch:
        Console().print(asyncio.run(_table(config, run_dir)))
        return 0
    with Live(auto_refresh=False) as live:
        while True:
            live.update(asyncio.run(_table(config, run_dir)), refresh=True)
            time.sleep(REFRESH_S)


def _config(run_dir: Path | None, run: str | None, overrides: Sequence[str]) -> RunConfig:
    if run_dir is not None:
        config = read_config(run_dir)
        address = run_dir / ADDRESS
        if config.broker.url is None and address.exists():
            return config.model_copy(
                update={"broker": config.broker.model_copy(update={"url": address.read_text().strip()})}
            )
        return config
    named = [f"--run.name={run}"] if run else []
    config = RunConfig.load([], [*named, *overrides])
    if run is None or config.broker.url is None:
        raise ConfigError("which run? Give its directory, or --broker.url nats://HOST:PORT --run NAME")
    return config


async def _table(config: RunConfig, run_dir: Path | None) -> Table:
    table = Table(title=f"run {config.run.name}", title_justify="left", show_header=False)
    if config.broker.url is not None:
        settings = config.broker.model_copy(update={"connect_timeout_s": min(config.broker.connect_timeout_s, 2.0)})
        try:
            transport = await connect(config.run.name, settings, Role.MONITOR)
        except BrokerUnreachable:
            if run_dir is None:
                raise
            table.add_row("broker", f"not running ({config.broker.url})")
        else:
            try:
                await add_broker_rows(table, transport)
            finally:
                await transport.close()
    if run_dir is not None:
        _add_journal_rows(table, run_dir)
    return table


async def add_broker_rows(table: Table, transport: Transport) -> None:
    state, queue = StateStore(transport), TicketQueue(transport)
    progress = await state.get(Key.PROGRESS)
    if not isinstance(progress, Progress):
        table.add_row("progress", "no learner has been here yet")
        return
    of = "finished" if progress.finished else progress.phase.value
    table.add_row("step", f"{progress.step} ({of}, step {progress.phase_step} of the phase)")
    table.add_row("learner", f"version {progress.policy.version}, lineage {progress.policy.lineage}")
    if isinstance(policy := await state.get(Key.POLICY), WeightsManifest):
        table.add_row("weights", f"version {policy.policy.version}, {policy.weights_bytes / 1e6:.0f} MB")
    if isinstance(horizon := await state.get(Key.HORIZON), HorizonState):
        table.add_row("horizon", ", ".join(f"{env} {turns} turns" for env, turns in horizon.horizons.items()))
    for growth in progress.growths:
        told = f"{growth.from_turns} to {growth.to_turns} turns after {growth.phase_step} RL steps: {growth.reason}"
        table.add_row("last growth", f"{growth.env_id} {told}")
    tickets = await transport.queue()
    table.add_row("queue", f"{tickets.waiting} tickets wait, {tickets.leased} are leased")
    for kind in Kind:
        issued = await queue.issued(kind)
        if issued and (ends := progress.outcomes.get(kind)):
            reasons = ", ".join(f"{reason.value} {count}" for reason, count in ends.dropped.items())
            dropped = sum(ends.dropped.values())
            settled = f"{ends.evaluated} evaluated" if kind is Kind.EVAL else f"{ends.trained} trained"
            table.add_row(
                f"{kind.value} tickets",
                f"{issued} issued = {settled} + {dropped} dropped{f' ({reasons})' if reasons else ''} "
                f"+ {ends.void} void + {issued - ends.settled} outstanding",
            )


def _add_journal_rows(table: Table, run_dir: Path) -> None:
    lines = read_lines(run_dir / METRICS)
    if not lines:
        table.add_row("last step", "none yet")
        return
    line = lines[-1]
    table.add_row("last step", f"{line['step']} ({line['phase']}), {time.time() - line['time']:.0f} s ago")
    table.add_row("success", percent(line["success_rate"]))
    table.add_row("reward", number(line["reward_mean"]))
    table.add_row("staleness", f"mean {number(line['staleness_mean'])}, max {line['staleness_max']}")
    if evals := read_lines(run_dir / EVALS):
        last = evals[-1]
        table.add_row("eval", f"{interval(last)} at version {last['version']}, {last['episodes']} held-out episodes")
    table.add_row("speed", f"step {number(line['step_s'], 1)} s, wait {number(line['wait_s'], 1)} s")
