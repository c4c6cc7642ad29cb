"""The names of what a run directory holds: the learner and `horizonrl train` write it, the rest of `ops` reads it.

Each name stands here once, since those who write a file and those who read it may not import each other.
"""

import re
from pathlib import Path

CONFIG = "config.toml"
"""The resolved config, without secrets."""
ADDRESS = "broker.url"
"""The URL of the embedded broker, while there is one."""
METRICS = "metrics.jsonl"
"""One line per step: what it measured."""
LEDGER = "ledger.jsonl"
"""One line per step: the groups it settled."""
EVALS = "evals.jsonl"
"""One line per evaluation on held-out tasks."""
TESTS = "tests.jsonl"
"""One line per `horizonrl eval` of the run's model on the split `test`. No learner rewrites it."""
LINEAGES = "lineages.jsonl"
"""One line each time a learner starts."""
REPORT = "report.html"

CHECKPOINTS = "checkpoints"
"""Folder of `step-NNNNNN/`, the learner's complete checkpoints."""
WEIGHTS = "weights"
"""Folder of the key frames that actors on this machine or volume read."""
EPISODES = "episodes"
"""Folder of `step-NNNNNN.jsonl` (consumed for a step) and `eval-NNNNNN.jsonl` (held out)."""
BEST = "best"
"""Folder of the weights that did best on held-out tasks."""
LOGS = "logs"
"""Folder of one log per process."""
NATS = "nats"
"""Folder of the embedded broker's streams and log."""

TRAIN_LOCK = "train.lock"
"""Held by the `horizonrl train` of the directory; holds its process id."""
LEARNER_LOCK = "learner.lock"
"""Held by the learner of the directory."""

EPISODE_FILE = re.compile(r"(step|eval)-(\d{6,})\.jsonl")
FRAME_FILE = re.compile(r"frame-\d{6,}-\d{3,}\.safetensors")
_WRITTEN = {
    EPISODES: re.compile(rf"{EPISODE_FILE.pattern}|\..*"),
    WEIGHTS: re.compile(
        rf"{FRAME_FILE.pattern}|frame-\d{{6,}}-\d{{3,}}\.adapters|base\.safetensors|\..*"
    ),
}
"""By folder, what the learner writes there."""


def episode_file(run_dir: Path, kind: str, step: int) -> Path:
    """Return where the episodes of a `step`, or of an `eval`, are kept."""
    return run_dir / EPISODES / f"{kind}-{step:06d}.jsonl"


def episode_files(run_dir: Path, *kinds: str) -> list[Path]:
    """Return the files of episodes of `kinds`, `step` and `eval`, by step: names alone would put evaluations first."""
    matches = [
        (path, EPISODE_FILE.fullmatch(path.name)) for path in (run_dir / EPISODES).glob("*.jsonl")
    ]
    files = [
        (int(match[2]), path)
        for path, match in matches
        if match and match[1] in kinds and path.is_file()
    ]
    return [path for _, path in sorted(files)]


def foreign_files(run_dir: Path) -> list[str]:
    """Return the names of what the learner has not written in its folders, which nothing may read or remove."""
    return sorted(
        f"{folder}/{path.name}"
        for folder, written in _WRITTEN.items()
        for path in (run_dir / folder).glob("*")
        if not (written.fullmatch(path.name) and path.is_file())
    )
