"""Runs a program under a keeper (keeper.py): with limits, a clean environment, and nothing left behind."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from horizonrl.common.errors import ConfigError, EnvironmentFailure, EnvironmentTimeout
from horizonrl.envs.program import keeper
from horizonrl.envs.program.files import read_regular

KEPT_BYTES = 4_096
"""Bytes that are read of the end of a program's output."""
END_S = 10.0
"""Longest time that a keeper may take to end what it keeps."""


@dataclass(frozen=True, slots=True)
class Limits:
    timeout_s: float
    memory_bytes: int
    """Private memory that each process may ask for."""


@dataclass(frozen=True, slots=True)
class Ended:
    code: int
    output: Path

    def last_words(self) -> str:
        """Return the end of what the program printed; nothing if it has put something else there."""
        with contextlib.suppress(OSError, EnvironmentFailure):
            return (read_regular(self.output, tail_bytes=KEPT_BYTES) or "").strip()
        return ""


def clean_environment(directory: Path) -> dict[str, str]:
    """Return what a program needs of a machine, and nothing of this process's environment."""
    return {
        # The commands of the environment that HorizonRL runs in come first: `python` is the one with its packages.
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
        "HOME": str(directory),
        "TMPDIR": str(directory),
        "LANG": "C.UTF-8",
    }


def keeper_command() -> list[str]:
    """Return the command of a keeper, which reads a specification from its stdin. Raises ConfigError beyond Linux."""
    if sys.platform != "linux":
        raise ConfigError(f"programs are kept with what Linux has, and this is {sys.platform}")
    return [sys.executable, "-I", "-S", keeper.__file__]


def specification(
    argv: Sequence[str],
    directory: Path,
    environment: Mapping[str, str],
    output: Path,
    limits: Limits,
) -> bytes:
    """Return the line that tells a keeper what to run."""
    spec = {
        "argv": list(argv),
        "environment": dict(environment),
        "directory": str(directory),
        "output": str(output),
        "memory_bytes": limits.memory_bytes,
    }
    return json.dumps(spec).encode() + b"\n"


async def judge(code: int, directory: Path, output: Path) -> Ended:
    """Return how a program ended by its keeper's exit code. Raises EnvironmentFailure when the keeper was killed."""
    if code < 0:  # the program ended with it, and what it had started may not have
        await asyncio.to_thread(end_marked, str(directory))
        raise EnvironmentFailure(f"the keeper of the program was killed by signal {-code}")
    return Ended(code, output)


async def run_program(
    argv: Sequence[str],
    directory: Path,
    environment: Mapping[str, str],
    output: Path,
    limits: Limits,
) -> Ended:
    """Run a program to its end. Cancelling this, or the end of this process, kills it with all that it started.

    `environment` names the directory, as `clean_environment` does. Raises EnvironmentTimeout when it takes too long.
    """
    kept = await asyncio.create_subprocess_exec(
        *keeper_command(), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, env={}, cwd="/",
        start_new_session=True,  # an interrupt from the keyboard is for the actor, whose end the keeper sees
    )  # fmt: skip
    assert kept.stdin is not None
    try:
        with contextlib.suppress(ConnectionError):
            kept.stdin.write(specification(argv, directory, environment, output, limits))
            await kept.stdin.drain()
        async with asyncio.timeout(limits.timeout_s):
            code = await kept.wait()
        return await judge(code, directory, output)
    except TimeoutError:
        raise EnvironmentTimeout(
            f"the program ran for longer than {limits.timeout_s:g} s"
        ) from None
    finally:
        kept.stdin.close()
        if kept.returncode is None:
            await _wait_for_end(kept)


def end_marked(mark: str) -> None:
    """Kill every process that has a variable of this value in its environment, which children inherit."""
    complete, wanted = True, f"={mark}\0".encode()
    while complete:
        complete = False
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if wanted in Path(f"/proc/{process.pid}/environ").read_bytes():
                    complete = True
                    process.kill()


async def _wait_for_end(kept: asyncio.subprocess.Process) -> None:
    try:
        async with asyncio.timeout(END_S):
            await kept.wait()
    except TimeoutError:
        # A process that no signal ends waits for the kernel: a disk that does not answer.
        kept.kill()
