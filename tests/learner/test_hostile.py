"""Hostile actors: whatever they put between the groups of the log, the learner makes the same weights of it.

A run is played with signed tickets. Its log is then learned from twice in an empty place: as it is, and with hostile
messages between its entries, as an actor could publish them who has leased some tickets of its own.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zstandard

from horizonrl.broker.api import Message, Stream
from horizonrl.broker.codec import encode
from horizonrl.broker.groups import DIGEST, FIRST, JOINED, PARTS
from horizonrl.broker.memory import MemoryServer, MemoryTransport
from horizonrl.broker.signing import TicketSigner
from horizonrl.common.metrics import Metrics
from horizonrl.common.types import Group, Kind, PolicyVersion, Ticket, Turn, Void
from horizonrl.learner.engine.api import Engine
from horizonrl.learner.engine.thread import EngineThread
from horizonrl.learner.main import build_loop, open_ports
from horizonrl.ops.rundir.lines import read_lines
from tests.learner.world import IDENTITY, RULES, HashEngine, InlineExecutor, World, played
from tests.records import make_ticket

KEY = b"k" * 32
SIGNER = TicketSigner("run", KEY)
OWN = 1_000
"""The number of the first ticket that the hostile actor was given."""


@dataclass(frozen=True)
class Attack:
    name: str
    subject: str
    data: bytes
    message_id: str
    counted: str
    """The reason that it is counted under."""
    dropped: str | None = None
    """Where it ends the sender's own ticket: why that was dropped."""
    headers: Mapping[str, str] = field(default_factory=dict)


def attacks(honest: list[Message]) -> Iterator[Attack]:
    """Yield one message of each kind; `honest` is the log that they are put into."""
    dice = random.Random(1)
    number = iter(range(OWN, OWN + 1_000))

    def own(**changes: Any) -> Ticket:
        return SIGNER.sign(make_ticket(next(number), version=2).model_copy(update=changes))

    def group(ticket: Ticket) -> Group:
        return played(ticket, PolicyVersion(version=2), dice)

    def attack(name: str, data: bytes, message_id: str, counted: str, **more: Any) -> Attack:
        return Attack(name, more.pop("subject", "groups.train"), data, message_id, counted, **more)

    victim = make_ticket(3, version=2)
    names = [f"{kind.value}-{n:08d}" for kind in Kind for n in range(6)]
    yield attack("a forged ticket", encode(group(make_ticket(77))), "train-00000077", "forged")
    yield attack(
        "a forged signature",
        encode(group(victim.model_copy(update={"signature": "0" * 64}))),
        "x1",
        "forged",
    )
    yield attack(
        "another key", encode(group(TicketSigner("run", b"a" * 32).sign(victim))), "x2", "forged"
    )
    yield attack(
        "another run", encode(group(TicketSigner("other", KEY).sign(victim))), "x3", "forged"
    )
    taken = own()
    yield attack(
        "another's ticket",
        encode(group(victim.model_copy(update={"signature": taken.signature}))),
        "x4",
        "forged",
    )
    altered = own().model_copy(update={"horizon_turns": 1_000})
    yield attack("an altered ticket", encode(group(altered)), "x5", "forged")
    void = Void(ticket=victim, reason="gone", actor="evil")
    yield attack("a forged void", encode(void), "x6", "forged", subject="groups.void")
    for name in names:
        yield attack("a taken id", b"junk", name, "malformed")
        yield attack("a guessed id", b"junk", f"{name}.{'0' * 32}", "malformed")
    for name in (
        "train-" + "9" * 5_000,
        "train-99999999999999999999",
        "train-٣٣٣٣٣٣٣٣",
        "train--0000001",
        "eval-",
    ):
        yield attack("an impossible id", b"junk", name, "malformed")
    yield attack("garbage", random.Random(2).randbytes(4_000), "x7", "malformed")
    yield attack("nothing", b"", "x8", "malformed")
    yield attack(
        "a zstd bomb", zstandard.ZstdCompressor().compress(bytes(50_000_000)), "x9", "malformed"
    )
    yield attack(
        "a bomb of containers", b"\xdd\x00\x10\x00\x00" + b"\x90" * (1 << 20), "x10", "malformed"
    )
    yield attack("a deep nesting", b"\x91" * 100_000, "x11", "malformed")
    yield attack(
        "another schema",
        msgpack.packb({"schema": 9, "type": "group", "body": {}}),
        "x12",
        "unknown_schema",
    )
    joins = {PARTS: "65000", DIGEST: "0" * 32, FIRST: "1"}
    yield attack("a forged joining", b"", "x14", "forged", subject=JOINED, headers=joins)
    joined = own()
    yield attack(
        "no parts",
        b"",
        joined.end_id,
        "malformed",
        subject=JOINED,
        headers=joins,
        dropped="malformed",
    )
    replayed = honest[0]
    yield attack("a replay", replayed.data, "x13", "", subject=replayed.subject)
    yield from dishonest(own, group)


def dishonest(own: Any, group: Any) -> Iterator[Attack]:
    """Yield the groups that an actor makes for its own tickets."""

    def broken(name: str, field: str, value: Any) -> Attack:
        made = group(own())
        turn = made.episodes[0].turns[0].model_copy(update={field: value})
        return sent(name, made, turn, "malformed")

    def sent(
        name: str, made: Group, turn: Turn, counted: str, dropped: str = "malformed"
    ) -> Attack:
        episode = made.episodes[0].model_copy(update={"turns": (turn,)})
        data = encode(made.model_copy(update={"episodes": (episode, *made.episodes[1:])}))
        return Attack(name, "groups.train", data, made.ticket.end_id, counted, dropped)

    for value in (float("nan"), float("inf"), float("-inf"), 0.5):
        yield broken(f"a logprob of {value}", "logprobs", (value, value))
        if value != 0.5:
            yield broken(f"a reward of {value}", "reward", value)
    yield broken("a reward beyond the bounds", "reward", -1e12)
    yield broken("too few logprobs", "logprobs", (-0.5,))
    yield broken("negative ids", "output_ids", (-1, -2))
    made = group(own())
    turn = made.episodes[0].turns[0]
    yield sent(
        "ids beyond the vocabulary", made, turn.model_copy(update={"output_ids": (5, 100)}), ""
    )
    made = group(own())
    long = {
        "output_ids": (5,) * 64,
        "logprobs": (-1.0,) * 64,
        "spans": (turn.spans[0].model_copy(update={"tokens": 64}),),
    }
    yield sent("beyond the context", made, turn.model_copy(update=long), "")
    made = group(own(sampling=make_ticket().sampling.model_copy(update={"max_turn_tokens": 1})))
    yield sent("a longer turn than ordered", made, turn, "")
    made = group(own())
    future = turn.model_copy(
        update={"spans": (turn.spans[0].model_copy(update={"version": 2**31 - 1}),)}
    )
    yield sent("an impossible version", made, future, "", "lineage")
    made = group(own())
    yield sent(
        "a longer group", made.model_copy(update={"episodes": made.episodes * 2}), turn, "malformed"
    )


@dataclass
class Learned:
    ledger: list[dict[str, Any]]
    metrics: Metrics
    dead: list[Message]


async def learn(
    run_root: Path, messages: list[tuple[str, bytes, str, Mapping[str, str]]], key: Path
) -> Learned:
    """Train the run from a log."""
    asyncio.get_running_loop().set_default_executor(InlineExecutor())
    server, metrics = MemoryServer(), Metrics()
    transport = MemoryTransport(server, "run")
    for subject, data, message_id, headers in messages:
        await transport.publish(subject, data, message_id=message_id, headers=dict(headers))
    config = World(run_root, overrides=(f"--broker.ticket_key={key}",)).config
    engine: Engine = HashEngine()
    thread = EngineThread(engine, InlineExecutor())
    async with asyncio.timeout(60):
        ports = open_ports(config, transport, thread, asyncio.Event(), metrics)
        await build_loop(config, ports, RULES, dict(IDENTITY)).run()
    dead = list(server.runs["run"].streams[Stream.DEAD].messages.values())
    return Learned(read_lines(config.run_dir / "ledger.jsonl"), metrics, dead)


@pytest.mark.parametrize("seed", range(3))
async def test_the_weights_are_the_same_with_and_without_hostile_messages(
    tmp_path: Path, seed: int
) -> None:
    key = tmp_path / "ticket.key"
    key.write_bytes(KEY)

    world = World(tmp_path / "played", seed=seed, overrides=(f"--broker.ticket_key={key}",))
    await world.run()
    await world.check()
    honest = list(world.server.runs["run"].streams[Stream.GROUPS].messages.values())
    log = [(message.subject, message.data, message.message_id, {}) for message in honest]
    evil = list(attacks(honest))
    mixed: list[Any] = [*log]
    dice = random.Random(seed)
    for attack in evil:
        first = 1 if attack.name == "a replay" else 0
        # Before the end: what comes after the last step is not read.
        place = dice.randint(first, len(log) - 4)
        mixed.insert(
            mixed.index(log[place]),
            (attack.subject, attack.data, attack.message_id, attack.headers),
        )
    alone, beside = (
        await learn(tmp_path / "a", log, key),
        await learn(tmp_path / "b", mixed, key),
    )
    assert settled(alone.ledger) == settled(beside.ledger) == settled(world.ledger())
    assert [line["weights_digest"] for line in alone.ledger] == [
        line["weights_digest"] for line in beside.ledger
    ]
    check_counts(beside, evil)


def settled(ledger: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what each step was made of, without places in the log and without the hostile actor's own tickets."""
    return [
        {
            "trained": [ticket for _, ticket in line["trained"]],
            "dropped": [end[1:] for end in line["dropped"] if int(end[1].partition("-")[2]) < OWN],
            "voids": [ticket for _, ticket in line["voids"]],
            "data": line["data_digest"],
            "weights": line["weights_digest"],
        }
        for line in ledger
    ]


def check_counts(learned: Learned, evil: list[Attack]) -> None:
    """Each attack was counted under its reason, and what is no group of a leased ticket lies in DEAD."""
    counted = Counter(attack.counted for attack in evil if attack.counted)
    for reason, count in counted.items():
        assert learned.metrics.value("log_entries_refused_total", reason=reason) == count, reason
    assert learned.metrics.value("log_entries_refused_total", reason="repeat") == 1
    assert len(learned.dead) == sum(counted.values())
    dropped = [
        end
        for line in learned.ledger
        for end in line["dropped"]
        if int(end[1].partition("-")[2]) >= OWN
    ]
    assert Counter(reason for *_, reason in dropped) == Counter(
        attack.dropped for attack in evil if attack.dropped
    )
