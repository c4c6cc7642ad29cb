"""A call that never returns has the only thread of all environments: the process ends and says where it stands."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, time
from horizonrl.envs import in_thread

in_thread.STUCK_S = 0.5

def generating_for_ever():
    time.sleep(float({sleep_s}))

async def give_up(call):
    try:
        async with asyncio.timeout(0.2):
            await in_thread.in_thread(call)
    except TimeoutError:
        print("gave up", flush=True)

async def main():
    for call in (generating_for_ever, list, list, list, list, list):
        await give_up(call)

asyncio.run(main())
print("went on", flush=True)
"""


@pytest.mark.parametrize(
    ("sleep_s", "code"), [(0.35, 0), (60, os.EX_SOFTWARE)], ids=["slow", "stuck"]
)
def test_a_call_that_never_returns_ends_the_process_and_a_slow_one_does_not(
    sleep_s: float, code: int
) -> None:
    program = PROGRAM.format(sleep_s=sleep_s)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == code, done.stderr
    assert "gave up" in done.stdout
    assert ("went on" in done.stdout) == (code == 0)
    assert ("in generating_for_ever" in done.stderr) == (code != 0)
