"""`horizonrl history checkout`: the weights of any version, from a kept file or made again from the log."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from horizonrl.broker.weights.frames import digest_file
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import CheckpointError
from horizonrl.common.run_dir import BEST, CHECKPOINTS, FRAME_FILE, WEIGHTS
from horizonrl.common.scratch import scratch
from horizonrl.learner.engine.checkpoint.weights_file import WEIGHTS_FILE
from horizonrl.ops.history.lineage import ledger_files, version_line
from horizonrl.ops.history.replay import ReplayRequest, possible_starts, retrain
from horizonrl.ops.publish.export import write_model
from horizonrl.ops.rundir.directory import read_config
from horizonrl.ops.rundir.files import Line


def check_out(run_dir: Path, version: int, out: Path, overrides: Sequence[str]) -> int:
    """Write a version as a Hugging Face directory, its weights checked against the ledger; return the exit code."""
    config = read_config(run_dir, overrides)
    line = version_line(ledger_files(run_dir), run_dir, version)
    with scratch() as folder:
        weights = intact_weights(run_dir, line)
        if weights is None:
            weights = folder / WEIGHTS_FILE
            code = rebuild(run_dir, config, line, weights, overrides)
            if code or not weights.is_file():  # only rank 0 has it
                return code
        facts = {key: line[key] for key in ("step", "lineage")}
        write_model(run_dir, config, weights, out, facts)
    print(f"wrote version {version} to {out}")
    return 0


def intact_weights(run_dir: Path, line: Line) -> Path | None:
    """Return the kept weights file of the version that a line of the ledger made; None without an intact one."""
    kept = (file for number, file in kept_weights(run_dir) if number == line["version"])
    return next((file for file in kept if digest_file(file) == line["weights_digest"]), None)


def kept_weights(run_dir: Path) -> Iterator[tuple[int, Path]]:
    """Yield the weights files that a run directory keeps, each with its version."""
    for file in sorted((run_dir / CHECKPOINTS).glob(f"step-*/{WEIGHTS_FILE}")):
        yield int(file.parent.name.removeprefix("step-")), file
    for file in sorted(file for name in (WEIGHTS, BEST) for file in (run_dir / name).glob("*")):
        if FRAME_FILE.fullmatch(file.name):
            yield int(file.name.split("-")[1]), file


def rebuild(
    run_dir: Path, config: RunConfig, line: Line, weights: Path, overrides: Sequence[str]
) -> int:
    """Train a version again, from the checkpoint before it. Raises CheckpointError if that gives other weights."""
    version = line["version"]
    # Behind the oldest checkpoint, the log is there in any case.
    starts = possible_starts(run_dir, config.learner)
    before = [step for step in starts if step < version]
    kept = ", ".join(map(str, sorted({number for number, _ in kept_weights(run_dir)}))) or "none"
    others = f"kept are the weights of {kept}" + (
        f"; all from {max(1, min(starts))} on can be made again" if starts else ""
    )
    if not before:
        raise CheckpointError(
            f"version {version} of {run_dir} can no longer be made: {others}. With learner.keep_log = true "
            "a run keeps what makes every version"
        )
    code, rows = retrain(ReplayRequest(run_dir, max(before), version, None, overrides), weights)
    if code:
        print(f"version {version} was not made again; {others}")
    if rows and not rows[-1]["weights_equal"]:
        raise CheckpointError(
            f"version {version} of {run_dir} was trained again from step {max(before)}, to other weights than the "
            f"ledger's {line['weights_digest']} (on a GPU steps repeat up to rounding alone): {others}"
        )
    return code
