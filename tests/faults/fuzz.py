"""`python -m tests.faults fuzz`: sends malformed payloads through the decoder and the collector behind it.

A payload is one mutation of a valid record's bytes. It must decode to a valid record or raise a RecordError, in bounded
memory. A payload that decodes to a group or a void is then settled by a collector and laid out as a batch. The same
seed makes the same payloads.
"""

import json
import random
import resource
import struct
import sys
import time
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
from rich.table import Table

from horizonrl.broker.codec import TYPES, decode, encode
from horizonrl.broker.groups import Entry
from horizonrl.common.errors import MalformedRecord, RecordError, RecordTooLarge, UnknownSchema
from horizonrl.common.state import (
    EnvironmentSettings,
    HorizonGrowth,
    HorizonState,
    Outcomes,
    Progress,
    RunSettings,
    WeightsManifest,
)
from horizonrl.common.types import (
    Branch,
    DropReason,
    Episode,
    Group,
    Kind,
    Phase,
    Provenance,
    Record,
    StopReason,
    Task,
    Ticket,
    Turn,
    VersionSpan,
    Void,
)
from horizonrl.learner.intake.accounts import TicketAccounts
from horizonrl.learner.intake.collector import Collector, LearnerPosition, Rules
from horizonrl.ops.terminal.console import plain_console

OUTCOMES = (
    "decoded",
    *(kind.__name__ for kind in (MalformedRecord, UnknownSchema, RecordTooLarge)),
    "other",
)
SAMPLE_EVERY = 100
"""Memory is traced for one payload in this many, because tracing makes decoding five times slower."""
MAX_PEAK_BYTES = 32 << 20
"""Memory limit for one payload of at most MAX_PAYLOAD_BYTES. Of a million payloads none took more than 5 MB."""
MAX_GROWN_BYTES = 128 << 20
"""Limit on the growth of the process, whatever the number of payloads. A million payloads took 19 MB."""
MAX_PAYLOAD_BYTES = 1 << 18
MAX_KEPT = 20
"""Number of failures whose payload is kept."""
RULES = Rules(max_staleness=2, vocabulary=1 << 16, max_context_tokens=4096)
HEADERS = [
    header + b"\xff" * width
    for header, width in {b"\xdc": 2, b"\xdd": 4, b"\xde": 2, b"\xdf": 4}.items()
]
HEADERS += [
    header + b"\xff" * width
    for header, width in {b"\xc5": 2, b"\xc6": 4, b"\xda": 2, b"\xdb": 4}.items()
]
HEADERS += [
    header + b"\x00\x0f\xff\xff" for header in (b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9")
]
"""Headers of arrays, maps, binaries, texts and extensions that claim far more bytes than follow."""
ODD: Sequence[Any] = (
    None, True, False, 0, -1, 1, 1 << 31, 1 << 53, (1 << 64) - 1, -(1 << 63),
    0.0, -0.0, 1.5, 1e308, -1e308, 5e-324, float("nan"), float("inf"), float("-inf"),
    "", "1", "-1", "nan", "1e400", "9" * 5000, "\x00", "a.b", "→" * 300, "x" * 3000, "train", "group",
    b"", b"\x00", b"abc", b"\xff" * 8, struct.pack("<2f", -1e38, float("-inf")), struct.pack("<3i", 1, -2, 3),
    [], {}, [[]], [{}], {"": ""}, [0] * 4096, [None] * 1025, {str(number): number for number in range(300)},
    msgpack.Timestamp(1, 1), msgpack.ExtType(5, b"x"),
)  # fmt: skip
"""Replacements for a value: every type, the ends of every range, and values that look like another type."""
PACKABLE = [struct.pack("<i", number) for number in (0, 1, 65_535, (1 << 31) - 1, -1)]
PACKABLE += [struct.pack("<f", number) for number in (-0.1, -3.4e38, 0.0, -1e-45)]

Mutation = Callable[[random.Random, bytes, bytes], bytes]
"""Makes a payload from the bytes of a valid record and those of another one."""


@dataclass
class Report:
    """What became of the payloads. `failed` has the mutation, error and hex of the first MAX_KEPT that broke a rule."""

    payloads: int
    seed: int
    outcomes: Counter[str] = field(default_factory=Counter)
    settled: Counter[str] = field(default_factory=Counter)
    """How the collector settled the groups and voids that decoded."""
    failed: list[tuple[str, str, str]] = field(default_factory=list)
    seconds: float = 0.0
    peak_bytes: int = 0
    """The most memory that one of the sampled payloads took."""
    grown_bytes: int = 0
    """Growth of the process."""

    @property
    def holds(self) -> bool:
        return (
            not self.failed
            and self.peak_bytes <= MAX_PEAK_BYTES
            and self.grown_bytes <= MAX_GROWN_BYTES
        )


def run(payloads: int, seed: int, json_file: Path | None) -> int:
    """Fuzz and print the report. Return 1 if anything but a record or a RecordError came out, or memory ran over."""
    report = fuzz(payloads, seed)
    plain_console().print(_table(report))
    for mutation, error, payload in report.failed:
        print(f"error: {mutation}: {error}: {payload[:400]}", file=sys.stderr)
    if json_file is not None:
        json_file.write_text(
            json.dumps({**vars(report), "holds": report.holds}, indent=2) + "\n", encoding="utf-8"
        )
    return 0 if report.holds else 1


def fuzz(payloads: int, seed: int) -> Report:
    """Send `payloads` mutated records through the decoder, each as its own type and as another one."""
    report, chance = Report(payloads, seed), random.Random(seed)
    valid = [(type(record), encode(record)) for record in records()]
    # After the valid records exist: what importing and building them takes is no growth.
    started, before = time.perf_counter(), _resident_bytes()
    with warnings.catch_warnings():
        # NumPy only warns about a number that overflows; here that is a failure.
        warnings.simplefilter("error")
        for index in range(payloads):
            (own, data), (_, other) = chance.choice(valid), chance.choice(valid)
            mutation = chance.choice(list(MUTATIONS))
            payload = MUTATIONS[mutation](chance, data, other)[:MAX_PAYLOAD_BYTES]
            for record_type in (
                own,
                chance.choice([another for another in TYPES if another is not own]),
            ):
                with _traced(report) if index % SAMPLE_EVERY == 0 else nullcontext():
                    error = _attempt(payload, record_type, report)
                if error is not None and len(report.failed) < MAX_KEPT:
                    report.failed.append(
                        (f"{mutation} as {record_type.__name__}", error, payload.hex())
                    )
    report.seconds, report.grown_bytes = time.perf_counter() - started, _resident_bytes() - before
    return report


@contextmanager
def _traced(report: Report) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        report.peak_bytes = max(report.peak_bytes, tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


def _attempt(payload: bytes, record_type: type[Record], report: Report) -> str | None:
    """Decode a payload and settle the record. Count the outcome and return what is wrong, or None."""
    try:
        record = decode(payload, record_type)
        # A replay reads the record again, and must train on the same.
        if decode(encode(record), record_type) != record:
            raise ValueError("the record changes when it is encoded and decoded again")
        if isinstance(record, Group | Void):
            report.settled.update(_settle(record))
    except RecordError as error:
        report.outcomes[type(error).__name__] += 1
    except Exception as error:  # noqa: BLE001 - any other exception is the finding
        report.outcomes["other"] += 1
        return f"{type(error).__name__}: {error!s:.200}"
    else:
        report.outcomes["decoded"] += 1
    return None


def _settle(record: Group | Void) -> Iterator[str]:
    """Let a collector settle a record twice in each phase; yield the outcomes. An admitted batch must be finite."""
    for phase in Phase:
        collector, position = (
            Collector(RULES, TicketAccounts()),
            LearnerPosition(version=3, phase=phase),
        )
        # Twice, because the second has to be recognised as a repeat (invariants: Exactly once).
        for sequence in (1, 2):
            collector.consume(Entry(sequence, record), position)
        for trace in collector.batch(position.version).traces:
            if not all(map(_finite, (trace.logprobs_L, trace.rewards_L))):
                raise ValueError("the batch is not finite")
        pending = collector.commit()
        if pending.repeats != 1:
            raise ValueError(f"{pending.repeats} repeats of a record that was consumed twice")
        yield from (drop.reason.value for drop in pending.dropped)
        yield from ("void" for _ in pending.voids)
        yield from ("trained" for _ in pending.admitted)


def _finite(numbers: Any) -> bool:
    return bool((abs(numbers) < float("inf")).all())


def _resident_bytes() -> int:
    """Return the peak resident memory of this process."""
    # Linux counts ru_maxrss in KiB, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def records() -> list[Record]:
    """Return a few valid records of every type that is sent between processes."""
    turn = Turn(
        output_ids=(5, 6, 7),
        logprobs=(-0.5, 0.0, -2.0),
        spans=(
            VersionSpan(version=2, lineage=0, tokens=2),
            VersionSpan(version=3, lineage=0, tokens=1),
        ),
        observation_ids=(8, 9),
        reward=0.5,
        text="craft 1 stick",
        observation="Crafted 1 minecraft:stick →",
    )
    last = turn.model_copy(update={"observation_ids": (), "reward": 1.0})
    won = Episode(
        index=0,
        prompt_ids=(1, 2),
        turns=(turn, last),
        stop=StopReason.TERMINATED,
        success=True,
        prompt="p",
    )
    lost = Episode(
        index=1, prompt_ids=(1, 2), turns=(turn,), stop=StopReason.HORIZON, generate_s=1.0
    )
    broken = Episode(index=2, prompt_ids=(), turns=(), stop=StopReason.ENV_ERROR, error="it broke")
    aside = last.model_copy(update={"branch": 1, "trained": False})
    forked = won.model_copy(
        update={"turns": (turn, aside, last), "branches": (Branch(prompt_ids=(1, 5), prompt="q"),)}
    )
    ticket = Ticket(
        number=7,
        kind=Kind.TRAIN,
        task=Task(env_id="textcraft", task_id="a"),
        group_size=3,
        horizon_turns=4,
    )
    demo = ticket.model_copy(update={"kind": Kind.DEMO, "group_size": 1})
    made = Provenance(actor="host-1", engine="vllm", model_digest="0" * 32)
    counts = {Kind.TRAIN: 5, Kind.DEMO: 0}
    outcomes = {Kind.TRAIN: Outcomes(trained=3, evaluated=4, dropped={DropReason.STALE: 2}, void=1)}
    return [
        ticket,
        demo,
        Group(
            ticket=ticket,
            episodes=(won, lost, broken),
            provenance=made,
            started_at_ms=1,
            finished_at_ms=2,
        ),
        Group(ticket=demo, episodes=(won,), provenance=made, deliveries=3),
        Group(ticket=ticket, episodes=(forked, lost, broken), provenance=made),
        Void(ticket=ticket, reason="delivered 5 times", actor="host-1"),
        Progress(
            step=4,
            phase=Phase.RL,
            outcomes=outcomes,
            lowest_unsettled=counts,
            ended_ranges={Kind.TRAIN: ((5, 6),)},
        ),
        Progress(
            growths=(
                HorizonGrowth(
                    env_id="babyai", phase_step=4, from_turns=10, to_turns=20, reason="cut"
                ),
            )
        ),
        WeightsManifest(
            policy=ticket.issued_at_version,
            weights_bytes=1 << 28,
            digest="f" * 32,
            path="/a/b",
            chunks=129,
        ),
        HorizonState(phase_step=4, horizons={"textcraft": 10, "babyai": 20}, tickets_issued=counts),
        RunSettings(
            total_steps=9,
            max_deliver=5,
            max_context_tokens=1024,
            environments=(
                EnvironmentSettings(
                    env_id="textcraft", options={"style": "compact", "sizes": [1, 2.5]}
                ),
            ),
        ),
    ]


def _flip(chance: random.Random, data: bytes, other: bytes) -> bytes:
    """Flip up to eight bits."""
    damaged = bytearray(data)
    for _ in range(chance.randint(1, 8)):
        damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
    return bytes(damaged)


def _splice(chance: random.Random, data: bytes, other: bytes) -> bytes:
    """Continue with another record's bytes."""
    return data[: chance.randrange(len(data))] + other[chance.randrange(len(other)) :]


def _truncate(chance: random.Random, data: bytes, other: bytes) -> bytes:
    return data[: chance.randrange(len(data))]


def _repeat(chance: random.Random, data: bytes, other: bytes) -> bytes:
    """Repeat some bytes."""
    first, last = sorted(chance.randrange(len(data) + 1) for _ in range(2))
    return data[:last] + data[first:last] * chance.choice((1, 2, 50)) + data[last:]


def _inflate(chance: random.Random, data: bytes, other: bytes) -> bytes:
    """Insert a header that claims a huge length, before some bytes or over them."""
    place, header = chance.randrange(len(data)), chance.choice(HEADERS)
    return (
        data[:place]
        + header * chance.choice((1, 1, 1, 100))
        + data[place + chance.choice((0, 1, len(header))) :]
    )


def _nest(chance: random.Random, data: bytes, other: bytes) -> bytes:
    """Nest a value or the whole record in arrays or maps, deeper than any valid record."""
    depth, opening = (
        chance.choice((2, 30, 500, 1100, 30_000)),
        chance.choice((b"\x91", b"\x81\xa1a", b"\x81\x91")),
    )
    place = chance.choice((0, chance.randrange(len(data))))
    return data[:place] + opening * depth + data[place:]


def _noise(chance: random.Random, data: bytes, other: bytes) -> bytes:
    return chance.randbytes(chance.choice((0, 1, 16, 200, 5_000)))


def _schema(chance: random.Random, data: bytes, other: bytes) -> bytes:
    return _packed({**msgpack.unpackb(data), "schema": chance.choice((0, 2, 1 << 63, -1, *ODD))})


def _retype(chance: random.Random, data: bytes, other: bytes) -> bytes:
    """Replace one or two values by odd ones."""
    record = msgpack.unpackb(data)
    for _ in range(chance.randint(1, 2)):
        holder, key = chance.choice(list(_places(record)))
        holder[key] = deepcopy(chance.choice(ODD))  # a copy, because the next round may change it
    return _packed(record)


def _nudge(chance: random.Random, data: bytes, other: bytes) -> bytes:
    """Change numbers only. Most results are valid records with another content."""
    record = msgpack.unpackb(data)
    for _ in range(chance.randint(1, 3)):
        holder, key = chance.choice(list(_places(record["body"])))
        if isinstance(holder[key], int | float):
            holder[key] = chance.choice(
                (0, 1, 2, 3, 1 << 31, 1 << 40, (1 << 53) - 1, -1e300, 1e300, 1e308, 0.25)
            )
        elif isinstance(holder[key], bytes):
            numbers = [chance.choice(PACKABLE) for _ in range(len(holder[key]) // 4)]
            holder[key] = chance.choice((b"".join(numbers), [-1e300 for _ in numbers]))
    return _packed(record)


def _unknown(chance: random.Random, data: bytes, other: bytes) -> bytes:
    """Add an unknown field; half the time, also remove a field."""
    record = msgpack.unpackb(data)
    holders = [record, *(holder for holder, _ in _places(record) if isinstance(holder, dict))]
    holder = chance.choice(holders)
    holder[chance.choice(("colour", "", "→", "schema", "logprobs", "prompt_ids"))] = deepcopy(
        chance.choice(ODD)
    )
    if chance.random() < 0.5:
        del holder[chance.choice(list(holder))]
    return _packed(record)


def _crowd(chance: random.Random, data: bytes, other: bytes) -> bytes:
    """Fill an array or a map with as many wrong values as the wire allows, since each may become an error message."""
    record = msgpack.unpackb(data)
    holder, key = chance.choice(
        [place for place in _places(record) if isinstance(place[0][place[1]], list | dict)]
    )
    wrong, many = chance.choice(
        ((None, 4096), ([None] * 200, 200), ({"turns": [None] * 1024}, 256), ({}, 4096))
    )
    holder[key] = (
        [wrong] * many
        if isinstance(holder[key], list)
        else {str(index): wrong for index in range(many)}
    )
    return _packed(record)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every place in a nested structure as (container, key or index)."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


def _packed(value: Any) -> bytes:
    return bytes(msgpack.packb(value))


MUTATIONS: dict[str, Mutation] = {
    "flip": _flip,
    "splice": _splice,
    "truncate": _truncate,
    "repeat": _repeat,
    "inflate": _inflate,
    "nest": _nest,
    "noise": _noise,
    "schema": _schema,
    "retype": _retype,
    "nudge": _nudge,
    "unknown": _unknown,
    "crowd": _crowd,
}


def _table(report: Report) -> Table:
    table = Table(
        title=f"{report.payloads:,} payloads, seed {report.seed}, each decoded as two types"
    )
    table.add_column("outcome")
    table.add_column("count", justify="right")
    rows = [(outcome, report.outcomes[outcome]) for outcome in OUTCOMES]
    rows += [(f"collector: {how}", number) for how, number in sorted(report.settled.items())]
    for outcome, number in rows:
        table.add_row(outcome, f"{number:,}")
    table.add_section()
    table.add_row("payloads a second", f"{report.payloads / report.seconds:,.0f}")
    table.add_row("peak of one payload, MB (sampled)", f"{report.peak_bytes / 1e6:.1f}")
    table.add_row("growth of the process, MB", f"{report.grown_bytes / 1e6:.1f}")
    return table
