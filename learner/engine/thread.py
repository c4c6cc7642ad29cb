"""The engine's thread: the asynchronous side of the engine's seam.

Every method of `Engine` blocks. `EngineThread` makes each call on one worker thread, so that the event loop keeps
answering the broker and the health checks meanwhile, and gives each call a deadline.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from horizonrl.common.errors import RunFailed
from horizonrl.learner.algorithm.batch import Batch, Trace
from horizonrl.learner.engine.api import Engine, SavesAside, StepStats

T = TypeVar("T")


class EngineThread:
    """An engine, and the thread that makes every call of it; each method is that of `Engine`, awaited.

    The engine has to be made on the same thread: torch counts its threads per calling thread. Each call raises
    RunFailed when it has run for `timeout_s`. Its thread hangs then, so the process has to end.
    """

    def __init__(self, engine: Engine, thread: Executor, timeout_s: float | None = None) -> None:
        self._engine = engine
        self._thread = thread
        self._timeout_s = timeout_s
        self._queued_s = 0.0

    @property
    def stalled_s(self) -> float:
        """Seconds that calls have waited for a checkpoint so far: for the thread that writes it, or in the engine."""
        return self._queued_s + (
            self._engine.stalled_s if isinstance(self._engine, SavesAside) else 0.0
        )

    async def train_step(self, batch: Batch, lr: float) -> StepStats:
        return await self._call(self._engine.train_step, batch, lr)

    async def logprob_gap_at(self, trace: Trace, version: int, weights: Path) -> float:
        return await self._call(self._engine.logprob_gap_at, trace, version, weights)

    async def write_weights(self, path: Path) -> str:
        return await self._call(self._engine.write_weights, path)

    async def begin_write_weights(self, path: Path) -> Awaitable[str]:
        """Begin what `write_weights` does; await the result for the digest."""
        begun = await self._call(self._engine.begin_write_weights, path)
        return self._in_time("write_weights", asyncio.wrap_future(begun))

    async def save(self, directory: Path, state: dict[str, Any]) -> None:
        await self._call(self._engine.save, directory, state)

    async def begin_save(self, directory: Path, state: dict[str, Any]) -> Awaitable[None]:
        """Begin what `save` does, ahead of every later call; await the result for the end of it."""
        if isinstance(self._engine, SavesAside):
            begun = await self._call(self._engine.begin_save, directory, state)
            return self._in_time("save", asyncio.wrap_future(begun))
        loop = asyncio.get_running_loop()
        # Submitted now and not when it is awaited: the next training step has to come after it.
        return self._in_time(
            "save", loop.run_in_executor(self._thread, self._engine.save, directory, state)
        )

    async def load(self, directory: Path) -> dict[str, Any]:
        return await self._call(self._engine.load, directory)

    async def close(self) -> None:
        await self._call(self._engine.close)

    async def _in_time(self, call: str, running: asyncio.Future[T]) -> T:
        async with self._deadline(call):
            return await running

    async def _call(self, call: Callable[..., T], *arguments: Any) -> T:
        loop, begun, asked = asyncio.get_running_loop(), asyncio.Event(), time.monotonic()

        def begin() -> T:
            self._queued_s += time.monotonic() - asked
            loop.call_soon_threadsafe(begun.set)
            return call(*arguments)

        running = loop.run_in_executor(self._thread, begin)
        try:
            await begun.wait()  # a checkpoint before it has a deadline of its own
        except asyncio.CancelledError:
            running.cancel()
            raise
        async with self._deadline(getattr(call, "__name__", "call")):
            return await running

    @asynccontextmanager
    async def _deadline(self, call: str) -> AsyncIterator[None]:
        # The engine's own deadlines are not enough: DeepSpeed's collectives wait half an hour for a rank that is stuck.
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except TimeoutError:
            raise RunFailed(
                f"the engine's {call} took longer than learner.step_timeout_s = "
                f"{self._timeout_s} s: a rank is stuck, or the batch is too large. Start the learner again to resume "
                "from the last checkpoint"
            ) from None
