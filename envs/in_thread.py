"""A thread for work that would block the event loop for more than 10 ms, such as generating a world."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_THREAD = ThreadPoolExecutor(1, "envs")
"""One thread for all environments. With several, the event loop would compete with all of them for the interpreter."""


async def in_thread(call: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Run the call in the thread and return its result."""
    return await asyncio.get_running_loop().run_in_executor(_THREAD, lambda: call(*arguments, **options))
