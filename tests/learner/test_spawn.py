"""The exit code of a learner with several ranks on one machine."""

import asyncio
import signal
import sys

import pytest

from horizonrl.learner.spawn import _end

RANK = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # as a rank: it has finished its step
print(flush=True)
time.sleep(float(sys.argv[1]))
"""


@pytest.mark.parametrize(("stop", "code"), [(True, 128 + signal.SIGTERM), (False, 0)])
def test_ranks_that_were_asked_to_stop_do_not_end_as_if_the_run_was_over(stop: bool, code: int) -> None:
    async def scenario() -> int:
        work_s = "60" if stop else "0"
        ranks = [
            await asyncio.create_subprocess_exec(sys.executable, "-c", RANK, work_s, stdout=asyncio.subprocess.PIPE)
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
