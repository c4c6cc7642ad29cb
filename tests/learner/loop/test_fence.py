"""One learner speaks for a run: a second one looks before it speaks, and whoever was replaced changes nothing more."""

import asyncio
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from horizonrl.broker.api import Key, Stream
from horizonrl.broker.groups import GroupLog
from horizonrl.broker.memory import MemoryServer, MemoryTransport
from horizonrl.broker.state import StateStore
from horizonrl.common.errors import CheckpointMismatch, Fenced, HorizonError, StateConflict
from horizonrl.common.service import _leaves
from horizonrl.common.state import Progress, WeightsManifest
from horizonrl.common.types import PolicyVersion
from horizonrl.learner.algorithm.batch import Batch
from horizonrl.learner.loop.fence import Fence
from horizonrl.ops.rundir.lines import read_lines
from tests.learner.world import InlineExecutor, MortalTransport, World
from tests.records import make_group

OVER_THE_BROKER = ("--broker.shared_files=false",)


async def said(server: MemoryServer, key: Key = Key.PROGRESS) -> Any:
    return await StateStore(MemoryTransport(server, "run")).get(key)


async def end_of(world: World) -> HorizonError:
    """Let the world's learner run alone and return what ended it."""
    with pytest.raises(ExceptionGroup) as ended:
        async with asyncio.timeout(10):
            await world.learner(MortalTransport(world.server, None)).run()
    return cause(ended.value)


def cause(ended: ExceptionGroup[Exception]) -> HorizonError:
    (error,) = _leaves(ended)
    assert isinstance(error, HorizonError)
    return error


def replaced_by(lineage: int) -> Progress:
    return Progress(policy=PolicyVersion(lineage=lineage))


def test_of_two_learners_one_goes_on_and_the_other_is_not_started_again(tmp_path: Path) -> None:
    """Both have the run's directory, one a copy of it; whoever ends is started again as `train` would do it."""

    async def supervise(name: str, world: World, lives: Counter[str]) -> bool:
        while True:
            lives[name] += 1
            try:
                await world.learner(MortalTransport(world.server, None)).run()
                return True
            except ExceptionGroup as ended:
                if cause(ended).exit_code == 2:
                    return False

    async def scenario() -> None:
        first = World(tmp_path / "a")
        await first.run()
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        longer = ("--rl.steps=40",)
        one, two = (World(tmp_path / name, server=first.server, overrides=longer) for name in "ab")
        lives: Counter[str] = Counter()
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            controller = group.create_task(one._relive("controller", one._control))
            actor = group.create_task(one._relive("actor", one._act))
            learners = [
                group.create_task(supervise(name, world, lives))
                for name, world in (("a", one), ("b", two))
            ]
            await asyncio.wait({controller, *learners})
            actor.cancel()
        assert sorted(learner.result() for learner in learners) == [False, True]
        assert lives.total() <= 3
        progress = await said(first.server)
        assert (progress.step, progress.finished) == (42, True)

    asyncio.run(scenario())


async def test_a_learner_with_an_empty_directory_leaves_the_healthy_one_alone(
    tmp_path: Path,
) -> None:
    healthy = World(tmp_path / "a", idle_from=4)
    running = asyncio.create_task(healthy.run())
    before = None
    # It waits for groups.
    while before is None or before.step < 4 or before != await said(healthy.server):
        before = await said(healthy.server)
        await asyncio.sleep(0.1)
    stranger = World(tmp_path / "b", server=healthy.server)
    error = await end_of(stranger)
    assert isinstance(error, CheckpointMismatch)
    assert f"the broker knows this run at step {before.step}, but" in str(error)
    assert error.exit_code == 2
    assert await said(healthy.server) == before
    assert not (stranger.config.run_dir / "lineages.jsonl").exists()
    healthy.idle_from = None
    await running
    assert [line["lineage"] for line in read_lines(healthy.config.run_dir / "lineages.jsonl")] == [
        0
    ]


async def test_a_learner_that_cannot_read_its_cursor_says_nothing(tmp_path: Path) -> None:
    """It has an old copy of the directory; the log was freed since."""

    first = World(tmp_path / "a")
    await first.run()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    before = await said(first.server)
    transport = MemoryTransport(first.server, "run")
    await transport.purge(
        Stream.GROUPS, below=(await transport.extent(Stream.GROUPS)).last_sequence
    )
    old = World(tmp_path / "b", server=first.server, overrides=("--rl.steps=9",))
    for place in sorted((old.config.run_dir / "checkpoints").iterdir())[1:]:
        shutil.rmtree(place)
    error = await end_of(old)
    assert isinstance(error, CheckpointMismatch)
    assert "has been purged" in str(error)
    assert await said(first.server) == before
    assert len(read_lines(old.config.run_dir / "lineages.jsonl")) == 1


async def test_a_run_that_has_not_been_trained_yet_may_begin_again_in_an_empty_directory(
    tmp_path: Path,
) -> None:
    first = World(tmp_path / "a", deaths={"learner": [12]})
    transport = MortalTransport(first.server, None)
    await StateStore(transport).put(Key.PROGRESS, Progress(policy=PolicyVersion(lineage=2)))
    await first.run()
    assert [line["lineage"] for line in read_lines(first.config.run_dir / "lineages.jsonl")] == [
        3,
        4,
    ]


async def test_a_replaced_learner_announces_no_weights_and_frees_no_log(tmp_path: Path) -> None:
    asyncio.get_running_loop().set_default_executor(InlineExecutor())
    saving = ("--learner.keep_log=false", "--learner.checkpoint_every=1")
    world = World(tmp_path, overrides=(*OVER_THE_BROKER, "--imitation.steps=0", *saving))
    successor = WeightsManifest(
        policy=PolicyVersion(version=7, lineage=3), weights_bytes=1, digest="d", path="f"
    )

    class Overtaken(world.make_engine):  # type: ignore[name-defined, misc]
        def train_step(self, batch: Batch, lr: float) -> Any:
            if batch.version == 2:
                for key, record in ((Key.PROGRESS, replaced_by(3)), (Key.POLICY, successor)):
                    put = StateStore(MemoryTransport(world.server, "run")).put(key, record)
                    with pytest.raises(StopIteration):
                        put.send(None)
            return super().train_step(batch, lr)

    world.make_engine = Overtaken
    streams = world.server.runs["run"].streams
    with pytest.raises(ExceptionGroup) as replaced:
        await world.run()
    assert replaced.group_contains(Fenced, match="another learner speaks")
    assert await said(world.server, Key.POLICY) == successor
    frames = {
        message.headers["Horizon-Policy"] for message in streams[Stream.WEIGHTS].messages.values()
    }
    assert frames == {"v1.l0", "v2.l0"}
    assert streams[Stream.GROUPS].first_sequence <= 3


async def spoken(server: MemoryServer, lineage: int) -> Fence:
    """Return the fence of a learner that has taken the run over."""
    fence = Fence(MemoryTransport(server, "run"))
    earlier, _ = await fence.look()
    await fence.take_over(earlier, replaced_by(lineage))
    return fence


async def test_the_last_word_of_a_fenced_learner_is_overwritten() -> None:
    server = MemoryServer()
    late = await spoken(server, 0)
    successor = await spoken(server, 1)
    manifest = WeightsManifest(
        policy=PolicyVersion(version=4, lineage=0), weights_bytes=1, digest="d", path="f"
    )
    # It had passed its check before.
    await StateStore(MemoryTransport(server, "run")).put(Key.POLICY, manifest)
    newer = manifest.model_copy(update={"policy": PolicyVersion(version=3, lineage=1)})
    await successor.publish(newer)
    with pytest.raises(Fenced):
        await late.publish(manifest)
    word = await said(server, Key.POLICY)
    assert word == newer.model_copy(update={"learner": word.learner})


class SlowTransport(MemoryTransport):
    """Answers a while after it has looked, and a while after it has set, as a broker behind a network does."""

    async def revision(self, key: Key) -> int:
        revision = await super().revision(key)
        await asyncio.sleep(0.02)
        return revision

    async def put(self, key: Key, data: bytes, after: int | None = None) -> int:
        revision = await super().put(key, data, after)
        await asyncio.sleep(0.01)
        return revision


async def test_a_learner_that_checks_while_it_announces_is_not_its_own_successor() -> None:
    """A checkpoint frees the log in the background, and the loop announces progress meanwhile."""

    fence = Fence(SlowTransport(MemoryServer(), "run"))
    await fence.look()
    await fence.take_over(None, Progress())
    for step in range(1, 4):
        word = Progress(step=step, policy=PolicyVersion(version=step))
        await asyncio.gather(fence.check(), fence.announce(word), fence.check())


async def test_a_learner_whose_last_word_was_lost_by_the_broker_may_start_again() -> None:
    server = MemoryServer()
    fence = await spoken(server, 1)
    before = server.runs["run"].state[Key.PROGRESS]
    await fence.announce(Progress(step=1, policy=PolicyVersion(version=1, lineage=1)))
    server.runs["run"].state[Key.PROGRESS] = before  # what a power cut leaves
    for call in (
        fence.check(),
        fence.announce(Progress(step=2, policy=PolicyVersion(version=2, lineage=1))),
    ):
        with pytest.raises(StateConflict, match="start the learner again") as lost:
            await call
        assert lost.value.exit_code == 1


async def test_a_learner_that_was_silent_while_another_took_over_is_fenced_at_once() -> None:
    """Also before the other one has said anything of its own."""

    server = MemoryServer()
    silent = await spoken(server, 1)
    await spoken(server, 2)
    with pytest.raises(Fenced) as fenced:
        await silent.check()
    assert fenced.value.exit_code == 2
    await GroupLog(MemoryTransport(server, "run")).publish(make_group(0))


async def test_a_learner_is_not_replaced_by_its_own_word_that_the_broker_had_before() -> None:
    """It says the same again while it waits for groups, and the broker loses the repeat."""
    server = MemoryServer()
    learner = await spoken(server, 0)
    run = server.runs["run"]
    backup, revision = dict(run.state), run.revision
    word = await said(server)
    await learner.announce(word)
    run.state, run.revision = backup, revision
    for call in (learner.announce(word), learner.check()):
        with pytest.raises(StateConflict, match="no longer holds what this learner announced"):
            await call


@pytest.mark.parametrize(
    ("last", "late"),
    [
        (replaced_by(1), replaced_by(1)),  # it waited for groups, and said the same again
        (replaced_by(1), Progress(step=1, policy=PolicyVersion(version=1, lineage=1))),
        (replaced_by(1), replaced_by(2)),  # it had taken the run over, and told the journal
        (None, replaced_by(3)),  # the first word of all: nothing else knows of that learner
    ],
)
async def test_a_learner_goes_on_after_a_late_word_of_a_dead_one(
    last: Progress | None, late: Progress
) -> None:
    server = MemoryServer()
    state = StateStore(MemoryTransport(server, "run"))
    if last is not None:
        await state.put(Key.PROGRESS, last)
    learner = Fence(MemoryTransport(server, "run"))
    earlier, _ = await learner.look()
    await state.put(Key.PROGRESS, late)
    assert not await learner.take_over(earlier, replaced_by(3))
    earlier, _ = await learner.look()
    assert await learner.take_over(earlier, replaced_by(3))
    assert await said(server) == late
    await learner.announce(replaced_by(3))


async def test_of_two_learners_that_look_at_once_one_is_fenced() -> None:
    """The first one, unless it has said by then that it has a lineage of its own: its repeat may be a late word."""
    for own_word in (False, True):
        server = MemoryServer()
        await StateStore(MemoryTransport(server, "run")).put(Key.PROGRESS, replaced_by(1))
        first, second = (Fence(MemoryTransport(server, "run")) for _ in range(2))
        for learner in (first, second):
            await learner.look()
        assert await first.take_over(replaced_by(1), replaced_by(2))
        if own_word:
            await first.announce(replaced_by(2))
            with pytest.raises(Fenced):
                await second.take_over(replaced_by(1), replaced_by(2))
            await first.check()
        else:
            assert not await second.take_over(replaced_by(1), replaced_by(2))
            assert await second.take_over(replaced_by(1), replaced_by(2))
            with pytest.raises(Fenced):
                await first.announce(replaced_by(2))
            await second.announce(replaced_by(2))


async def test_a_learner_is_fenced_by_weights_of_its_own_lineage() -> None:
    """Two policies would have one name: the other learner has yet to say that it has the lineage."""
    server = MemoryServer()
    learner, other = Fence(MemoryTransport(server, "run")), await spoken(server, 1)
    earlier, _ = await learner.look()
    await other.announce(replaced_by(1))
    await other.publish(
        WeightsManifest(policy=PolicyVersion(lineage=2), weights_bytes=1, digest="d", path="f")
    )
    with pytest.raises(Fenced):
        await learner.take_over(earlier, replaced_by(2))


async def test_a_learner_that_has_not_spoken_takes_over_a_store_that_goes_back() -> None:
    server = MemoryServer()
    earlier = await spoken(server, 0)
    run = server.runs["run"]
    backup, revision = dict(run.state), run.revision
    await earlier.announce(await said(server))
    learner = Fence(MemoryTransport(server, "run"))
    await learner.look()
    run.state, run.revision = backup, revision
    assert not await learner.take_over(replaced_by(0), replaced_by(1))
    assert await learner.take_over(replaced_by(0), replaced_by(1))


class TalkativeTransport(MortalTransport):
    """Lets a word of an earlier learner come in each time that this one has looked at the log, twice."""

    words: list[Progress]
    below = 0
    """With each word, the log is freed so far."""

    async def extent(self, stream: Stream) -> Any:
        extent = await super().extent(stream)
        if stream is Stream.GROUPS and self.words:
            other = MemoryTransport(self.server, "run")
            await StateStore(other).put(Key.PROGRESS, self.words.pop())
            await other.purge(Stream.GROUPS, below=self.below)
        return extent


async def resumed_among(world: World, words: list[Progress], below: int = 0) -> None:
    transport = TalkativeTransport(world.server, None)
    transport.words, transport.below = words, below
    async with asyncio.timeout(10):
        await world.learner(transport).run()


async def test_a_run_goes_on_though_words_come_late(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.run()
    last = await said(world.server)
    again = World(tmp_path, server=world.server)
    await resumed_among(again, [last, last.model_copy(update={"cursor": last.cursor - 1})])
    lines = read_lines(world.config.run_dir / "lineages.jsonl")
    assert [line["lineage"] for line in lines] == [0, 1]
    assert (await said(world.server)).policy.lineage == 1


@pytest.mark.parametrize("empty", [True, False])
async def test_a_learner_that_may_not_resume_any_more_says_nothing(
    tmp_path: Path, empty: bool
) -> None:
    """While it started, the run's learner has taken the first step, or freed what this one needs."""
    first = World(tmp_path / "a")
    await first.run()
    last = await said(first.server)
    if empty:
        await StateStore(MemoryTransport(first.server, "run")).put(
            Key.PROGRESS, Progress(policy=last.policy)
        )
    else:
        shutil.copytree(tmp_path / "a", tmp_path / "b")
    late = World(tmp_path / "b", server=first.server, overrides=("--rl.steps=9",))
    for directory in sorted((late.config.run_dir / "checkpoints").glob("*"))[1:]:
        shutil.rmtree(directory)
    with pytest.raises(ExceptionGroup) as ended:
        await resumed_among(late, [last], below=0 if empty else last.cursor)
    assert isinstance(cause(ended.value), CheckpointMismatch)
    assert await said(first.server) == last
