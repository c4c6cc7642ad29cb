"""Keeps one program and all that it starts: nothing of it outlives the keeper, nor the process that started the keeper.

    python -I -S keeper.py < pipe

The first line of the pipe is a JSON object: argv, environment, directory, output (a new file), memory_bytes. The keeper
ends with the program's exit code, 128 + N for signal N. When the pipe closes, because its other end closed it or died,
the keeper kills everything. It imports nothing but the standard library's smallest parts: one is started per episode.

A guard starts the keeper, and kills what is left if the program kills its keeper.
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
from collections.abc import Iterable
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LARGEST_FILE = 1 << 30
NOT_STARTED = 127
GONE_S = 0.005
HEIRS = 16
"""Process ids after that of the child that ended last, among which a child of its own is looked for."""


def main() -> int:
    """Run the program that stdin describes, under a keeper; return what to exit with."""
    libc = adopt()
    guard = os.getpid()
    keeper = os.fork()
    if keeper:
        os.waitid(os.P_PID, keeper, os.WEXITED | os.WNOWAIT)
        code = os.waitstatus_to_exitcode(_end(keeper))
        if code < 0:
            # What the keeper ended with is what its starter hears of.
            os.kill(guard, signal.SIGKILL)
        return code
    _die_with(guard, libc)
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
        _die_with(keeper, libc)
        nothing = os.open(os.devnull, os.O_RDONLY)
        # Nobody has written to it, and nobody has put a link there.
        new = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_APPEND
        output = os.open(spec["output"], new, 0o600)
        os.dup2(nothing, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(nothing)
        os.close(output)
        os.chdir(spec["directory"])
        for kind, most in (
            # Not RLIMIT_AS: Node and browsers reserve terabytes of addresses that they never use.
            (resource.RLIMIT_DATA, spec["memory_bytes"]),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_FSIZE, LARGEST_FILE),
        ):
            hard = resource.getrlimit(kind)[1]
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(kind, (most, most))
    except OSError as error:
        os.write(2, f"{spec['argv'][0]}: {error}\n".encode())
        os._exit(NOT_STARTED)


def _die_with(parent: int, libc: ctypes.CDLL) -> None:
    """End this process when its parent ends."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(NOT_STARTED)


def _end(program: int) -> int:
    """Kill what is left and wait for it; return the program's status."""
    status = 0
    while True:
        _kill(children())
        last = 0
        try:
            # What one that is killed leaves becomes ours next.
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                last = ended[0]
                if last == program:
                    status = ended[1]
        except ChildProcessError:
            return status
        if last:
            # In a chain of processes that each start the next one and end, every list is out of date.
            _kill(
                [heir for heir in range(last + 1, last + 1 + HEIRS) if _parent(heir) == os.getpid()]
            )
        else:
            time.sleep(GONE_S)


def _kill(pids: Iterable[int]) -> None:
    """Kill children with their groups: a signal to a group reaches those, too, that are being forked."""
    groups = {os.getpgrp()}  # which a child leaves when it starts
    for pid in pids:
        with contextlib.suppress(OSError):
            if (group := os.getpgid(pid)) not in groups:
                groups.add(group)
                os.killpg(group, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def children() -> list[int]:
    """Return the ids of this process's children."""
    pid = os.getpid()
    return [
        int(name) for name in os.listdir("/proc") if name.isdigit() and _parent(int(name)) == pid
    ]


def _parent(pid: int) -> int | None:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as stat:
        # The name of a process may hold spaces and brackets: what follows the last one is ours to read.
        return int(stat.read().rpartition(b")")[2].split()[1])
    return None


if __name__ == "__main__":
    sys.exit(main())
