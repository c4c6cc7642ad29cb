"""Threads for work that would block the event loop for more than 10 ms, such as generating a world.

`in_thread` has one for all environments. A call that may hang for ever gets its own (`in_own_thread`).
"""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

STUCK_S = 300.0
"""A call that has not returned for this long never will."""

_THREAD = ThreadPoolExecutor(1, "envs")
"""One thread for all environments. With several, the event loop would compete with all of them for the interpreter."""


@dataclass
class Running:
    """The call that has the thread."""

    thread: threading.Thread
    since: float


_running: Running | None = None


async def in_thread(call: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Run the call in the thread and return its result.

    Cancelled by a caller that waits no longer, while one call has had the thread for `STUCK_S`, it ends the process: no
    other environment could ever move again, and nothing can end a thread. The role is started anew.
    """

    def run() -> T:
        global _running
        _running = Running(threading.current_thread(), time.monotonic())
        try:
            return call(*arguments, **options)
        finally:
            _running = None

    try:
        return await asyncio.get_running_loop().run_in_executor(_THREAD, run)
    except asyncio.CancelledError:
        stuck = _running
        if stuck is not None and time.monotonic() - stuck.since >= STUCK_S:
            # Not above: whoever lists tasks needs no web server.
            from horizonrl.common.service import end_process

            end_process(
                "environment_stuck",
                f"a call of an environment has not returned for {STUCK_S:g} s",
                stuck.thread,
            )
        raise


async def in_own_thread(call: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Run the call in a new thread and return its result.

    `asyncio.to_thread` has as many threads as a machine has cores, and a few more: calls that hang would use them up
    for everyone, and hold up the end of the process.
    """
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # a caller that waits no longer does not make the result an error

    def run() -> None:
        try:
            result = call(*arguments, **options)
        except BaseException as error:  # noqa: BLE001 - the caller gets it, as from a call of its own
            done.set_exception(error)
        else:
            done.set_result(result)

    threading.Thread(target=run, daemon=True, name=getattr(call, "__qualname__", "call")).start()
    return await asyncio.wrap_future(done)
