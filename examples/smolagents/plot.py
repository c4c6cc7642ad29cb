"""Draws what a run has learned: `python plot.py RUN_DIR FILE.svg`, held-out success by kind of question."""

import json
import sys
from pathlib import Path

import numpy as np

from horizonrl.ops.studies.comparison import Band
from horizonrl.ops.studies.plots import plot_success


def main(run_dir: Path, file: Path) -> None:
    evals = [
        json.loads(line)
        for line in (run_dir / "evals.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    results = [each["environments"]["program"] for each in evals]
    lines = {"all": results} | {
        name: [each["categories"][name] for each in results] for name in results[0]["categories"]
    }
    steps = np.array([each["step"] for each in evals])
    bands = {
        name: Band(
            steps,
            *(np.array([each[key] for each in line]) for key in ("success_rate", "low", "high")),
        )
        for name, line in lines.items()
    }
    plot_success({"held-out questions": bands}, list(bands), "optimizer steps", "question", file)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
