"""Plays the episodes of one function in forks of a process that has imported its module, which is so paid for once.

    python -m horizonrl.envs.program.template play|grade NAME LISTENER

warm.py starts it under a keeper, with the descriptor of a Unix socket that listens. A connection is an episode: its
first line is what a keeper reads, and it hears BEGUN, and at the end the keeper's exit code. Each episode has a keeper
of its own, a fork of this process, and the keeper's fork is the program.

A process that is to be forked must have one thread and no open file of its module's, and must know nothing of an
episode. If the module starts threads, keeps a connection, or reads what only an episode has in its environment, this
process ends with NOT_WARM and says why.
"""

import atexit
import contextlib
import gc
import importlib
import importlib.machinery
import json
import os
import select
import signal
import socket
import stat
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from horizonrl.common.errors import EnvironmentFailure
from horizonrl.envs.program import keeper
from horizonrl.envs.program.files import read_regular
from horizonrl.envs.program.function import call
from horizonrl.envs.program.functions import load_function

MODEL_VARIABLES = frozenset(
    f"{provider}_{part}" for provider in ("OPENAI", "ANTHROPIC") for part in ("BASE_URL", "API_KEY")
)
EPISODE_VARIABLES = MODEL_VARIABLES | {"TASK_FILE", "ANSWER_FILE", "PROGRAM_DIRECTORY"}
BEGUN = b"begun\n"
NOT_WARM = 75
IDLE_S = 60.0
"""Time without an episode after which a template ends; the next episode starts another."""
IMPORT_S = 60
MODULES = "modules.json"
"""What the first program that ended well had imported by then: clients import most of themselves when they are used."""
READS_ITS_OWN = ("tqdm.utils",)
"""Modules that go through the whole environment for variables with a prefix of their own."""
SEEDED = ("numpy.random", "torch.random")
"""Modules whose generators every fork would continue from the same state; `random` sees to its own."""


def main() -> None:
    what, name, listener = sys.argv[1:]
    # numpy's library starts a thread for each further core when it is loaded.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    ended_well: list[bool] = []
    atexit.register(_leave, ended_well)
    fitness = Fitness()
    function = load_function(name)
    if reason := fitness.lacking():
        print(f"{name}: its module {reason}", flush=True)
        sys.exit(NOT_WARM)
    template = Template(what, socket.socket(fileno=int(listener)), fitness)
    if template.serve():
        call(what, function)
        template.tell_modules()
        ended_well.append(True)


def _leave(ended_well: list[bool]) -> None:
    """Registered before all others and so called after them: what is left to do is to take every module apart.

    That takes 60 ms for `openai`, more than its call.
    """
    if ended_well:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


class Template:
    """Forks a keeper for each connection, and cleans up after one that is killed."""

    def __init__(self, what: str, server: socket.socket, fitness: "Fitness") -> None:
        self._what = what
        self._server = server
        self._fitness = fitness
        self._home = Path.cwd()
        self._loaded = set(sys.modules)
        self._learned = False
        self._spared = keeper.children()
        """What the module itself has started."""
        self._keepers: dict[int, tuple[int, socket.socket]] = {}
        """By process descriptor: the process, and the connection that waits for its exit code."""

    def serve(self) -> bool:
        """Return True in each program; return False here, after IDLE_S without an episode."""
        keeper.adopt()  # of a keeper that is killed
        poll = select.poll()
        poll.register(self._server, select.POLLIN)
        gc.freeze()
        while (ready := poll.poll(None if self._keepers else IDLE_S * 1000)) or self._keepers:
            for descriptor, _ in ready:
                if descriptor in self._keepers:
                    poll.unregister(descriptor)
                    self._end(descriptor)
                elif (begun := self._begin()) is not None:
                    poll.register(begun, select.POLLIN)
                else:
                    return True
        return False

    def tell_modules(self) -> None:
        """Called in a program that has ended well: let later ones find imported what this one has imported."""
        announced = self._home / MODULES
        if not announced.exists():
            temporary = self._home / f"{MODULES}.{os.getpid()}"
            with contextlib.suppress(OSError):
                temporary.write_text(
                    json.dumps([name for name in sys.modules if name not in self._loaded]),
                    encoding="utf-8",
                )
                # Whole at once: the template reads it as soon as it is there.
                temporary.replace(announced)

    def _begin(self) -> int | None:
        """Fork a keeper and return its descriptor; return None in the program."""
        self._learn()
        connection, _ = self._server.accept()
        pid = os.fork()
        if pid:
            with contextlib.suppress(OSError):  # the actor has gone, which the keeper will see
                connection.send(BEGUN)
            descriptor = os.pidfd_open(pid)
            self._keepers[descriptor] = (pid, connection)
            return descriptor
        self._server.close()
        for descriptor, (_, other) in self._keepers.items():
            os.close(descriptor)
            other.close()
        os.dup2(connection.fileno(), 0)
        connection.close()
        kept: dict[str, Any] | int = keeper.NOT_STARTED
        try:
            kept = keeper.keep()
        finally:
            if isinstance(kept, int):
                os._exit(kept)
        self._become(kept)
        return None

    def _become(self, episode: dict[str, Any]) -> None:
        """Exchange what is left of the template in this fork: what a process of its own would have found."""
        os.environ.clear()
        os.environ.update(episode["environment"])
        tempfile.tempdir = None
        if self._what == "play":
            sys.path.insert(0, episode["directory"])
        for name in SEEDED:
            if name in sys.modules:
                sys.modules[name].seed()

    def _end(self, descriptor: int) -> None:
        pid, connection = self._keepers.pop(descriptor)
        os.close(descriptor)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code < 0:
            self._sweep()
        with connection, contextlib.suppress(OSError):
            connection.send(b"%d\n" % code)

    def _sweep(self) -> None:
        """Kill what a killed keeper has left: it has become ours, and its environment need not name the episode."""
        while (
            stray := set(keeper.children())
            - {pid for pid, _ in self._keepers.values()}
            - set(self._spared)
        ):
            for pid in stray:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def _learn(self) -> None:
        """Import what a program has imported, if a trial fork shows that it leaves this process fit to be forked.

        Any program can write to the list. What it names is imported only if it is installed.
        """
        if self._learned:
            return
        try:
            text = read_regular(self._home / MODULES)
            if text is None:
                return
            names = [name for name in json.loads(text) if _is_installed(name)]
        except (EnvironmentFailure, ValueError, TypeError, AttributeError, RecursionError):
            names = []  # no program of ours has written that
        self._learned = True
        trial = os.fork()
        if trial == 0:
            code = 1
            try:
                signal.alarm(IMPORT_S)
                self._fitness.spare_open_files()
                _import(names)
                code = 1 if self._fitness.lacking() else 0
            finally:
                os._exit(code)
        if os.waitpid(trial, 0)[1] == 0:
            _import(names)
            gc.freeze()


class Fitness:
    """Notes from now on what would make forks of this process share what each of them needs for itself."""

    def __init__(self) -> None:
        self._read: set[str] = set()
        self.spare_open_files()
        environ: Any = os.environ  # which encodes the name of each variable that is looked up
        encode = environ.encodekey

        def noting(name: Any) -> Any:
            if name in EPISODE_VARIABLES:
                self._read.add(name)
            return encode(name)

        environ.encodekey = noting
        variables = _Variables(environ._data, self._read)
        environ._data = variables
        os.environb._data = variables  # type: ignore[attr-defined]

    def spare_open_files(self) -> None:
        """Take what is open at this moment for this process's own."""
        self._files = _open_files()

    def lacking(self) -> str:
        """Return why this process may not be forked, if it may not."""
        if self._read:
            return f"reads {', '.join(sorted(self._read))} while it is imported"
        if (count := len(os.listdir("/proc/self/task"))) > 1:
            names = [
                thread.name
                for thread in threading.enumerate()
                if thread is not threading.main_thread()
            ]
            return f"starts {count - 1} threads while it is imported ({', '.join(names) or 'not in Python'})"
        if opened := _open_files() - self._files:
            return f"leaves open when it is imported: {', '.join(sorted(target for _, target in opened))}"
        return ""


class _Variables(dict[bytes, bytes]):
    """The environment, which notes who goes through all of it."""

    def __init__(self, variables: dict[bytes, bytes], read: set[str]) -> None:
        super().__init__(variables)
        self._read = read

    def __iter__(self) -> Iterator[bytes]:
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals.get("__name__") in (
            "os",
            "collections.abc",
        ):
            frame = frame.f_back
        if (reader := frame.f_globals.get("__name__")) not in READS_ITS_OWN:
            self._read.add(f"the whole environment (in {reader})")
        return super().__iter__()


def _open_files() -> set[tuple[str, str]]:
    """Return the descriptors that forks would share, with what they lead to: not devices such as /dev/null."""
    opened = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing
            target = os.readlink(f"/proc/self/fd/{name}")
            if not stat.S_ISCHR(os.fstat(int(name)).st_mode):
                opened.add((name, target))
    return opened


def _is_installed(name: str) -> bool:
    """Return whether a module is found among the installed packages, where no episode is meant to write."""
    installed = [folder for folder in sys.path if Path(folder).is_relative_to(sys.prefix)]
    installed += [folder for folder in sys.path if Path(folder).is_relative_to(sys.base_prefix)]
    with contextlib.suppress(ImportError, ValueError):
        return (
            importlib.machinery.PathFinder.find_spec(name.partition(".")[0], installed) is not None
        )
    return False


def _import(names: Iterable[str]) -> None:
    for name in names:
        # What a program has loaded in another way than by its name.
        with contextlib.suppress(Exception):
            importlib.import_module(name)


if __name__ == "__main__":
    main()
