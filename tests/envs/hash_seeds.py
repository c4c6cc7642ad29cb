"""Programs run under two hash seeds: what they print must not depend on the order of a set."""

import os
import subprocess
import sys


def printed_under_hash_seeds(program: str, *arguments: str, timeout_s: float = 60.0) -> set[str]:
    """Return what a program prints, each time in a process of its own: one text when the seed does not matter."""
    return {
        subprocess.run(
            [sys.executable, "-c", program, *arguments],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
            capture_output=True,
            text=True,
            check=True,
            timeout=timeout_s,
        ).stdout
        for seed in ("1", "2")
    }
