"""The engine's thread: the event loop runs on during a call, and a call that hangs ends the learner."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from horizonrl.common.errors import RunFailed
from horizonrl.learner.algorithm.batch import Batch
from horizonrl.learner.engine.thread import EngineThread
from tests.learner.traces import make_batch
from tests.learner.world import HashEngine


def test_every_call_is_made_on_the_engines_own_thread(tmp_path: Path) -> None:
    names: list[str] = []

    class Watched(HashEngine):
        def train_step(self, batch: Batch, lr: float) -> Any:
            names.append(threading.current_thread().name)
            return super().train_step(batch, lr)

        def close(self) -> None:
            names.append(threading.current_thread().name)

    async def scenario() -> None:
        engine = EngineThread(Watched(), thread)
        stats = await engine.train_step(make_batch(), 0.5)
        assert stats.lr == 0.5
        digest = await engine.write_weights(tmp_path / "weights")
        await engine.save(tmp_path, {})
        resumed = EngineThread(HashEngine(), thread)
        assert await resumed.load(tmp_path) == {}
        assert await resumed.write_weights(tmp_path / "weights") == digest
        await engine.close()

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine") as thread:
        asyncio.run(scenario())
    assert names == ["engine_0", "engine_0"]


def test_a_call_that_hangs_ends_the_learner_with_the_setting_to_change() -> None:
    hanging = threading.Event()

    class Stuck(HashEngine):
        def train_step(self, batch: Batch, lr: float) -> Any:
            hanging.wait()

    async def scenario() -> None:
        engine = EngineThread(Stuck(), thread, timeout_s=0.05)
        with pytest.raises(
            RunFailed,
            match=r"engine's train_step took longer than learner\.step_timeout_s = 0\.05 s",
        ):
            await engine.train_step(Batch(traces=(), version=0), 0.5)
        hanging.set()

    with ThreadPoolExecutor(max_workers=1) as thread:
        asyncio.run(scenario())


def test_a_step_that_waits_for_a_checkpoint_has_its_own_time_after_it(tmp_path: Path) -> None:
    class Slow(HashEngine):
        def save(self, directory: Path, state: dict[str, Any]) -> None:
            time.sleep(0.3)

        def train_step(self, batch: Batch, lr: float) -> Any:
            time.sleep(0.3)
            return super().train_step(batch, lr)

    async def scenario() -> None:
        engine = EngineThread(Slow(), thread, timeout_s=0.5)
        saved = await engine.begin_save(tmp_path, {})
        await engine.train_step(make_batch(), 0.5)
        await saved

    with ThreadPoolExecutor(max_workers=1) as thread:
        asyncio.run(scenario())
