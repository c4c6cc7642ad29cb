"""`horizonrl history lineage`: which groups made a version, and the other way, what became of a ticket."""

from pathlib import Path

from rich.table import Table

from horizonrl.common.errors import ConfigError
from horizonrl.common.run_dir import episode_file
from horizonrl.common.types import TRAINED
from horizonrl.ops.rundir.directory import read_config
from horizonrl.ops.rundir.files import SETTLED, Files, Line, TicketEnd, step_ends
from horizonrl.ops.terminal.console import plain_console


def show_version(run_dir: Path, version: int) -> int:
    """Print the groups whose training made a version."""
    files = ledger_files(run_dir)
    line = version_line(files, run_dir, version)
    table = Table(
        "ticket",
        "sequence",
        "end",
        title=f"version {version}: step {line['step']} of lineage {line['lineage']}",
    )
    for end in step_ends(line):
        table.add_row(end.ticket, str(end.sequence), _how(end))
    console = plain_console()
    console.print(table)
    for name in ("data_digest", "weights_digest", "cursor", "repeats"):
        console.print(f"{name.replace('_', ' ')}: {line[name]}", highlight=False)
    resumed = {start["lineage"]: start for start in files.lineages}.get(line["lineage"])
    if resumed is not None and resumed["from_step"]:
        changed = (
            ", ".join(f"{key} {old} → {new}" for key, (old, new) in resumed["changed"].items())
            or "nothing"
        )
        console.print(
            f"lineage {line['lineage']} resumed from step {resumed['from_step']}, changed: {changed}"
        )
    console.print(
        f"episodes: {episode_file(run_dir, 'step', version)}",
        highlight=False,
        soft_wrap=True,
    )
    return 0


def show_ticket(run_dir: Path, ticket_id: str) -> int:
    """Print how a ticket ended, and which version it went into."""
    end = next((end for end in ledger_files(run_dir).ends() if end.ticket == ticket_id), None)
    if end is None:
        raise ConfigError(
            f"no ticket {ticket_id} has ended in {run_dir}: ids look like train-00000042"
        )
    if end.held_out:
        text = f"{end.how}, in the evaluation of version {end.version}"
    else:
        # A dropped group stands in the line of the step that consumed it, but did not go into its version.
        relation = "trained into" if end.how == TRAINED else f"{_how(end)} before"
        text = f"{relation} version {end.version} (lineage {end.lineage})"
    print(f"{ticket_id}: {text}, log entry {end.sequence}")
    return 0


def version_line(files: Files, run_dir: Path, version: int) -> Line:
    """Return the line of the ledger of the step that made a version. Raises ConfigError if there is none."""
    for line in files.ledger:
        if line["version"] == version:
            return line
    newest = files.ledger[-1]["version"]
    raise ConfigError(f"no version {version} in the ledger of {run_dir}: it holds 1 to {newest}")


def ledger_files(run_dir: Path) -> Files:
    """Return the journal of a run. Raises ConfigError if it has taken no step."""
    read_config(run_dir)  # says so if it is not a run directory
    files = Files.read(run_dir)
    if not files.ledger:
        raise ConfigError(f"the ledger of {run_dir} is empty: no step has been taken yet")
    return files


def _how(end: TicketEnd) -> str:
    return end.how if end.how in SETTLED else f"dropped ({end.how})"
