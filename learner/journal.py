"""The run directory's account of the run: `metrics.jsonl` and `ledger.jsonl`, a line a step; `evals.jsonl`, a line an
evaluation; `lineages.jsonl`, a line each time a learner started; and `episodes/`.

Appended in step order and flushed to disk before the step's checkpoint; a resumed learner cuts the lines of steps that
were rolled back, so that each step has one line. An evaluation belongs to the step in whose making its last
ticket ended.
"""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from horizonrl.common.errors import RunFailed
from horizonrl.common.service import locked
from horizonrl.common.types import Group


@contextmanager
def only_learner(run_dir: Path) -> Iterator[None]:
    """Hold the run directory while the body runs. Raises RunFailed when another learner of this machine holds it."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / "learner.lock").open("w") as file:
        if not locked(file):
            raise RunFailed(f"another learner works in {run_dir}: end it, or give this run another run.name")
        yield


class Journal:
    def __init__(self, run_dir: Path) -> None:
        self._metrics = run_dir / "metrics.jsonl"
        self._ledger = run_dir / "ledger.jsonl"
        self._evaluations = run_dir / "evals.jsonl"
        self._lineages = run_dir / "lineages.jsonl"
        self._episodes = run_dir / "episodes"
        self._episodes.mkdir(parents=True, exist_ok=True)

    def rewind(self, step: int) -> None:
        """Cut what was written of steps after `step`."""
        for path, key in ((self._metrics, "step"), (self._ledger, "step"), (self._evaluations, "settled_step")):
            if path.exists():
                kept = [line for line in path.read_text().splitlines(keepends=True) if _step_of(line, key) <= step]
                beside = path.with_suffix(".rewound")
                beside.write_text("".join(kept))
                os.replace(beside, path)
        for path in self._episodes.glob("step-*.jsonl"):
            if int(path.stem.removeprefix("step-")) > step:
                path.unlink()

    def write_ledger(self, line: dict[str, Any]) -> None:
        _append(self._ledger, line)

    def write_lineage(self, line: dict[str, Any]) -> None:
        _append(self._lineages, line)

    def write_metrics(self, line: dict[str, Any]) -> None:
        _append(self._metrics, line)

    def write_evaluation(self, line: dict[str, Any]) -> None:
        _append(self._evaluations, line)

    def write_episodes(self, step: int, groups: Sequence[Group]) -> None:
        """Keep a step's episodes to read: their text, and of each generated token its id, logprob and version."""
        with (self._episodes / f"step-{step:06d}.jsonl").open("w") as file:
            for group in groups:
                for episode in group.episodes:
                    file.write(json.dumps(_readable(group, episode.index)) + "\n")


def _readable(group: Group, index: int) -> dict[str, Any]:
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
        "turns": [
            {
                "text": turn.text,
                "observation": turn.observation,
                "reward": turn.reward,
                "versions": sorted({span.version for span in turn.spans}),
                "ids": list(turn.output_ids),
                "logprobs": [round(logprob, 3) for logprob in turn.logprobs],
                "spans": [[span.version, span.lineage, span.tokens] for span in turn.spans],
            }
            for turn in episode.turns
        ],
    }


def _append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _step_of(line: str, key: str) -> float:
    """Return a line's step; a line cut short by a crash belongs to no step that is kept."""
    try:
        return int(json.loads(line)[key])
    except (ValueError, KeyError):
        return float("inf")
