"""Where a server's environments live: in the server's process or in worker processes.

A host keeps one environment for each episode id. Its caller ensures that an episode has only one call at a time.
"""

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from horizonrl.common.children import bound
from horizonrl.common.errors import (
    ConfigError,
    EnvironmentFailure,
    EnvironmentTimeout,
    MissingDependency,
)
from horizonrl.common.lag import turn
from horizonrl.envs import contract, registry
from horizonrl.envs.api import Environment, Step

CALL_S = 120.0
"""Time limit of a reset or step. A call that takes longer has hung, and its episode is broken."""
GRACE_S = 5.0
"""A worker ends a call by itself after CALL_S. One that has not done so after this additional time is stuck."""
LINE_BYTES = 1 << 24
"""Length limit of a line between the server and a worker, which holds an observation or a reply."""
ERRORS = {
    kind.__name__: kind
    for kind in (ConfigError, EnvironmentFailure, EnvironmentTimeout, MissingDependency)
}


class Host(Protocol):
    """Holds the environments of one id. A reset or step that exceeds CALL_S raises EnvironmentTimeout."""

    async def reset(self, episode: int, task_id: str) -> str:
        """Begin a task and return the first observation. The episode's first reset creates the environment."""

    async def step(self, episode: int, text: str) -> Step:
        """Take a step."""

    async def close(self, episode: int) -> None:
        """Release the episode's environment, if it has one."""

    async def stop(self) -> None:
        """Release everything."""


class LocalHost:
    """Environments in this process."""

    def __init__(self, env_id: str, options: Mapping[str, Any]) -> None:
        self._env_id = env_id
        self._options = options
        self._environments: dict[int, Environment] = {}

    async def reset(self, episode: int, task_id: str) -> str:
        if episode not in self._environments:
            self._environments[episode] = registry.make(self._env_id, self._options)
        await turn()
        async with _within_limit():
            return (await contract.reset(self._environments[episode], task_id)).text

    async def step(self, episode: int, text: str) -> Step:
        await turn()
        async with _within_limit():
            return await contract.step(self._environments[episode], text)

    async def close(self, episode: int) -> None:
        environment = self._environments.pop(episode, None)
        if environment is not None:
            await environment.close()

    async def stop(self) -> None:
        for episode in list(self._environments):
            await self.close(episode)


@asynccontextmanager
async def _within_limit() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(CALL_S):
            yield
    except TimeoutError as error:
        raise EnvironmentTimeout(
            str(error) or f"the environment gave no answer within {CALL_S:g} s"
        ) from None


class WorkerHost:
    """Environments in `count` processes. A new episode goes to the worker with the fewest.

    A dead worker is replaced at the next reset, and the episodes that it held are broken.
    """

    def __init__(self, env_id: str, options: Mapping[str, Any], count: int) -> None:
        self._command = (sys.executable, "-m", "horizonrl.envs.serving.worker", env_id, str(count))
        self._options = dict(options)
        self._slots: list[_Worker | None] = [None] * count
        self._starting = asyncio.Lock()
        self._worker_of: dict[int, _Worker] = {}

    async def reset(self, episode: int, task_id: str) -> str:
        worker = self._worker_of.get(episode)
        if worker is None or worker.dead:
            worker = self._worker_of[episode] = await self._choose()
        text: str = await worker.call("reset", episode, task_id)
        return text

    async def step(self, episode: int, text: str) -> Step:
        return Step(*await self._worker_of[episode].call("step", episode, text))

    async def close(self, episode: int) -> None:
        worker = self._worker_of.pop(episode, None)
        if worker is not None and not worker.dead:
            await worker.call("close", episode, "")

    async def stop(self) -> None:
        for worker in self._slots:
            if worker is not None:
                await worker.stop()

    async def _choose(self) -> "_Worker":
        # Resets that come together must not start two workers in one slot.
        async with self._starting:
            for slot, worker in enumerate(self._slots):
                if worker is None or worker.dead:
                    self._slots[slot] = await _Worker.start(self._command, self._options)
        held = list(self._worker_of.values())
        return min((worker for worker in self._slots if worker is not None), key=held.count)


class Lines:
    """Writes what is said within one pass of the event loop at once: a write takes as long as a small step."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._unwritten: list[bytes] = []

    def write(self, said: Sequence[Any]) -> None:
        """Write a line of JSON before the loop waits again."""
        if not self._unwritten:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unwritten.append(json.dumps(said).encode())

    def _flush(self) -> None:
        # One write for all, so that the lines of different episodes never mix.
        lines, self._unwritten = self._unwritten, []
        if not self._writer.is_closing():
            self._writer.write(b"\n".join([*lines, b""]))


class _Worker:
    """A worker process (worker.py). Calls are lines of JSON over a socket pair: [number, call, episode, text].

    The process ends when its socket closes, so it never outlives the server.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.dead = False
        self._process = process
        self._writer = writer
        self._lines = Lines(writer)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._calls = 0
        self._listener = asyncio.create_task(self._listen(reader))

    @classmethod
    async def start(cls, command: tuple[str, ...], options: Mapping[str, Any]) -> "_Worker":
        """Start a process and send it the options over the socket: they may be secret, and command lines are public."""
        ours, theirs = socket.socketpair()
        # Our copy of the worker's end is closed after the start: while it is open, the socket has no end of file.
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *command,
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                # Out of reach of a terminal's Ctrl-C, which is the server's to answer.
                start_new_session=True,
                # A worker stuck in a call would not notice that its socket closed.
                preexec_fn=bound(signal.SIGKILL),
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=LINE_BYTES)
        writer.write(json.dumps(options).encode() + b"\n")
        return cls(process, reader, writer)

    async def call(self, call: str, episode: int, text: str) -> Any:
        """Return the answer. Raises what the environment raised, and EnvironmentFailure if the worker dies.

        The worker enforces CALL_S itself. If the environment's code blocks its event loop, it cannot. Then the
        process is killed with all its episodes, because nothing else ends such a loop.
        Raises EnvironmentTimeout.
        """
        self._calls = number = self._calls + 1
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        if self.dead:
            self._bury()
        else:
            self._lines.write([number, call, episode, text])
        try:
            async with asyncio.timeout(CALL_S + GRACE_S):
                return await answer
        except TimeoutError as error:
            # It is a TimeoutError too: the worker's own answer, not our deadline.
            if isinstance(error, EnvironmentTimeout):
                raise
            self.dead = True
            self._process.kill()
            raise EnvironmentTimeout(
                f"no answer within {CALL_S:g} s: the environment's worker was killed"
            ) from None
        finally:
            self._waiting.pop(number, None)

    async def stop(self) -> None:
        self._writer.close()  # the end of file ends the process
        await self._process.wait()
        await self._listener

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Give each answer to its waiting call until the worker has ended; then fail the calls that still wait."""
        try:
            async for line in reader:
                number, error, value = json.loads(line)
                answer = self._waiting.get(number)
                if answer is None or answer.done():  # the caller has gone
                    continue
                if error is None:
                    answer.set_result(value)
                else:
                    answer.set_exception(ERRORS.get(error, EnvironmentFailure)(value))
        except (OSError, ValueError):
            self._process.kill()  # its output is not the protocol
        finally:
            self.dead = True
            self._writer.close()
            self._bury()

    def _bury(self) -> None:
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(
                    EnvironmentFailure("the worker process of the environment died")
                )
