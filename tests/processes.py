"""Processes of a test: those that it has started, whoever their parent is now, and one that makes a model."""

import subprocess
import sys
import time
from pathlib import Path

import psutil

from horizonrl.common.children import bound

MARK = "HORIZONRL_TEST_MARK"
"""In the environment of a process; its children have it too."""


def marked(mark: str) -> list[psutil.Process]:
    """Return the processes that began with a mark in their environment and have not ended."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:
            continue
    return found


def command_line(process: psutil.Process) -> list[str]:
    """Return the whole command line, which `ps` would cut at 80 columns; empty once the process has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def left_behind(mark: str, within_s: float) -> list[str]:
    """Return the commands of what still runs after `within_s`, and end it."""
    deadline = time.monotonic() + within_s
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    commands = []
    for process in left:
        try:
            commands.append(" ".join(command_line(process)) or process.name())
            process.kill()
        except psutil.Error:
            continue
    return commands


def make_tiny_model_apart(path: Path) -> None:
    """Make the tiny model in a process of its own, so that this one imports no torch."""
    words = [sys.executable, "-m", "horizonrl.ops.models.tiny_model", str(path)]
    made = subprocess.run(words, capture_output=True, text=True, preexec_fn=bound())
    assert made.returncode == 0, made.stderr
