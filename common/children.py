"""Children that end when this process does, even when it is killed: nothing that we start is left behind.

Linux sends a process the signal that it asked for when the thread that started it ends (PR_SET_PDEATHSIG). A process
asks for itself, so it must do so between fork and exec, or before anything else: `bound` is for programs, and
`children_bound` for what multiprocessing starts. Start them in the main thread, or in one that lasts.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkProcess, SpawnProcess
from typing import Any

PR_SET_PDEATHSIG = 1
# Loaded at import: between fork and exec it is too late to load anything.
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def bind(parent: int, number: signal.Signals = signal.SIGTERM) -> None:
    """Send this process `number` when `parent`, the process that started it, ends; now where it has ended already."""
    if _libc is not None:
        _libc.prctl(PR_SET_PDEATHSIG, number)
    # The parent may have died before the request took effect. Then no signal would ever come.
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def bound(number: signal.Signals = signal.SIGTERM) -> Callable[[], None]:
    """Return the `preexec_fn` of a program that ends with this one."""
    parent = os.getpid()

    def bind_before_exec() -> None:
        if number is not signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)  # our own handler would swallow it until exec
        bind(parent, number)

    return bind_before_exec


@contextlib.contextmanager
def children_bound() -> Iterator[None]:
    """Let SIGKILL end what multiprocessing starts in the body, by fork or by spawn, and all that it starts in turn."""
    _bind_children()
    try:
        yield
    finally:
        for method in METHODS:
            del multiprocessing.get_context(method).Process  # type: ignore[attr-defined]  # back to the class's own


def _bind_children() -> None:
    for method, process in METHODS.items():
        # vLLM starts its processes through these contexts by itself, so the class that it finds there is replaced.
        multiprocessing.get_context(method).Process = process  # type: ignore[attr-defined]


class _Forked(ForkProcess):
    def run(self) -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        assert parent.pid is not None
        bind(parent.pid, signal.SIGKILL)
        super().run()


class _Spawned(SpawnProcess):
    def __reduce__(self) -> tuple[Any, ...]:
        # spawn pickles the process object, and the child unpickles it first: the earliest place for our code.
        return _revive, (os.getpid(),), self.__dict__


def _revive(parent: int) -> _Spawned:
    """Make the process object in the child, which reads this before it imports what it will run; `__main__` alone
    comes earlier.
    """
    # SIGKILL, since a child that is busy in C code or has handlers of its own may not react to SIGTERM.
    bind(parent, signal.SIGKILL)
    # A spawned process begins with fresh contexts, so its own children need the classes again.
    _bind_children()
    return _Spawned.__new__(_Spawned)


METHODS = {"fork": _Forked, "spawn": _Spawned}

if __name__ == "__main__":  # PARENT COMMAND...: become a program that ends with PARENT
    bind(int(sys.argv[1]), signal.SIGKILL)
    os.execvp(sys.argv[2], sys.argv[2:])
