"""Packages are quiet in their own thread alone, and however the threads' calls overlap nothing of it is left."""

import asyncio
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

from horizonrl.envs import registry
from horizonrl.envs.hubs.packages import quiet
from tests.envs.hubs.guess import GUESS


def test_what_a_thread_prints_and_warns_of_is_dropped_in_that_thread_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    entered, leave = threading.Event(), threading.Event()

    def muted() -> None:
        with quiet():
            print("from the package")
            warnings.warn("of the package", UserWarning, stacklevel=1)
            entered.set()
            leave.wait(10)

    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(muted)
        assert entered.wait(10)
        print("from us")
        with pytest.warns(UserWarning, match="of ours"):
            warnings.warn("of ours", UserWarning, stacklevel=1)
        leave.set()
        done.result(10)
    assert capsys.readouterr().out == "from us\n"


def test_two_threads_that_leave_in_the_order_in_which_they_came_leave_everything_as_it_was() -> (
    None
):
    stdout, shown = sys.stdout, warnings.showwarning
    first_left = threading.Event()

    def second() -> None:
        with quiet():
            inside.set()
            first_left.wait(10)

    for _ in range(3):
        inside = threading.Event()
        first_left.clear()
        with ThreadPoolExecutor(1) as thread:
            with quiet():
                with quiet():
                    pass
                done = thread.submit(second)
                assert inside.wait(10)
            first_left.set()
            done.result(10)
        assert sys.stdout is stdout
        assert warnings.showwarning is shown
        with pytest.raises(UserWarning, match="of ours"):
            warnings.warn("of ours", UserWarning, stacklevel=1)


def test_stdout_is_what_it_was_after_256_episodes_at_once() -> None:
    async def play(number: int) -> None:
        await asyncio.sleep(number % 16 / 100)
        environment = registry.make("gymnasium", {"id": GUESS, "format": "plain"})
        await environment.reset(f"seed-{number}")
        while not ((step := await environment.step("3")).terminated or step.truncated):
            pass
        await environment.close()

    async def play_all() -> None:
        await asyncio.gather(*(play(number) for number in range(256)))

    stdout, before = sys.stdout, sys.getswitchinterval()
    try:
        sys.setswitchinterval(1e-6)  # so that the threads overlap
        asyncio.run(play_all())
    finally:
        sys.setswitchinterval(before)
    assert sys.stdout is stdout
    with pytest.raises(UserWarning, match="of ours"):
        warnings.warn("of ours", UserWarning, stacklevel=1)
