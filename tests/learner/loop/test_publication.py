"""A version on its way to the actors while the next step trains: what waits for it, and what its loss costs."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from horizonrl.broker.api import Key
from horizonrl.broker.codec import decode
from horizonrl.broker.weights.frames import digest_file
from horizonrl.common.run_dir import METRICS
from horizonrl.common.state import Progress, WeightsManifest
from horizonrl.learner.algorithm.batch import Batch
from horizonrl.learner.engine.api import StepStats
from horizonrl.learner.engine.checkpoint.weights_file import WEIGHTS_FILE
from horizonrl.learner.records.checkpoint import CheckpointStore
from horizonrl.ops.rundir.lines import read_lines
from tests.learner.world import HashEngine, MortalTransport, World

HELD = (3, 4)
"""Steps of RL: their tickets are out before the version before them is."""


@dataclass
class Held:
    """What happens to the files of some versions, which are written when the next step has been trained."""

    versions: tuple[int, ...] = HELD
    events: list[tuple[str, int]] = field(default_factory=list)
    when_trained: Callable[[int, Future[str], Callable[[], str]], None] = lambda _, written, write: (
        written.set_result(write())
    )
    """Called with the version, its future and what writes its file, after the next step's training."""

    def engine(self) -> HashEngine:
        return HoldingEngine(self)


class HoldingEngine(HashEngine):
    def __init__(self, held: Held) -> None:
        super().__init__()
        self._held = held
        self._version = 0
        self._waiting: tuple[int, Future[str], Callable[[], str]] | None = None

    def train_step(self, batch: Batch, lr: float) -> StepStats:
        stats = super().train_step(batch, lr)
        self._held.events.append(("trained", batch.version + 1))
        self._version = batch.version + 1
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            self._held.when_trained(*waiting)
        return stats

    def begin_write_weights(self, path: Path) -> "Future[str]":
        version = self._version
        self._held.events.append(("begun", version))
        if version not in self._held.versions:
            return super().begin_write_weights(path)
        copied = HashEngine()
        copied.weights = self.weights

        def write() -> str:
            self._held.events.append(("written", version))
            return copied.write_weights(path)

        written: Future[str] = Future()
        self._waiting = version, written, write
        return written


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Return what the learner has told: the key and the step or version that it named, in order."""
    puts: list[tuple[str, int]] = []
    put = MortalTransport.put

    async def recording(
        transport: MortalTransport, key: Key, value: bytes, *more: Any, **named: Any
    ) -> Any:
        stored = await put(transport, key, value, *more, **named)
        if key is Key.PROGRESS:
            puts.append(("progress", decode(value, Progress).step))
        elif key is Key.POLICY:
            puts.append(("policy", decode(value, WeightsManifest).policy.version))
        return stored

    monkeypatch.setattr(MortalTransport, "put", recording)
    return puts


def test_the_next_step_trains_while_a_version_is_published_and_its_commit_waits(
    tmp_path: Path, told: list[tuple[str, int]]
) -> None:
    def later(version: int, written: "Future[str]", write: Callable[[], str]) -> None:
        assert len(world.ledger()) == version - 1  # neither this step nor the next one is told of
        assert told[-1] == ("progress", version - 1)
        asyncio.get_running_loop().call_later(0.05, lambda: written.set_result(write()))

    held = Held(when_trained=later)
    world = World(tmp_path, make_engine=held.engine)

    async def scenario() -> None:
        await world.run()
        await world.check()

    asyncio.run(scenario())
    for version in HELD:
        order = [("trained", version + 1), ("written", version), ("begun", version + 1)]
        assert [event for event in held.events if event in order] == order
    # The weights come before the progress that names them: the controller answers it with tickets of this version.
    for step in range(world.config.imitation.steps, world.config.total_steps + 1):
        assert told.index(("policy", step)) < told.index(("progress", step))
    assert [step for key, step in told if key == "progress"] == sorted(
        step for key, step in told if key == "progress"
    )
    lines = read_lines(world.config.run_dir / METRICS)
    assert [line["weights_publish_s"] > 0.04 for line in lines if line["step"] in HELD] == [
        True,
        True,
    ]


def test_a_checkpoint_has_the_file_of_its_version_although_that_is_written_later(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, make_engine=Held().engine, overrides=("--learner.keep_checkpoints=9",))
    asyncio.run(world.run())
    digests = [line["weights_digest"] for line in world.ledger()]
    for checkpoint in CheckpointStore(world.config.run_dir / "checkpoints", 9).all():
        assert digest_file(checkpoint.path / WEIGHTS_FILE) == digests[checkpoint.step - 1]


async def test_a_version_that_cannot_be_written_ends_the_run_and_nothing_later_is_committed(
    tmp_path: Path,
) -> None:
    def fail(_: int, written: "Future[str]", __: Callable[[], str]) -> None:
        written.set_exception(OSError(28, "No space left on device"))

    world = World(tmp_path, make_engine=Held(when_trained=fail).engine)
    with pytest.raises(ExceptionGroup) as failed:
        await world.run()
    assert failed.group_contains(OSError, match="No space left", depth=2)
    assert [line["step"] for line in world.ledger()] == [1, 2]
    again = World(tmp_path, server=world.server)
    await again.run()
    await again.check()


async def test_a_learner_that_is_killed_while_a_version_is_published_trains_the_same_again(
    tmp_path: Path,
) -> None:
    alive = set(HELD)

    def kill(version: int, written: "Future[str]", write: Callable[[], str]) -> None:
        if version in alive:
            alive.remove(version)
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        else:
            written.set_result(write())

    # It dies by `kill` and not in a request.
    never = [10**9] * len(HELD)
    world = World(tmp_path, make_engine=Held(when_trained=kill).engine, deaths={"learner": never})
    await world.run()
    assert world.lives["learner"] == 1 + len(HELD)
    await world.check()


async def test_a_learner_that_is_stopped_while_a_version_is_published_saves_that_version(
    tmp_path: Path,
) -> None:
    def stop(_: int, written: "Future[str]", write: Callable[[], str]) -> None:
        world.stopping.set()
        asyncio.get_running_loop().call_later(0.05, lambda: written.set_result(write()))

    world = World(tmp_path, make_engine=Held((3,), when_trained=stop).engine)
    running = asyncio.create_task(world.run())
    store = CheckpointStore(world.config.run_dir / "checkpoints", 2)
    async with asyncio.timeout(30):
        while not world.stopping.is_set() or (newest := store.newest()) is None or newest.step < 4:
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)
    running.cancel()
    await asyncio.wait([running])
    # The step that was in training is committed too: its groups need not be trained again.
    assert [line["step"] for line in world.ledger()] == [1, 2, 3, 4]
    again = World(tmp_path, server=world.server)
    await again.run()
    await again.check()
