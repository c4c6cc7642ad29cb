"""The actor's loop over the in-memory broker: every way in which a lease ends."""

import asyncio
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from horizonrl.actors.loop import ActorLoop, ActorSettings
from horizonrl.actors.rollout.faults import DEFECTS_TRIED
from horizonrl.actors.rollout.rollout import Rollout
from horizonrl.actors.weights.follower import WeightsFollower
from horizonrl.broker.api import Key, Stored, Transport
from horizonrl.broker.codec import encode
from horizonrl.broker.groups import Entry, GroupLog
from horizonrl.broker.memory import MemoryDelivery, MemoryServer, MemoryTransport
from horizonrl.broker.state import StateStore
from horizonrl.broker.tickets import TicketQueue
from horizonrl.common.errors import BrokerUnreachable, ConfigError, EngineDead, RecordTooLarge
from horizonrl.common.state import WeightsManifest
from horizonrl.common.types import Group, Kind, PolicyVersion, Provenance, Task, Ticket, Void
from horizonrl.envs.api import Observation, Step
from tests.actors.players import Breaking, Echo, Hanging, SayingPolicy, make_chat

CHAT = make_chat()


def ticket(number: int = 0) -> Ticket:
    return Ticket(
        number=number,
        kind=Kind.TRAIN,
        task=Task(env_id="echo", task_id="say"),
        group_size=2,
        horizon_turns=4,
    )


def actor(
    transport: Transport,
    scratch: Path,
    environment: Callable[[], Echo] = Echo,
    policy: SayingPolicy | None = None,
    drain_s: float = 1.0,
    slots: int = 4,
) -> ActorLoop:
    policy = policy or SayingPolicy(CHAT)
    return ActorLoop(
        settings=ActorSettings(
            slots=slots, group_size=2, max_deliver=2, drain_s=drain_s, total_steps=10
        ),
        transport=transport,
        rollouts={"echo": Rollout(policy, CHAT, None, step_timeout_s=30.0)},
        make_environment=lambda _: environment(),
        follower=WeightsFollower(transport, policy, scratch),
        provenance=Provenance(actor="test"),
        stopping=asyncio.Event(),
    )


async def entries(transport: Transport, count: int) -> list[Entry]:
    reader = await GroupLog(transport).read(after=0)
    found = [await reader.next(timeout_s=5.0) for _ in range(count)]
    return [entry for entry in found if entry is not None]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not holds():
            await asyncio.sleep(0.01)


async def test_each_ticket_becomes_one_group_and_is_acknowledged(tmp_path: Path) -> None:
    damaged = PolicyVersion(version=3)

    transport = MemoryTransport(MemoryServer(), "run")
    for number in range(5):
        await TicketQueue(transport).issue(ticket(number))
    loop = actor(transport, tmp_path)
    loop.follower.damaged = damaged
    running = asyncio.create_task(loop.run())
    records = [entry.record for entry in await entries(transport, 5)]
    loop.stopping.set()
    await running
    assert sorted(record.ticket.number for record in records if isinstance(record, Group)) == [
        0,
        1,
        2,
        3,
        4,
    ]
    assert {record.damaged_version for record in records if isinstance(record, Group)} == {damaged}
    assert (await transport.queue()).leased == 0


def test_an_actor_tells_from_time_to_time_what_it_has_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("horizonrl.actors.loop.TELL_S", 0.01)

    async def scenario() -> None:
        transport = MemoryTransport(MemoryServer(), "run")
        loop = actor(transport, tmp_path)
        running = asyncio.create_task(loop.run())
        await TicketQueue(transport).issue(ticket())
        await until(lambda: {"groups": 1, "running": 0, "free": 4} in told(logs))
        loop.stopping.set()
        await running

    with capture_logs() as logs:
        asyncio.run(scenario())


def told(logs: Sequence[MutableMapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {key: log[key] for key in ("groups", "running", "free")}
        for log in logs
        if log["event"] == "groups_played"
    ]


def test_a_group_that_breaks_each_time_ends_as_void_after_max_deliver(tmp_path: Path) -> None:
    async def scenario() -> None:
        transport = MemoryTransport(MemoryServer(), "run")
        await TicketQueue(transport).issue(ticket())
        loop = actor(transport, tmp_path, environment=Breaking)
        running = asyncio.create_task(loop.run())
        (entry,) = await entries(transport, 1)
        loop.stopping.set()
        await running
        assert isinstance(entry.record, Void)
        assert entry.record.reason.startswith(
            "2 deliveries made no group; the last one broke: RuntimeError: the kitchen"
        )
        assert (await transport.queue()).leased == 0
        assert loop.metrics.value("tickets_given_back_total", reason="broken") == 1
        assert loop.metrics.value("leases_repeated_total") == 1

    import horizonrl.actors.loop as loop_module

    loop_module.RETRY_DELAY_S, before = 0.01, loop_module.RETRY_DELAY_S
    try:
        asyncio.run(scenario())
    finally:
        loop_module.RETRY_DELAY_S = before


async def test_a_ticket_that_cannot_fit_ends_as_void_at_once_with_its_reason(
    tmp_path: Path,
) -> None:
    transport = MemoryTransport(MemoryServer(), "run")
    await TicketQueue(transport).issue(ticket())
    loop = actor(transport, tmp_path, policy=SayingPolicy(CHAT, max_context_tokens=20))
    running = asyncio.create_task(loop.run())
    (entry,) = await entries(transport, 1)
    loop.stopping.set()
    await running
    assert isinstance(entry.record, Void)
    assert entry.record.reason.startswith("the first prompt has ")
    assert loop.metrics.value("tickets_void_total", reason="unfit") == 1
    assert loop.metrics.value("leases_total", kind="train") == 1


async def test_a_group_too_large_for_any_record_ends_as_void_and_the_actor_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(group: Group | Void) -> bytes:
        if isinstance(group, Group) and group.ticket.number == 0:
            raise RecordTooLarge("70000000 bytes, more than 67108864")
        return encode(group)

    monkeypatch.setattr("horizonrl.broker.groups.encode", too_large)

    transport = MemoryTransport(MemoryServer(), "run")
    for number in range(2):
        await TicketQueue(transport).issue(ticket(number))
    loop = actor(transport, tmp_path, slots=2)
    running = asyncio.create_task(loop.run())
    void, group = [entry.record for entry in await entries(transport, 2)]
    loop.stopping.set()
    await running
    assert isinstance(void, Void)
    assert void.reason.startswith("70000000 bytes")
    assert isinstance(group, Group)


def test_an_actor_ends_when_nothing_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        transport = MemoryTransport(MemoryServer(), "run")
        for number in range(3):
            await TicketQueue(transport).issue(ticket(number))
        loop = actor(transport, tmp_path, policy=SayingPolicy(CHAT, max_context_tokens=20), slots=2)
        with pytest.raises(ExceptionGroup) as ended:
            await loop.run()
        assert ended.group_contains(
            ConfigError, match=r"3 tickets in a row did not fit.*raise model\.max_context_tokens"
        )
        assert len(await entries(transport, 3)) == 3

    monkeypatch.setattr("horizonrl.actors.loop.UNFIT_LIMIT", 3)
    asyncio.run(scenario())


class AnswersATuple(Echo):
    """Breaks its contract in every step, but for the first `good` episodes."""

    good = 0
    played = 0

    async def reset(self, task_id: str) -> Observation:
        AnswersATuple.played += 1
        self.last, self.number = 1, AnswersATuple.played
        return await super().reset(task_id)

    async def step(self, text: str) -> Step:
        answer = await super().step(text)
        return answer if self.number <= self.good else ("", 1.0, True)  # type: ignore[return-value]


@pytest.mark.parametrize("good", [0, 2])
async def test_an_actor_ends_when_the_code_of_an_environment_fails_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, good: int
) -> None:
    monkeypatch.setattr("horizonrl.actors.loop.RETRY_DELAY_S", 0.0)
    monkeypatch.setattr(AnswersATuple, "good", good)
    monkeypatch.setattr(AnswersATuple, "played", 0)

    transport = MemoryTransport(MemoryServer(), "run")
    for number in range(30):
        await TicketQueue(transport).issue(ticket(number))
    loop = actor(transport, tmp_path, environment=AnswersATuple)
    running = asyncio.create_task(loop.run())
    if good:  # it may work again
        await until(lambda: AnswersATuple.played > 2 * DEFECTS_TRIED)
        loop.stopping.set()
        await running
        return
    with pytest.raises(ExceptionGroup) as ended:
        await running
    assert ended.group_contains(
        ConfigError,
        match=r"no episode of echo went well.* AnswersATuple\.step returned a tuple; by contract "
        r"it is a Step\(observation, reward, terminated\) at /.+/test_loop\.py:\d+ \(echo.*Mend it",
    )
    assert DEFECTS_TRIED <= AnswersATuple.played <= DEFECTS_TRIED + 4  # of those under way
    assert loop.metrics.value("tickets_given_back_total", reason="failed") >= 1


async def test_a_ticket_of_an_environment_that_this_actor_does_not_play_is_left_to_others(
    tmp_path: Path,
) -> None:
    transport = MemoryTransport(MemoryServer(), "run")
    foreign = ticket().model_copy(update={"task": Task(env_id="chess", task_id="mate")})
    await TicketQueue(transport).issue(foreign)
    loop = actor(transport, tmp_path)
    running = asyncio.create_task(loop.run())
    await until(lambda: loop.metrics.value("tickets_given_back_total", reason="broken") == 1)
    loop.stopping.set()
    await running
    assert loop.metrics.value("episodes_total", env="chess", stop="env_error") == 2


def test_an_environment_that_does_not_close_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clinging(Echo):
        async def close(self) -> None:
            await asyncio.Event().wait()

    async def scenario() -> None:
        transport = MemoryTransport(MemoryServer(), "run")
        await TicketQueue(transport).issue(ticket())
        loop = actor(transport, tmp_path, environment=Clinging)
        running = asyncio.create_task(loop.run())
        assert len(await entries(transport, 1)) == 1
        loop.stopping.set()
        await running

    monkeypatch.setattr("horizonrl.actors.rollout.rollout.CLOSE_S", 0.01)
    asyncio.run(scenario())


class Remote(MemoryTransport):
    """A transport whose broker may be away: publishes wait for it, extensions of a lease fail meanwhile."""

    def __init__(self, server: MemoryServer) -> None:
        super().__init__(server, "run")
        self.there = asyncio.Event()
        self.there.set()

    async def publish(self, *arguments: Any, **named: Any) -> Stored:
        await self.there.wait()
        return await super().publish(*arguments, **named)

    async def lease(self, timeout_s: float) -> MemoryDelivery | None:
        delivery = await super().lease(timeout_s)
        if delivery is not None:
            extend = delivery.extend

            async def extend_if_there() -> None:
                if not self.there.is_set():
                    raise BrokerUnreachable("away")
                await extend()

            delivery.extend = extend_if_there  # type: ignore[method-assign]
        return delivery


async def test_finished_groups_outlive_a_broker_that_is_away_for_longer_than_a_lease(
    tmp_path: Path,
) -> None:
    transport = Remote(MemoryServer(ack_wait_s=0.2))
    for number in range(3):
        await TicketQueue(transport).issue(ticket(number))
    loop = actor(transport, tmp_path, slots=4)
    transport.there.clear()
    running = asyncio.create_task(loop.run())
    await until(lambda: loop.metrics.value("episodes_total", env="echo", stop="terminated") == 4)
    await asyncio.sleep(0.6)
    assert loop.metrics.value("leases_total", kind="train") == 2, "it waits with two groups in hand"
    transport.there.set()
    records = [entry.record for entry in await entries(transport, 3)]
    loop.stopping.set()
    await running
    assert len({record.ticket.number for record in records if isinstance(record, Group)}) == 3
    assert loop.metrics.value("tickets_given_back_total", reason="lease_lost") == 0


async def test_small_groups_fill_the_slots_that_a_whole_group_leaves(tmp_path: Path) -> None:
    transport = MemoryTransport(MemoryServer(), "run")
    for number in range(5):
        await TicketQueue(transport).issue(ticket(number).model_copy(update={"group_size": 1}))
    loop = actor(transport, tmp_path, environment=Hanging, slots=4, drain_s=0.05)
    running = asyncio.create_task(loop.run())
    await until(lambda: loop.metrics.value("episodes_running") == 3)
    await asyncio.sleep(0.1)
    assert loop.metrics.value("leases_total", kind="train") == 3, (
        "two slots are kept for a whole group"
    )
    loop.stopping.set()
    await running


async def test_a_drained_actor_gives_back_what_it_cannot_finish_and_another_does_it(
    tmp_path: Path,
) -> None:
    transport = MemoryTransport(MemoryServer(), "run")
    await TicketQueue(transport).issue(ticket())
    slow = actor(transport, tmp_path, environment=Hanging, drain_s=0.05)
    running = asyncio.create_task(slow.run())
    await until(lambda: slow.metrics.value("episodes_running") == 2)
    slow.stopping.set()
    await running
    assert slow.metrics.value("tickets_given_back_total", reason="drained") == 1

    quick = actor(transport, tmp_path)
    running = asyncio.create_task(quick.run())
    (entry,) = await entries(transport, 1)
    quick.stopping.set()
    await running
    assert isinstance(entry.record, Group)
    assert entry.record.deliveries == 2


async def test_a_late_group_is_refused_and_counted(tmp_path: Path) -> None:
    transport = MemoryTransport(MemoryServer(), "run")
    await TicketQueue(transport).issue(ticket())
    await GroupLog(transport).publish_void(Void(ticket=ticket(), reason="elsewhere", actor="other"))
    loop = actor(transport, tmp_path)
    running = asyncio.create_task(loop.run())
    await until(lambda: loop.metrics.value("groups_refused_total") == 1)
    loop.stopping.set()
    await running
    assert len(await asyncio.wait_for(entries(transport, 1), 5)) == 1
    assert (await transport.queue()).leased == 0


async def test_a_dead_engine_ends_the_actor_and_its_tickets_are_given_back(tmp_path: Path) -> None:
    def die() -> None:
        raise EngineDead("gone")

    transport = MemoryTransport(MemoryServer(), "run")
    await TicketQueue(transport).issue(ticket())
    loop = actor(transport, tmp_path, policy=SayingPolicy(CHAT, fail=die), slots=2)
    try:
        async with asyncio.timeout(5):
            await loop.run()
    except* EngineDead:
        pass
    else:
        raise AssertionError("the actor went on without an engine")
    lease = await TicketQueue(transport).lease(1.0)
    assert lease is not None
    assert lease.deliveries == 2


async def test_the_end_of_the_run_ends_the_actor(tmp_path: Path) -> None:
    transport = MemoryTransport(MemoryServer(), "run")
    loop = actor(transport, tmp_path)
    running = asyncio.create_task(loop.run())
    last = WeightsManifest(policy=PolicyVersion(), weights_bytes=0, digest="", finished_step=10)
    await StateStore(transport).put(Key.POLICY, last)
    async with asyncio.timeout(5):
        await running


class Forgetful(MemoryTransport):
    """A broker that has lost its tickets: it answers no acknowledgement, as the transport finds after `ack_wait_s`."""

    async def lease(self, timeout_s: float) -> MemoryDelivery | None:
        delivery = await super().lease(timeout_s)
        if delivery is not None:

            async def acknowledge() -> None:
                raise BrokerUnreachable("no answer")

            delivery.acknowledge = acknowledge  # type: ignore[method-assign]
        return delivery


async def test_an_acknowledgement_that_is_not_answered_frees_the_slots(tmp_path: Path) -> None:
    transport = Forgetful(MemoryServer())
    for number in range(6):
        await TicketQueue(transport).issue(ticket(number))
    loop = actor(transport, tmp_path, slots=2)
    running = asyncio.create_task(loop.run())
    assert len(await entries(transport, 6)) == 6
    await until(
        lambda: loop.metrics.value("tickets_given_back_total", reason="ack_unconfirmed") == 6
    )
    loop.stopping.set()
    await running


async def test_a_group_of_a_future_that_the_run_has_lost_is_played_again(tmp_path: Path) -> None:
    """Its versions have the names of others that the restored run makes."""

    go_on = asyncio.Event()

    class Waiting(Echo):
        async def step(self, text: str) -> Step:
            await go_on.wait()
            return await super().step(text)

    transport = MemoryTransport(MemoryServer(), "run")
    await TicketQueue(transport).issue(ticket())
    loop = actor(transport, tmp_path, environment=Waiting, slots=2)
    running = asyncio.create_task(loop.run())
    await until(lambda: loop.metrics.value("episodes_running") == 2)
    loop.follower.lost_futures += 1
    go_on.set()
    (entry,) = await entries(transport, 1)
    assert isinstance(entry.record, Group)
    assert entry.record.deliveries == 2
    assert loop.metrics.value("tickets_given_back_total", reason="run_restored") == 1
    loop.stopping.set()
    await running
