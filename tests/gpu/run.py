"""Measure what the learner does on a CUDA machine that has torch and no network: `python3 gpu/run.py --out results`.

Every part is a process (`parts.py`) with a time limit, so that one that hangs, runs out of memory or dies costs no
other. `gpu.json` in `--out` is written again after every measurement: a run that is cut off has what it measured. An
error is a result: its text and the end of its traceback are in the report, and the next part begins. `--small` runs
every part on any machine, with tiny models, in a minute and a half.

Imports the standard library alone: it works whatever is broken.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PARTS_FILE = Path(__file__).with_name("parts.py")
MARK = "@ "
"""Begins a line of a part that holds a measurement. Libraries print lines too."""
WORTH_STARTING_S = 10.0
"""A part takes most of this to import torch."""
BUSY = 10.0
"""How much longer a part of the small form may take, on a machine that runs other tests."""
TAIL = 3000
"""Characters of a part's errors that the report keeps."""


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    limit_s: int
    function: str
    """The function of `parts.py` that measures it."""
    environment: dict[str, str] = field(default_factory=dict)
    on_gpu_only: bool = False
    """Whether the variables mean something to CUDA alone, so that the small form has nothing to compare."""


PARTS = (
    Part("machine", 40, "machine"),
    Part("attention", 60, "attention", {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}),
    Part("lengths", 40, "lengths"),
    Part(
        "lengths-cudnn-last",
        40,
        "lengths",
        {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"},
        on_gpu_only=True,
    ),
    Part("step", 120, "step"),
    Part("deepspeed", 150, "deepspeed"),
    Part("large", 100, "large"),
    Part("publish", 90, "publish"),
    Part("learning", 110, "learning"),
    Part("out-of-memory", 40, "out_of_memory"),
    Part("fragments", 40, "fragments", {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}),
    Part(
        "fragments-expandable",
        40,
        "fragments",
        {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
        on_gpu_only=True,
    ),
    Part("head", 50, "head"),
)
"""In the order of what they are worth."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument(
        "--out", type=Path, default=Path("gpu-results"), help="directory of gpu.json; gpu-results"
    )
    parser.add_argument(
        "--small", action="store_true", help="tiny models, on a machine without a GPU too"
    )
    parser.add_argument(
        "--only", metavar="NAME,...", help=f"some of {', '.join(part.name for part in PARTS)}"
    )
    parser.add_argument(
        "--budget-s", type=float, default=570.0, help="seconds for all parts together; 570"
    )
    parser.add_argument(
        "--work", type=Path, help="directory for models and weights, 30 GB; a temporary one"
    )
    arguments = parser.parse_args(argv)
    names = arguments.only.split(",") if arguments.only else [part.name for part in PARTS]
    if unknown := sorted(set(names) - {part.name for part in PARTS}):
        parser.error(
            f"--only names {', '.join(unknown)}: choose from {', '.join(part.name for part in PARTS)}"
        )
    arguments.out.mkdir(parents=True, exist_ok=True)
    report = Report(arguments.out / "gpu.json")
    deadline = time.monotonic() + arguments.budget_s
    with tempfile.TemporaryDirectory(prefix="horizonrl-gpu-", dir=arguments.work) as work:
        for part in PARTS:
            if part.name in names and not (arguments.small and part.on_gpu_only):
                _measure(part, report, Path(work), arguments.small, deadline)
    print(f"{report.file}: {', '.join(f'{name} {end}' for name, end in report.ends().items())}")
    return 0 if all(end == "ok" for end in report.ends().values()) else 1


class Report:
    """What was measured, by part; on the disk after every change."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._parts: dict[str, dict[str, Any]] = {}

    def add(self, part: str, measurements: dict[str, Any]) -> None:
        self._parts.setdefault(part, {}).update(measurements)
        for name, value in measurements.items():
            print(f"{part} {name} {_short(value)}", flush=True)
        incoming = self.file.with_suffix(".incoming")
        incoming.write_text(json.dumps(self._parts, indent=1) + "\n", encoding="utf-8")
        incoming.replace(self.file)

    def ends(self) -> dict[str, str]:
        """Return how each part ended: ok, or what it died of."""
        return {name: str(part["end"]) for name, part in self._parts.items()}


def _measure(part: Part, report: Report, work: Path, small: bool, deadline: float) -> None:
    """Run a part until it ends, at most for its limit or the time that is left, and report what it says."""
    started = time.monotonic()
    if deadline - started < WORTH_STARTING_S:
        report.add(part.name, {"end": "no time left"})
        return
    limit_s = min(part.limit_s * (BUSY if small else 1.0), deadline - started)
    errors = work / f"{part.name}.err"
    words = [
        sys.executable,
        str(PARTS_FILE),
        part.function,
        "--work",
        str(work),
        *["--small"] * small,
    ]
    environment = os.environ | part.environment
    if small:
        environment["OMP_NUM_THREADS"] = "1"  # more of them would wait for each other
    with (
        errors.open("wb") as stderr,
        subprocess.Popen(
            words,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        ) as process,
        _killed_after(limit_s, process.pid) as late,
    ):
        for measurement in _measurements(process):
            report.add(part.name, measurement)
        process.wait()  # within the limit: a process may hang at its end, too
    end = "ok" if process.returncode == 0 else f"code {process.returncode}"
    if late.is_set():
        end = f"killed after {limit_s:.0f} s"
    ending: dict[str, Any] = {"seconds": round(time.monotonic() - started, 1), "end": end}
    if end != "ok":
        ending["stderr"] = errors.read_text(encoding="utf-8", errors="replace")[-TAIL:]
    report.add(part.name, ending)


def _measurements(process: "subprocess.Popen[str]") -> Iterator[dict[str, Any]]:
    for line in process.stdout or ():
        if line.startswith(MARK):
            yield json.loads(line[len(MARK) :])


@contextlib.contextmanager
def _killed_after(limit_s: float, group: int) -> Iterator[threading.Event]:
    """Kill a process group after a while, and set the event, unless the body has ended."""
    late = threading.Event()

    def kill() -> None:
        late.set()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)

    timer = threading.Timer(limit_s, kill)
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()


def _short(value: Any) -> str:
    """Return a measurement for the screen: an error without its traceback, and anything else up to a line."""
    if isinstance(value, dict) and "error" in value:
        return f"ERROR {value['error'][:300]}"
    return json.dumps(value)[:400]


if __name__ == "__main__":
    sys.exit(main())
