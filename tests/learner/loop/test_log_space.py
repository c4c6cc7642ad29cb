"""The group log's bound: a run that meets it goes on, or ends and says what to do; it never waits for ever."""

import asyncio
from pathlib import Path

import pytest
from structlog.testing import CapturingLogger

from horizonrl.broker.api import Stream
from horizonrl.broker.groups import GroupLog
from horizonrl.broker.memory import MemoryServer, MemoryTransport
from horizonrl.common.errors import ConfigError, LogFull
from horizonrl.learner.records.checkpoint import CheckpointStore
from tests.learner.world import World
from tests.records import make_group

GROUP_BYTES = 845
"""Of a train group, as the world plays them."""
RARELY = ("--learner.checkpoint_every=100", "--rl.steps=18")
FREED = ("--learner.keep_log=false", *RARELY)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horizonrl.learner.loop.log_intake.LOOK_S", 0.02)
    monkeypatch.setattr("horizonrl.learner.loop.log_intake.QUIET_S", 0.1)


def small(tmp_path: Path, groups: float, overrides: tuple[str, ...] = FREED) -> World:
    """Return a world whose log holds so many groups."""
    server = MemoryServer(ack_wait_s=0.05, max_log_bytes=int(groups * GROUP_BYTES))
    return World(tmp_path, server=server, overrides=overrides)


async def finish(world: World) -> None:
    async with asyncio.timeout(30):
        await world.run()
    assert [line["step"] for line in world.ledger()] == list(range(1, world.config.total_steps + 1))


@pytest.mark.parametrize("groups", [4, 10])
def test_a_log_that_fills_up_is_freed_by_a_checkpoint_ahead_of_its_time(
    tmp_path: Path, groups: int
) -> None:
    world = small(tmp_path, groups)
    asyncio.run(finish(world))
    assert world.server.runs["run"].streams[Stream.GROUPS].stored_bytes <= groups * GROUP_BYTES


@pytest.mark.parametrize("death", [40, 90, 140])
def test_a_learner_that_dies_at_a_full_log_frees_it_when_it_is_back(
    tmp_path: Path, death: int
) -> None:
    world = small(tmp_path, 4)
    world.deaths = {"learner": [death, 60, 60]}
    asyncio.run(finish(world))


async def test_what_a_crash_left_between_a_checkpoint_and_its_purge_is_freed_at_the_start(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, overrides=(*FREED, "--learner.checkpoint_every=2"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryTransport, "purge", lambda *_, **__: asyncio.sleep(0))
        await finish(world)
    log = world.server.runs["run"].streams[Stream.GROUPS]
    assert log.first_sequence == 1
    again = World(tmp_path, server=world.server, overrides=world.overrides)
    await finish(again)
    assert log.first_sequence > 20


def test_what_a_checkpoint_holds_for_a_later_step_is_not_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = (
        *FREED,
        "--learner.checkpoint_every=1",
        "--learner.keep_checkpoints=1",
        "--rl.steps=8",
    )
    world = World(
        tmp_path, hand=5, patience_s=0.3, server=MemoryServer(ack_wait_s=5), overrides=overrides
    )
    purged: list[tuple[int, list[int]]] = []
    purge = GroupLog.purge_below

    async def noted(self: GroupLog, sequence: int) -> None:
        newest = CheckpointStore(world.config.run_dir / "checkpoints", 1).newest()
        assert newest is not None
        purged.append((sequence, newest.held))
        await purge(self, sequence)

    monkeypatch.setattr(GroupLog, "purge_below", noted)
    asyncio.run(finish(world))
    assert any(held for _, held in purged), "groups came out of order"
    assert all(sequence <= min(held, default=sequence) for sequence, held in purged)


def test_a_log_that_cannot_hold_a_step_ends_the_run_with_numbers_and_the_fix(
    tmp_path: Path,
) -> None:
    overrides = (*FREED, "--rl.groups_per_step=6")
    with pytest.raises(ExceptionGroup) as ended:
        asyncio.run(finish(small(tmp_path, 5.5, overrides)))
    message = r"full \(\d,\d+ of 4,647 bytes\) with [1-5] of 18 groups .* broker\.max_log_bytes to [\d,]+ or more"
    assert ended.group_contains(LogFull, match=message)
    assert LogFull.exit_code == ConfigError.exit_code


@pytest.mark.parametrize("groups", [4.6, 5.5])
def test_a_log_that_is_full_of_parts_ends_the_run_too(tmp_path: Path, groups: float) -> None:
    # Each group is two parts and a join: what is waited with is larger than the usual message.
    server = MemoryServer(
        ack_wait_s=0.05, max_log_bytes=int(groups * GROUP_BYTES), max_payload_bytes=700
    )
    with pytest.raises(ExceptionGroup) as ended:
        asyncio.run(
            finish(World(tmp_path, server=server, overrides=(*FREED, "--rl.groups_per_step=6")))
        )
    assert ended.group_contains(LogFull, match=r"with [1-5] of 18 groups")


async def test_a_log_that_is_kept_whole_ends_the_run_when_it_is_full_and_says_so_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = CapturingLogger()
    monkeypatch.setattr("horizonrl.learner.loop.log_space.log", log)
    kept = ("--learner.keep_log=true", "--learner.checkpoint_every=2", "--rl.steps=18")

    world = small(tmp_path, 20, kept)
    with pytest.raises(ExceptionGroup) as ended:
        await finish(world)
    assert ended.group_contains(
        LogFull, match=r"learner\.keep_log keeps all of it: raise broker\.max_log_bytes"
    )
    (foreseen,) = [call.kwargs for call in log.calls if call.args == ("log_will_fill",)]
    assert foreseen["needed_bytes"] > world.server.max_log_bytes
    assert len(world.ledger()) >= 8
    world.server.max_log_bytes *= 10
    again = World(tmp_path, server=world.server, overrides=kept)
    await finish(again)
    await again.check()


async def test_a_group_that_is_larger_than_the_log_ends_its_actor_instead_of_waiting_for_ever() -> (
    None
):
    log = GroupLog(MemoryTransport(MemoryServer(max_log_bytes=300)))
    with pytest.raises(ConfigError, match=r"has \d+ bytes, .* broker\.max_log_bytes = 300"):
        async with asyncio.timeout(5):
            await log.publish(make_group(0))
