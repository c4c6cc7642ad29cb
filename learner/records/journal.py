"""The journal of a run, in the run directory.

- `metrics.jsonl` and `ledger.jsonl`: one line per step
- `evals.jsonl`: one line per evaluation round
- `lineages.jsonl`: one line per start of a learner
- `episodes/`: `step-*` has the episodes consumed for a step, `eval-*` the held-out episodes consumed meanwhile

Lines are appended in step order and flushed to disk before the step's checkpoint. A resumed learner cuts the lines of
steps that were rolled back, so that each step has one line. An evaluation belongs to the step during which its last
ticket ended.
"""

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from horizonrl.common.errors import RunFailed
from horizonrl.common.files import atomic_write, remove_unfinished
from horizonrl.common.locks import take_lock
from horizonrl.common.run_dir import (
    EPISODES,
    EVALS,
    LEARNER_LOCK,
    LEDGER,
    LINEAGES,
    METRICS,
    episode_file,
    episode_files,
)
from horizonrl.common.types import Group

BLOCK_BYTES = 1 << 20
"""Read at a time, so that the length of a run does not matter to a learner's memory."""
EVAL_EPISODES_BYTES = 256_000_000
"""Bound of the held-out episodes that are kept: those of the first evaluation, and the newest ones."""


@contextmanager
def only_learner(run_dir: Path) -> Iterator[None]:
    """Lock the run directory while the body runs. Raises RunFailed if another learner on this machine holds it."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / LEARNER_LOCK).open("w", encoding="utf-8") as file:
        if not take_lock(file):
            raise RunFailed(
                f"another learner works in {run_dir}: end it, or choose another run.name for this run"
            )
        yield


class Journal:
    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._metrics = run_dir / METRICS
        self._ledger = run_dir / LEDGER
        self._evaluations = run_dir / EVALS
        self._lineages = run_dir / LINEAGES
        self._episodes = run_dir / EPISODES
        self._episodes.mkdir(parents=True, exist_ok=True)
        self._unchecked_bytes = math.inf
        """Size of the episodes written since the bound was last checked, which an earlier process may not have done."""

    def rewind(self, step: int) -> None:
        """Remove what was written for steps after `step`, and lines that a crash cut short."""
        for path, key in (
            (self._metrics, "step"),
            (self._ledger, "step"),
            (self._evaluations, "settled_step"),
        ):
            _cut(path, key, step)
        # Starts of a learner are never rolled back; only a line that a crash cut short goes.
        _cut(self._lineages, "lineage", math.inf)
        remove_unfinished(self._episodes)
        for path in episode_files(self._run_dir, "step", "eval"):
            if _step(path) > step:
                path.unlink()

    def lineages(self) -> list[int]:
        """Return the lineages of the learners that started in this directory."""
        lines = (
            self._lineages.read_bytes().splitlines(keepends=True) if self._lineages.exists() else []
        )
        return [int(number) for line in lines if math.isfinite(number := _number(line, "lineage"))]

    def weights_digest(self, step: int) -> str | None:
        """Return the digest of the weights that a step made; None if the ledger has no line of it."""
        for line in _from_the_end(self._ledger) if self._ledger.exists() else ():
            number = _number(line, "step")
            if number == step:
                return str(json.loads(line).get("weights_digest", "")) or None
            if number < step:
                break
        return None

    def write_ledger(self, line: dict[str, Any]) -> None:
        _append(self._ledger, line)

    def write_lineage(self, line: dict[str, Any]) -> None:
        _append(self._lineages, line)

    def write_metrics(self, line: dict[str, Any]) -> None:
        _append(self._metrics, line)

    def write_evaluation(self, line: dict[str, Any]) -> None:
        _append(self._evaluations, line)

    def write_episodes(self, step: int, groups: Sequence[Group]) -> None:
        """Keep a step's episodes for readers: their text, and the id, logprob and version of each generated token."""
        path = episode_file(self._run_dir, "step", step)
        # Complete or not there, since the step is in the ledger by now. Not durable: nothing is resumed from it, and a
        # step that is trained again overwrites its own.
        with atomic_write(path) as incoming, incoming.open("w", encoding="utf-8") as file:
            for group in groups:
                _write_group(file, group)
            self._unchecked_bytes += file.tell()

    def write_held_out(self, step: int, group: Group) -> None:
        """Keep a group that was evaluated during `step`. Old files make room for it, but never the first one."""
        path = episode_file(self._run_dir, "eval", step)
        if not path.exists():
            self._make_room()
        with path.open("a", encoding="utf-8") as file:
            _write_group(file, group)

    def _make_room(self) -> None:
        kept = episode_files(self._run_dir, "eval")
        while len(kept) > 1 and sum(path.stat().st_size for path in kept) > EVAL_EPISODES_BYTES:
            kept.pop(1).unlink()

    def free_episodes(self, kept_bytes: int) -> None:
        """Remove the episodes of the oldest steps until the rest fits into `kept_bytes`; the newest step's stay."""
        # The check reads the size of every file, so it waits until a hundredth of the bound is new.
        if self._unchecked_bytes < kept_bytes / 100:
            return
        self._unchecked_bytes = 0
        files = [(path.stat().st_size, path) for path in episode_files(self._run_dir, "step")]
        excess = sum(size for size, _ in files) - kept_bytes
        for size, path in files[:-1]:
            if excess <= 0:
                break
            path.unlink()
            excess -= size


def _write_group(file: TextIO, group: Group) -> None:
    for episode in group.episodes:
        file.write(json.dumps(readable_episode(group, episode.index)) + "\n")


def readable_episode(group: Group, index: int, digits: int | None = 3) -> dict[str, Any]:
    """Return an episode as its line has it; `digits` is how far its logprobs are rounded, None leaves them exact."""
    episode = group.episodes[index]
    return {
        "ticket": group.ticket.ticket_id,
        "env": group.ticket.task.env_id,
        "task": group.ticket.task.task_id,
        "horizon": group.ticket.horizon_turns,
        "episode": index,
        "stop": episode.stop.value,
        "success": episode.success,
        "return": episode.episode_return,
        "error": episode.error,
        "prompt": episode.prompt,
        **({"refused": episode.refused, "refusal": episode.refusal} if episode.refused else {}),
        # Linear episodes, which most are, have the lines that they always had.
        **({} if episode.linear else {"branches": [branch.prompt for branch in episode.branches]}),
        "turns": [
            {
                "text": turn.text,
                "observation": turn.observation,
                "reward": turn.reward,
                "versions": sorted({span.version for span in turn.spans}),
                "ids": list(turn.output_ids),
                # Rounded for readers: what was trained is in the log, to the last bit.
                "logprobs": [
                    logprob if digits is None else round(logprob, digits)
                    for logprob in turn.logprobs
                ],
                "spans": [[span.version, span.lineage, span.tokens] for span in turn.spans],
                **({} if episode.linear else {"branch": turn.branch, "trained": turn.trained}),
            }
            for turn in episode.turns
        ],
    }


def _step(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def _append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _cut(path: Path, key: str, last: float) -> None:
    """Cut the lines above `last` off the end, and one that is incomplete. It is a new file, so that readers start over.

    The lines ascend by their number, so the end of the file is all that is read.
    """
    if not path.exists():
        return
    kept = path.stat().st_size
    for line in _from_the_end(path):
        if _number(line, key) <= last:
            break
        kept -= len(line)
    if kept < path.stat().st_size:
        with (
            atomic_write(path, durable=True) as rewound,
            path.open("rb") as source,
            rewound.open("wb") as target,
        ):
            while block := source.read(min(BLOCK_BYTES, kept - target.tell())):
                target.write(block)


def _from_the_end(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file with their ends, the last one first, which may have none."""
    with path.open("rb") as file:
        position, pieces = file.seek(0, os.SEEK_END), list[bytes]()
        while position:
            size = min(BLOCK_BYTES, position)
            position -= size
            file.seek(position)
            lines = file.read(size).splitlines(keepends=True)
            # The last line of this block goes on in what has been read, unless it ends here.
            if lines[-1].endswith(b"\n") and pieces:
                yield b"".join(reversed(pieces))
                pieces = []
            pieces.append(lines.pop())
            while lines:
                yield b"".join(reversed(pieces))
                pieces = [lines.pop()]
        if pieces:
            yield b"".join(reversed(pieces))


def _number(line: bytes, key: str) -> float:
    """Return a line's number; NaN, which is never kept, if the line is cut short or damaged."""
    try:
        return float(json.loads(line)[key]) if line.endswith(b"\n") else math.nan
    except (ValueError, TypeError, KeyError):
        return math.nan
