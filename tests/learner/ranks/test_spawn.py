"""The exit code of a learner with several ranks on one machine."""

import asyncio
import signal
import sys

import pytest

from horizonrl.learner.ranks.spawn import _end

RANK = """
import signal, sys
# Blocked and waited for: a handler is called too late if the signal comes between two of Python's looks and a sleep.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print(flush=True)
signal.sigtimedwait({signal.SIGTERM}, float(sys.argv[1]))  # as a rank, which then has finished its step
"""


@pytest.mark.parametrize(("stop", "code"), [(True, 128 + signal.SIGTERM), (False, 0)])
def test_ranks_that_were_asked_to_stop_do_not_end_as_if_the_run_was_over(
    stop: bool, code: int
) -> None:
    async def scenario() -> int:
        work_s = "60" if stop else "0"
        ranks = [
            await asyncio.create_subprocess_exec(
                sys.executable, "-c", RANK, work_s, stdout=asyncio.subprocess.PIPE
            )
            for _ in range(2)
        ]
        for rank in ranks:
            assert rank.stdout is not None
            await rank.stdout.readline()
        asked = asyncio.Event()
        stopped = asyncio.create_task(asked.wait())
        if stop:
            asked.set()
        end = await _end(ranks, None, stopped, 20)
        stopped.cancel()
        assert end.reason == ""
        return end.code

    assert asyncio.run(scenario()) == code
