"""What each of the learner's ranks runs: an engine. Rank 0 leads with it, the others follow; `spawn.py` starts them.

Used by the learner and by `horizonrl history replay`, which trains without a broker to announce anything to.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from horizonrl.learner.engine.api import Engine, EngineSettings
from horizonrl.learner.engine.registry import make_engine
from horizonrl.learner.engine.thread import EngineThread


async def on_ranks(
    settings: EngineSettings, lead: Callable[[EngineThread, int], Awaitable[None]]
) -> None:
    """Make this rank's engine. Rank 0 runs `lead` with it and with the size of the vocabulary.

    The other ranks follow the calls that `lead` makes.
    """
    # A single worker keeps the calls in order: collectives pair up by their order on every rank.
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
    call = partial(asyncio.get_running_loop().run_in_executor, thread)
    local = await call(make_engine, settings)
    leader: Engine = local
    if local.ranks > 1:
        # Not above: it imports torch, which an engine that is always alone may not need.
        from horizonrl.learner.engine.ranks import Leader, follow

        if local.rank != 0:
            # Rank 0 decides when all end: its last checkpoint needs them.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            await call(follow, local)
            return
        leader = Leader(local)
    engine = EngineThread(leader, thread, settings.collective_timeout_s)
    await lead(engine, local.vocabulary)
    # Not after an error: every rank has to make this call, and one of them may be stuck.
    await engine.close()
