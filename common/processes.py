"""Programs that this process starts, and that end with it."""

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from horizonrl.common.children import bound
from horizonrl.common.logs import get_logger

log = get_logger()


def horizonrl_command(*words: str) -> list[str]:
    """Return the command line of `horizonrl WORDS` in this process's Python."""
    return [sys.executable, "-m", "horizonrl.ops.cli.main", *words]


def detached(output: int | IO[bytes], number: signal.Signals = signal.SIGTERM) -> dict[str, Any]:
    """Return how to start a program that reads nothing, writes to `output` and ends with this process.

    They are arguments for `subprocess.Popen` and for asyncio's `create_subprocess_exec`.
    """
    return {
        "stdin": subprocess.DEVNULL,
        "stdout": output,
        "stderr": output,
        "start_new_session": True,  # Ctrl-C reaches this process alone, which ends the program in order
        "preexec_fn": bound(number),
    }


@dataclass
class Child:
    """A program in a process of its own, which ends with this one. It appends to its log file."""

    command: Sequence[str]
    log_file: Path
    stop_within_s: float
    """How long after SIGTERM it is killed."""
    environment: Mapping[str, str] | None = None
    """All of its variables; None for those of this process."""
    process: asyncio.subprocess.Process | None = None
    started_at: float = 0.0
    """When it was last started, in seconds since the epoch."""

    @property
    def name(self) -> str:
        return self.log_file.stem

    @property
    def last_error(self) -> str:
        """Its last message, without its `error:`."""
        text = self.log_file.read_text(errors="replace", encoding="utf-8")
        return f"\n{text}".rpartition("\nerror: ")[2].strip()

    async def start(self) -> None:
        # Set before the process exists: the console takes a `service_opened` that is older for that of the process
        # before.
        self.started_at = time.time()
        with self.log_file.open("ab") as sink:
            self.process = await asyncio.create_subprocess_exec(
                *self.command, env=self.environment, **detached(sink)
            )

    async def wait(self) -> int:
        """Return the exit code once it has ended."""
        assert self.process is not None, "the program was never started"
        return await self.process.wait()

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                self.process.send_signal(number)

    async def stop(self) -> None:
        """End it with SIGTERM, and with SIGKILL once its time has passed."""
        if self.process is None or self.process.returncode is not None:
            return
        self.send(signal.SIGTERM)
        try:
            async with asyncio.timeout(self.stop_within_s):
                await self.process.wait()
        except TimeoutError:
            log.warning("part_killed", part=self.name, after_s=self.stop_within_s)
            self.send(signal.SIGKILL)
            await self.process.wait()
