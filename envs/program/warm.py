"""Runs functions in forks of templates (template.py): one template for each function, its limits and its environment.

A function that no template can play, because its module starts threads for example, has a fresh process per episode.
"""

import asyncio
import atexit
import contextlib
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from horizonrl.common.errors import EnvironmentTimeout
from horizonrl.common.logs import get_logger
from horizonrl.common.scratch import scratch
from horizonrl.envs.program.process import (
    END_S,
    Ended,
    Limits,
    clean_environment,
    judge,
    keeper_command,
    run_program,
    specification,
)
from horizonrl.envs.program.template import BEGUN, NOT_WARM

BACKLOG = 4_096
"""Episodes that may wait until the module is imported."""
SOCKET, OUTPUT = "episodes", "template.txt"
log = get_logger()


@dataclass(frozen=True, slots=True)
class Function:
    """What a template is made for: `what` is "play" or "grade", `name` that of the function."""

    what: str
    name: str
    environment: tuple[tuple[str, str], ...]
    """Variables that do not differ from one episode to the next."""

    def command(self, *more: str) -> list[str]:
        module = "template" if more else "function"
        # A program may write modules to its directory and to the template's: no grader and no template imports them.
        apart = ["-P", "-s"] if more or self.what == "grade" else []
        return [
            "python",
            *apart,
            "-m",
            f"horizonrl.envs.program.{module}",
            self.what,
            self.name,
            *more,
        ]

    def edited(self) -> int:
        """Return when the function's file was changed last, if it is named by its file."""
        file = Path(self.name.rpartition(":")[0])
        return file.stat().st_mtime_ns if file.is_file() else 0


async def run_function(
    function: Function,
    directory: Path,
    environment: Mapping[str, str],
    output: Path,
    limits: Limits,
) -> Ended:
    """Run a function to its end in a process of its own; cancelling and errors are those of `run_program`."""
    spec = specification(function.command(), directory, environment, output, limits)
    while (template := await asyncio.to_thread(_template, function, limits)) is not None:
        try:
            async with asyncio.timeout(limits.timeout_s):
                code = await template.run(spec)
        except TimeoutError:
            raise EnvironmentTimeout(
                f"the program ran for longer than {limits.timeout_s:g} s"
            ) from None
        if code is not None:
            return await judge(code, directory, output)
        if not await asyncio.to_thread(template.ended):
            break
    return await run_program(function.command(), directory, environment, output, limits)


class Template:
    """A process that has imported a function's module, and the socket at which it takes episodes."""

    def __init__(self, function: Function, limits: Limits) -> None:
        self._function = function
        self._served = False
        with ExitStack() as held, socket.socket(socket.AF_UNIX) as listener:
            directory = held.enter_context(scratch())
            self._socket, self._output = str(directory / SOCKET), directory / OUTPUT
            listener.bind(self._socket)
            listener.listen(BACKLOG)
            environment = clean_environment(directory) | dict(function.environment)
            argv = function.command(str(listener.fileno()))
            self._keeper = subprocess.Popen(
                keeper_command(), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env={}, cwd="/",
                pass_fds=[listener.fileno()], start_new_session=True,
            )  # fmt: skip
            self._held = held.pop_all()
        atexit.register(self.close)
        assert self._keeper.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._keeper.stdin.write(
                specification(argv, directory, environment, self._output, limits)
            )
            self._keeper.stdin.flush()

    @property
    def runs(self) -> bool:
        return self._keeper.poll() is None

    @property
    def cold(self) -> str:
        """Return why no template can play this function, once one has ended over it."""
        if self.runs or self._served or self._keeper.returncode == 0:
            return ""
        words = Ended(0, self._output).last_words().rpartition("\n")[2]
        return (
            words
            if self._keeper.returncode == NOT_WARM
            else f"importing it ahead of an episode failed: {words}"
        )

    async def run(self, spec: bytes) -> int | None:
        """Play an episode and return its keeper's exit code, or None if the template ended before the episode began."""
        try:
            reader, writer = await asyncio.open_unix_connection(self._socket)
        except OSError:
            return None
        began, code = False, b""
        try:
            with contextlib.suppress(ConnectionError):
                writer.write(spec)
                began = await reader.readline() == BEGUN
                self._served |= began
                code = await reader.readline()
            return int(code or -signal.SIGKILL) if began else None
        finally:
            with contextlib.suppress(OSError):
                # The keeper ends what it keeps, and then the template hangs up.
                if began and not code:
                    writer.write_eof()
                    async with asyncio.timeout(END_S):
                        await reader.read()
            writer.close()

    def ended(self) -> bool:
        """Wait for END_S; return whether the template has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._keeper.wait(END_S)
        return not self.runs

    def close(self) -> None:
        """End the template with the programs that it still runs, and remove its directory."""
        atexit.unregister(self.close)
        if self._keeper.stdin is not None:
            with contextlib.suppress(OSError):
                self._keeper.stdin.close()
        self.ended()
        self._held.close()


_lock = threading.Lock()
_templates: dict[tuple[Function, int], tuple[int, Template | None]] = {}
"""By function and bytes of memory: when its file was edited, and the template, or None for a function without one."""


def _template(function: Function, limits: Limits) -> Template | None:
    key, edited, reason = (function, limits.memory_bytes), function.edited(), ""
    with _lock:
        of, template = _templates.get(key, (None, None))
        if of == edited and (template is None or template.runs):
            return template
        if template is not None and not template.runs:
            reason = template.cold if of == edited else ""
            template.close()
        # The template of an edited file ends by itself when it has no more episodes.
        made = None
        if not reason:
            try:
                made = Template(function, limits)
            except OSError as error:  # the path of a socket has at most 107 bytes
                reason = str(error)
        if reason:
            log.warning("program_starts_cold", program=function.name, reason=reason)
        _templates[key] = (edited, made)
        return made
