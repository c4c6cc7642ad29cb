"""The permission matrix, against a real nats-server with TLS: what each role needs works, all else is refused."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import nats.errors
import pytest
import uvloop

from horizonrl.broker.api import Key, Message, Role, Stream
from horizonrl.broker.dead_letters import store_dead_letter
from horizonrl.broker.groups import GroupLog
from horizonrl.broker.nats.access import hears, inbox, publishes
from horizonrl.broker.nats.connect import connect
from horizonrl.broker.nats.key_folder import KeyFolder, as_role
from horizonrl.broker.nats.keys import make_keys
from horizonrl.broker.nats.server import EmbeddedServer
from horizonrl.broker.nats.transport import NatsDelivery, NatsTransport
from horizonrl.broker.open_tickets import OpenTickets
from horizonrl.broker.state import StateStore
from horizonrl.broker.tickets import TicketQueue
from horizonrl.broker.weights.frames import (
    digest_file,
    discard_frames_below,
    fetch_frame,
    publish_frame,
)
from horizonrl.common.config.nats import NatsSection
from horizonrl.common.config.schema import BrokerSection
from horizonrl.common.errors import BrokerDenied, BrokerUnreachable
from horizonrl.common.metrics import Metrics
from horizonrl.common.service import run_role
from horizonrl.common.state import HorizonState, Progress, WeightsManifest
from horizonrl.common.types import Kind, PolicyVersion, Void
from tests.broker.secured import ACK_V2, OTHER, RUN, Secured, secured
from tests.records import make_group, make_ticket

pytestmark = pytest.mark.process

SUBJECTS = [
    *(f"tickets.{name}" for name in ("train", "demo", "eval", "again")),
    *(f"groups.{name}" for name in ("train", "demo", "eval", "void", "part", "joined", "else")),
    *("weights.frame", "dead.tickets", "dead.groups", "state.progress"),
]
STREAMS = ["{run}_TICKETS", "{run}_GROUPS", "{run}_WEIGHTS", "{run}_DEAD", "KV_{run}_STATE"]
API = [
    *("STREAM.INFO.{name}", "STREAM.CREATE.{name}", "STREAM.UPDATE.{name}", "STREAM.DELETE.{name}"),
    *(
        "STREAM.PURGE.{name}",
        "STREAM.MSG.GET.{name}",
        "STREAM.MSG.DELETE.{name}",
        "STREAM.SNAPSHOT.{name}",
    ),
    *(
        "CONSUMER.CREATE.{name}",
        "CONSUMER.CREATE.{name}.actors",
        "CONSUMER.DURABLE.CREATE.{name}.actors",
    ),
    *(
        "CONSUMER.CREATE.{name}.spy",
        "CONSUMER.CREATE.{name}.spy.>",
        "CONSUMER.DURABLE.CREATE.{name}.spy",
    ),
    *("CONSUMER.MSG.NEXT.{name}.spy", "CONSUMER.DELETE.{name}.spy", "CONSUMER.INFO.{name}.actors"),
    *(
        "CONSUMER.LIST.{name}",
        "CONSUMER.NAMES.{name}",
        "DIRECT.GET.{name}",
        "DIRECT.GET.{name}.{run}.else",
    ),
]
ATTEMPTS = [
    *(f"{{run}}.{subject}" for subject in SUBJECTS),
    *(f"$KV.{{run}}_STATE.{key.value}" for key in Key),
    *(f"$JS.API.{call.replace('{name}', name)}" for call in API for name in STREAMS),
    *(
        "$JS.API.CONSUMER.MSG.NEXT.{run}_TICKETS.actors",
        "$JS.API.CONSUMER.DELETE.{run}_TICKETS.actors",
    ),
    *(
        "$JS.API.CONSUMER.CREATE.{run}_GROUPS.spy.{run}.groups.>",
        "$JS.API.CONSUMER.PAUSE.{run}_TICKETS.actors",
    ),
    "$JS.API.CONSUMER.CREATE.{run}_TICKETS.actors.{run}.tickets.>",
    *("$JS.ACK.{run}_TICKETS.actors.1.1.1.1.0", "$JS.ACK._.hash.{run}_TICKETS.actors.1.1.1.1.0.x"),
    *("$JS.ACK.{run}_TICKETS.spy.1.1.1.1.0", "$JS.ACK._.hash.{run}_TICKETS.spy.1.1.1.1.0.x"),
    *("$JS.ACK.{run}_GROUPS.actors.1.1.1.1.0", "$JS.ACK._.hash.{run}_GROUPS.actors.1.1.1.1.0.x"),
    *("_INBOX.{run}.learner.x", "_INBOX.{run}.actor.x", "$JS.FC.{run}_TICKETS.actors.x"),
    *("$JS.API.STREAM.NAMES", "$JS.API.STREAM.LIST", "$JS.API.INFO", "$SYS.REQ.SERVER.PING"),
]
"""What anybody might try."""
READING = ("STREAM.MSG.GET", "DIRECT.GET")
EVERYONE = {
    "$JS.API.INFO",
    *(f"$JS.API.STREAM.INFO.{name.format(run=RUN)}" for name in STREAMS),
    f"$JS.API.STREAM.MSG.GET.KV_{RUN}_STATE",
    f"$JS.API.CONSUMER.INFO.{RUN}_TICKETS.actors",
}
ALLOWED = {
    Role.CONTROLLER: {
        *(f"{RUN}.tickets.{name}" for name in ("train", "demo", "eval", "again")),
        *(f"$KV.{RUN}_STATE.horizon", f"$KV.{RUN}_STATE.run"),
        *(
            f"$JS.API.STREAM.{call}.{name.format(run=RUN)}"
            for call in ("CREATE", "UPDATE")
            for name in STREAMS
        ),
        f"$JS.API.STREAM.PURGE.{RUN}_TICKETS",
        *(f"$JS.API.{call}.{RUN}_{name}" for call in READING for name in ("TICKETS", "GROUPS")),
        f"$JS.API.CONSUMER.CREATE.{RUN}_TICKETS.actors",
        *(f"$JS.API.CONSUMER.LIST.{name.format(run=RUN)}" for name in STREAMS),
        *(f"$JS.API.CONSUMER.DELETE.{name.format(run=RUN)}.spy" for name in STREAMS),
        f"$JS.API.CONSUMER.DELETE.{RUN}_TICKETS.actors",
    },
    Role.LEARNER: {
        *(
            f"{RUN}.weights.frame",
            f"{RUN}.dead.groups",
            f"$KV.{RUN}_STATE.progress",
            f"$KV.{RUN}_STATE.policy",
        ),
        *(f"$JS.API.STREAM.PURGE.{RUN}_{name}" for name in ("GROUPS", "WEIGHTS")),
        *(f"$JS.API.{call}.{RUN}_{name}" for call in READING for name in ("TICKETS", "GROUPS")),
    },
    Role.ACTOR: {
        *(f"{RUN}.groups.{name}" for name in ("train", "demo", "eval", "void", "part", "joined")),
        f"{RUN}.dead.tickets",
        f"$JS.API.DIRECT.GET.{RUN}_WEIGHTS",
        f"$JS.API.CONSUMER.MSG.NEXT.{RUN}_TICKETS.actors",
        *(
            f"$JS.ACK.{RUN}_TICKETS.actors.1.1.1.1.0",
            f"$JS.ACK._.hash.{RUN}_TICKETS.actors.1.1.1.1.0.x",
        ),
    },
    Role.MONITOR: {f"$JS.API.{call}.{RUN}_TICKETS" for call in READING},
}
"""Of these, what each role may do beyond EVERYONE: written by hand, as `access.py` is."""
OVERHEARD = [
    *(">", "{run}.>", "{run}.groups.train", "$KV.>", "$JS.>", "$JS.EVENT.>", "_R_.>"),
    *("_INBOX.>", "_INBOX.*", "_INBOX.{run}.>", "_INBOX.{run}.else.>"),
    *(f"_INBOX.{{run}}.{role.value}.{rest}" for role in Role for rest in (">", "*", "*.>")),
]


def attempts() -> Iterator[str]:
    for run in (RUN, OTHER):
        yield from (attempt.format(run=run) for attempt in ATTEMPTS)


async def refused(broker: Secured, role: Role) -> tuple[set[str], set[str]]:
    """Return the subjects that the server would not let a role publish and subscribe to."""
    errors: list[str] = []
    async with broker.client(role, errors=errors) as client:
        for subject in attempts():
            await client.publish(subject, b"")
            await client.flush()
        for subject in OVERHEARD:
            await client.subscribe(subject.format(run=RUN))
            await client.flush()
    parts = [text.split('"')[:2] for text in errors if "permissions violation" in text]
    publishing = {name for what, name in parts if "publish" in what}
    return publishing, {name for what, name in parts if "subscription" in what}


async def test_a_role_may_do_what_is_listed_and_nothing_else(tmp_path: Path) -> None:
    async with secured(tmp_path) as broker:
        for role in Role:
            publishing, subscribing = await refused(broker, role)
            # As nats-py tells it.
            may = {subject for subject in attempts() if subject.lower() not in publishing}
            assert may == ALLOWED[role] | EVERYONE, role
            assert subscribing == {subject.format(run=RUN).lower() for subject in OVERHEARD}


@pytest.mark.parametrize("extra", ["", ACK_V2], ids=["ack-v1", "ack-v2"])
def test_every_role_can_do_its_work(tmp_path: Path, extra: str) -> None:
    async def scenario() -> None:
        async with (
            secured(tmp_path, extra) as broker,
            broker.open(Role.CONTROLLER) as controller,
            broker.open(Role.LEARNER) as learner,
            broker.open(Role.ACTOR) as actor,
            broker.open(Role.MONITOR) as monitor,
        ):
            for number in range(4):
                assert not (await TicketQueue(controller).issue(make_ticket(number))).duplicate
            await TicketQueue(controller).reissue(make_ticket(0), 1)
            assert await StateStore(learner).put(Key.PROGRESS, Progress())
            assert await StateStore(controller).put(Key.HORIZON, HorizonState())
            await act(actor)
            await learn(learner, tmp_path)
            manifest = await StateStore(actor).get(Key.POLICY)
            assert isinstance(manifest, WeightsManifest)
            assert (
                await fetch_frame(actor, manifest, tmp_path / "fetched")
            ).read_bytes() == b"weights"
            assert await anext(StateStore(actor).watch(Key.PROGRESS)) == Progress()
            assert len(await TicketQueue(controller).stored_tickets()) == 5
            assert await GroupLog(controller).end() > 0
            still_open = OpenTickets(controller, TicketQueue(controller))
            await still_open.refresh(Progress(), {Kind.TRAIN: 4})
            await still_open.purge(Progress(lowest_unsettled={Kind.TRAIN: 2}))
            assert (await controller.queue()).leased == 0
            assert await TicketQueue(monitor).count_issued(Kind.TRAIN) == 4
            assert await StateStore(monitor).get(Key.HORIZON) == HorizonState()
            assert (await monitor.queue()).leased == 0
            for transport in (controller, learner, actor, monitor):
                transport._connection.raise_refusal()
                assert transport.counters.denied == 0

    async def act(actor: NatsTransport) -> None:
        queue, log = TicketQueue(actor), GroupLog(actor)
        for end in ("group", "parts", "void"):
            lease = await queue.lease(10.0)
            assert lease is not None
            assert isinstance(lease.delivery, NatsDelivery)
            assert lease.delivery._reply.startswith("$JS.ACK._.") is bool(extra)
            await lease.delivery.extend()
            if end == "void":
                await log.publish_void(Void(ticket=lease.ticket, reason="broken", actor="a"))
            else:
                actor.max_payload_bytes = 300 if end == "parts" else 1 << 20
                await log.publish(make_group(lease.ticket.number))
            await lease.acknowledge()
        lease = await queue.lease(10.0)
        assert lease is not None
        await lease.give_back()
        while (lease := await queue.lease(1.0)) is not None:
            await lease.acknowledge()
        await store_dead_letter(
            actor, Stream.TICKETS, Message("tickets.train", b"?", 1), "no ticket"
        )

    async def learn(learner: NatsTransport, directory: Path) -> None:
        reader = await GroupLog(learner).read(after=0)
        entries = [await reader.next(10.0) for _ in range(3)]
        assert [type(entry.record).__name__ for entry in entries if entry] == [
            "Group",
            "Group",
            "Void",
        ]
        await reader.close()
        assert await TicketQueue(learner).count_issued(Kind.TRAIN) == 4
        frame = directory / "frame"
        frame.write_bytes(b"weights")
        manifest = await publish_frame(learner, frame, PolicyVersion(version=1), digest_file(frame))
        await StateStore(learner).put(Key.POLICY, manifest)
        await discard_frames_below(learner, manifest)
        await GroupLog(learner).purge_below(2)
        await store_dead_letter(
            learner, Stream.GROUPS, Message("groups.train", b"?", 1), "no group"
        )

    uvloop.run(scenario())


def test_a_refusal_is_counted_and_ends_the_role_with_a_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = Metrics()

    async def scenario() -> None:
        async with secured(tmp_path) as broker, broker.open(Role.ACTOR) as actor:
            try:
                async with asyncio.timeout(2.0):
                    await actor.publish("tickets.train", b"x")
            finally:
                metrics.mirror_broker(actor)
                with pytest.raises(BrokerDenied):  # nothing else of this role goes on
                    await actor.lease(30.0)

    assert run_role(scenario) == 1
    assert metrics.value("broker_denied_total") == 1
    errors = capsys.readouterr().err
    assert "error: nats://127.0.0.1" in errors
    assert f'permissions violation for publish to "{RUN}.tickets.train"' in errors.lower()
    assert "Traceback" not in errors


def test_a_key_of_another_role_is_told_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with secured(tmp_path) as broker:
            await connect(RUN, broker.settings(Role.ACTOR), Role.LEARNER)

    with pytest.raises(BrokerDenied, match="is not of this role of this run"):
        uvloop.run(scenario())


def test_the_files_of_another_role_and_run_are_those_of_the_same_folder(tmp_path: Path) -> None:
    make_keys(tmp_path, [RUN, OTHER], ["nats.example"], actors=1)
    keys = KeyFolder(tmp_path)
    learner = BrokerSection(
        nats=NatsSection(nkey_seed=keys.seed(RUN, Role.LEARNER)), ticket_key=keys.ticket_key(RUN)
    )
    actor = as_role(learner, OTHER, Role.ACTOR)
    assert actor.nats.nkey_seed == keys.seed(OTHER, Role.ACTOR)
    assert actor.ticket_key == keys.ticket_key(OTHER)
    assert as_role(as_role(learner, OTHER, Role.CONTROLLER), RUN, Role.LEARNER) == learner
    unsigned = learner.model_copy(update={"ticket_key": None})
    assert as_role(unsigned, OTHER, Role.ACTOR).ticket_key is None
    for other in (BrokerSection(), learner.model_copy(update={"nats": NatsSection(nkey_seed="a")})):
        assert as_role(other, "unknown", Role.CONTROLLER) == other
    assert as_role(learner, "unknown", Role.CONTROLLER) == learner


def changed(settings: BrokerSection, **keys: Path | None) -> BrokerSection:
    return settings.model_copy(update={"nats": settings.nats.model_copy(update=keys)})


async def test_a_server_that_cannot_be_trusted_is_refused_with_what_to_do(tmp_path: Path) -> None:
    async with secured(tmp_path / "a") as broker, secured(tmp_path / "b") as stranger:
        settings = broker.settings(Role.ACTOR)
        for wrong in (stranger.keys.authority, None):
            with pytest.raises(
                BrokerDenied, match=r"not trusted \(.*\): broker\.nats\.ca_file must"
            ):
                await connect(RUN, changed(settings, ca_file=wrong), Role.ACTOR)
        with pytest.raises(
            BrokerDenied, match=r"refuses the credentials: check broker\.nats\.nkey_seed"
        ):
            await connect(
                RUN,
                changed(settings, nkey_seed=stranger.keys.seed(RUN, Role.ACTOR)),
                Role.ACTOR,
            )


async def test_a_server_without_tls_is_refused_where_an_authority_is_given(tmp_path: Path) -> None:
    async with secured(tmp_path) as broker, EmbeddedServer(tmp_path / "plain") as plain:
        settings = changed(broker.settings(Role.CONTROLLER), nkey_seed=None).model_copy(
            update={"url": plain.url}
        )
        with pytest.raises(
            BrokerDenied, match=r"offers no TLS although broker\.nats\.ca_file is set"
        ):
            await connect(RUN, settings)


async def test_keys_are_rotated_and_actors_added_while_the_others_work(tmp_path: Path) -> None:
    async with (
        secured(tmp_path) as broker,
        broker.open(Role.ACTOR) as first,
        broker.open(Role.ACTOR, number=1) as kept,
    ):
        async with broker.open(Role.CONTROLLER) as controller, asyncio.TaskGroup() as group:
            waiting = group.create_task(TicketQueue(kept).lease(20.0))
            broker.keys.seed(RUN, Role.ACTOR).unlink()
            make_keys(broker.keys.folder, [RUN], [], actors=3)
            os.kill(broker.server.pid, signal.SIGHUP)
            with pytest.raises(
                BrokerDenied, match=r"refuses the credentials: check broker\.nats\.nkey_seed"
            ):
                async with asyncio.timeout(20.0):
                    await first.lease(30.0)
            await TicketQueue(controller).issue(make_ticket(0))
        assert waiting.result() is not None
        for number in (0, 2):  # the one with another key, and one more
            async with broker.open(Role.ACTOR, number=number) as another:
                assert (await another.publish("groups.train", b"x")).sequence > 0
        assert kept.counters.reconnects == 0


async def test_a_default_client_reads_the_state_and_makes_no_consumer(tmp_path: Path) -> None:
    """Actors in other languages: what their clients' JetStream and key-value APIs ask for."""

    async with secured(tmp_path) as broker, broker.open(Role.LEARNER) as learner:
        await learner.put(Key.POLICY, b"p")
        errors: list[str] = []
        async with broker.client(Role.ACTOR, errors=errors) as client:
            js = client.jetstream(timeout=1.0)
            assert (await js.account_info()).streams == 5
            state = await js.key_value(f"{RUN}_STATE")
            assert (await state.get("policy")).value == b"p"
            assert errors == []
            with pytest.raises(nats.errors.TimeoutError):
                await state.watch("policy")
        assert "$js.api.consumer.create" in errors[0]


async def test_a_role_waits_for_the_streams_and_says_who_makes_them(
    nats_server: EmbeddedServer,
) -> None:
    settings = BrokerSection(url=nats_server.url, ack_wait_s=7.0)
    with pytest.raises(
        BrokerUnreachable, match=r"no streams of run absent after 1 s: start its controller"
    ):
        await connect("absent", settings, Role.MONITOR, wait_s=1.0)
    waiting = asyncio.create_task(connect("later", settings, Role.ACTOR))
    await asyncio.sleep(0.2)
    controller = await connect("later", settings.model_copy(update={"ack_wait_s": 9.0}))
    actor = await waiting
    assert actor.ack_wait_s == 9.0
    await actor.close()
    await controller.close()


def test_the_protocol_page_has_the_permissions_of_every_role() -> None:
    page = (Path(__file__).parents[3] / "broker/PROTOCOL.md").read_text().replace("{run}", RUN)
    for role in Role:
        listed = page.split(f"**{role.value}**")[1].split("\n\n")[0]
        user = (*publishes(RUN, role), f"{inbox(RUN, role, '{nkey}')}.>", hears(RUN))
        assert [subject for subject in user if f"`{subject}`" not in listed] == []
