"""Which calls cost a JVM its life: one that hangs, whoever has waited for it and however briefly, and no other."""

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("scienceworld")

from py4j.protocol import Py4JNetworkError

from horizonrl.common.errors import EnvironmentTimeout
from horizonrl.envs.worlds.sciworld import jvm
from horizonrl.envs.worlds.sciworld.jvm import Jvm, Simulation

CALL_S = 1.0


class StubProcess:
    stdin = stdout = stderr = None

    def __init__(self) -> None:
        self.dead = threading.Event()

    def poll(self) -> int | None:
        return 0 if self.dead.is_set() else None

    def kill(self) -> None:
        self.dead.set()

    def wait(self) -> None:
        pass


class StubJvm(Jvm):
    """A JVM without Java, whose calls do what they are told to."""

    def _start(self) -> None:
        self.kill()
        process: Any = StubProcess()
        self._process, self._gateway = process, SimpleNamespace(close=lambda: None)
        self.starts += 1

    def hang(self, _: Any) -> None:
        process: Any = self._process
        process.dead.wait(30)
        raise Py4JNetworkError("killed")


def answer(_: Any) -> str:
    return "answer"


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> tuple[StubJvm, StubJvm]:
    jvms = StubJvm(), StubJvm()
    monkeypatch.setattr(jvm, "CALL_S", CALL_S)
    monkeypatch.setattr(jvm, "SLOW_S", 0.1)
    monkeypatch.setattr(jvm, "_pool", lambda: jvms)
    monkeypatch.setattr(jvm, "require_java", lambda: None)
    monkeypatch.setattr(
        Simulation, "made_in", lambda one, _: Simulation(one, one.starts, None, None)
    )
    return jvms


async def given_up(one: StubJvm) -> None:
    """Call what hangs, and wait for less than CALL_S, as a rollout does."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await one.call(one.hang)


async def test_a_call_that_hangs_is_ended_by_the_next_one_though_its_caller_gave_up_early(
    pool: tuple[StubJvm, StubJvm],
) -> None:
    await given_up(pool[0])
    await asyncio.sleep(CALL_S)
    async with asyncio.timeout(CALL_S / 2):
        assert await pool[0].call(answer) == "answer"
    assert pool[0].starts == 2


async def test_a_caller_that_gives_up_ends_the_call_that_hung_before_its_own(
    pool: tuple[StubJvm, StubJvm],
) -> None:
    await given_up(pool[0])
    process: Any = pool[0]._process
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(CALL_S):
            await pool[0].call(answer)
    assert process.dead.is_set()


async def test_a_long_line_of_calls_ends_no_jvm(pool: tuple[StubJvm, StubJvm]) -> None:
    one = pool[0]
    calls = (one.call(lambda _: time.sleep(0.6 * CALL_S)) for _ in range(2))
    first, second = await asyncio.gather(*calls, return_exceptions=True)
    assert first is None
    assert isinstance(second, EnvironmentTimeout)
    assert await one.call(answer) == "answer"
    assert one.starts == 1


def test_an_expert_that_waits_for_a_call_that_hangs_ends_it(pool: tuple[StubJvm, StubJvm]) -> None:
    with pytest.raises(EnvironmentTimeout, match="its JVM was killed"):
        pool[0].wait_for(pool[0].hang)
    assert pool[0].wait_for(answer) == "answer"


async def test_new_episodes_avoid_a_jvm_whose_call_hangs_and_end_it_in_the_end(
    pool: tuple[StubJvm, StubJvm],
) -> None:
    hung, other = pool
    other.simulations = 7
    await given_up(hung)
    async with asyncio.timeout(CALL_S / 2):
        assert (await Simulation.open())._jvm is other
    await asyncio.sleep(CALL_S)
    async with asyncio.timeout(CALL_S / 2):
        assert (await Simulation.open())._jvm is hung
