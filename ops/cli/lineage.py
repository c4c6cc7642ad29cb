"""`horizonrl lineage`: which groups made a version, and the other way, what became of a ticket."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from horizonrl.common.errors import ConfigError
from horizonrl.common.run_dir import EVALS, LEDGER, LINEAGES
from horizonrl.ops.rundir.directory import read_config
from horizonrl.ops.rundir.lines import read_lines
from horizonrl.ops.terminal.console import plain_console


def show_version(run_dir: Path, version: int) -> int:
    """Print the groups whose training made a version."""
    lines = _ledger(run_dir)
    line = next((line for line in lines if line["version"] == version), None)
    if line is None:
        raise ConfigError(f"no version {version} in the ledger of {run_dir}: it holds 1 to {lines[-1]['version']}")
    table = Table(
        "ticket", "sequence", "end", title=f"version {version}: step {line['step']} of lineage {line['lineage']}"
    )
    for sequence, ticket, end in _ends(line):
        table.add_row(ticket, str(sequence), end)
    console = plain_console()
    console.print(table)
    for name in ("data_digest", "weights_digest", "cursor", "repeats"):
        console.print(f"{name.replace('_', ' ')}: {line[name]}", highlight=False)
    resumed = {entry["lineage"]: entry for entry in read_lines(run_dir / LINEAGES)}.get(line["lineage"])
    if resumed is not None and resumed["from_step"]:
        changed = ", ".join(f"{key} {old} → {new}" for key, (old, new) in resumed["changed"].items()) or "nothing"
        console.print(f"lineage {line['lineage']} resumed from step {resumed['from_step']}, changed: {changed}")
    console.print(f"episodes: {run_dir / 'episodes' / f'step-{version:06d}.jsonl'}", highlight=False, soft_wrap=True)
    return 0


def show_ticket(run_dir: Path, ticket_id: str) -> int:
    """Print how a ticket ended, and which version it went into."""
    for line in _ledger(run_dir):
        for sequence, ticket, end in _ends(line):
            if ticket == ticket_id:
                # A dropped group stands in the line of the step that consumed it, but did not go into its version.
                what = "trained into" if end == "trained" else f"{end} before"
                print(
                    f"{ticket_id}: {what} version {line['version']} (lineage {line['lineage']}), log entry {sequence}"
                )
                return 0
    for line in read_lines(run_dir / EVALS):
        for sequence, ticket, end in line["ends"]:
            if ticket == ticket_id:
                print(f"{ticket_id}: {end}, in the evaluation of version {line['version']}, log entry {sequence}")
                return 0
    raise ConfigError(f"no ticket {ticket_id} has ended in {run_dir}: ids look like train-00000042")


def _ledger(run_dir: Path) -> list[dict[str, Any]]:
    read_config(run_dir)  # says so when it is no run directory
    lines = read_lines(run_dir / LEDGER)
    if not lines:
        raise ConfigError(f"the ledger of {run_dir} is empty: no step has been taken yet")
    return lines


def _ends(line: Mapping[str, Any]) -> Iterator[tuple[int, str, str]]:
    """Yield sequence, ticket and end of every ticket that ended in a step."""
    yield from ((sequence, ticket, "trained") for sequence, ticket in line["trained"])
    yield from ((sequence, ticket, f"dropped ({reason})") for sequence, ticket, reason in line["dropped"])
    yield from ((sequence, ticket, "void") for sequence, ticket in line["voids"])
