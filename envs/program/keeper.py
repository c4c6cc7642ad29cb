"""Keeps one program and all that it starts: nothing of it outlives the keeper, nor the process that started the keeper.

    python -I -S keeper.py < pipe

The first line of the pipe is a JSON object: argv, environment, directory, output (a file), memory_bytes. The keeper
ends with the program's exit code, 128 + N for signal N. When the pipe closes, because its other end closed it or died,
the keeper kills everything. It imports nothing but the standard library's smallest parts: one is started per episode.
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LARGEST_FILE = 1 << 30
NOT_STARTED = 127
GONE_S = 0.005


def main() -> int:
    """Run the program that stdin describes; return what to exit with."""
    kept = keep()
    if isinstance(kept, int):
        return kept
    try:
        os.execvpe(kept["argv"][0], kept["argv"], kept["environment"])
    except OSError as error:
        os.write(2, f"{kept['argv'][0]}: {error}\n".encode())
    finally:
        os._exit(NOT_STARTED)


def keep() -> dict[str, Any] | int:
    """Fork. In the child, which is to become the program, return what stdin describes; in the keeper its exit code."""
    libc = adopt()
    line = b""
    while not line.endswith(b"\n"):
        got = os.read(0, 1 << 16)
        if not got:  # the actor died while it wrote
            return NOT_STARTED
        line += got
    spec: dict[str, Any] = json.loads(line)
    keeper = os.getpid()
    program = os.fork()
    if program == 0:
        _enter(spec, keeper, libc)
        return spec
    ended = select.poll()
    ended.register(os.pidfd_open(program), select.POLLIN)
    ended.register(0, select.POLLIN | select.POLLHUP)
    ended.poll()
    code = os.waitstatus_to_exitcode(_end(program))
    return code if code >= 0 else 128 - code


def adopt() -> ctypes.CDLL:
    """Let whatever this process's descendants leave become its child, also what left its process group."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    return libc


def _enter(spec: dict[str, Any], keeper: int, libc: ctypes.CDLL) -> None:
    """Take on the session, files, directory and limits of the program."""
    try:
        os.setsid()
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(NOT_STARTED)
        nothing = os.open(os.devnull, os.O_RDONLY)
        output = os.open(spec["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(nothing, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(nothing)
        os.close(output)
        os.chdir(spec["directory"])
        for kind, most in (
            (resource.RLIMIT_AS, spec["memory_bytes"]),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_FSIZE, LARGEST_FILE),
        ):
            hard = resource.getrlimit(kind)[1]
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(kind, (most, most))
    except OSError as error:
        os.write(2, f"{spec['argv'][0]}: {error}\n".encode())
        os._exit(NOT_STARTED)


def _end(program: int) -> int:
    """Kill what is left and wait for it; return the program's status."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program, signal.SIGKILL)
    status = 0
    while True:
        for pid in children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            pid, ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == program:
            status = ended
        elif pid == 0:  # killed, and not gone yet: what it leaves becomes ours next
            time.sleep(GONE_S)


def children() -> list[int]:
    """Return the ids of this process's children."""
    own, found = os.getpid(), []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
                # The name of a process may hold spaces and brackets: what follows the last one is ours to read.
                if int(stat.read().rpartition(b")")[2].split()[1]) == own:
                    found.append(int(name))
    return found


if __name__ == "__main__":
    sys.exit(main())
