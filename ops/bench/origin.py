"""Where a study's numbers come from: the program's commit and the machine."""

import os
import platform
import subprocess
from pathlib import Path

import psutil


def commit_of_program() -> str:
    """Return the commit of this program, with `-dirty` if it has changes, or `unknown` outside a repository."""
    root = Path(__file__).parents[1]
    try:
        described = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return "unknown"
    return described.stdout.strip() or "unknown"


def describe_machine() -> str:
    """Return the cores, the processor and the memory in a line."""
    memory = psutil.virtual_memory().total / 2**30
    return f"{os.cpu_count()} cores of {processor() or platform.machine()}, {memory:.0f} GiB"


def processor() -> str | None:
    """Return the processor's name; None where the system does not tell it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None
    )
