"""A thread for what would keep the event loop waiting for more than 10 ms: the making of a world."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_THREAD = ThreadPoolExecutor(1, "envs")
"""One for all environments: several would keep the event loop from the interpreter for longer than they take."""


async def in_thread(call: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Return what the call returns, made in the thread."""
    return await asyncio.get_running_loop().run_in_executor(_THREAD, lambda: call(*arguments, **options))
