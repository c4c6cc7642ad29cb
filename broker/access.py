"""Who may do what on the broker: the least that each role needs, as subjects of a nats-server (PROTOCOL.md, "Roles").

A role publishes what it writes and asks JetStream's API for what it reads; it subscribes to its own inbox alone, so
that it overhears nobody. What is not listed is denied.
"""

from collections.abc import Iterator
from enum import StrEnum

from horizonrl.broker.api import Key, Stream
from horizonrl.broker.streams import ACTORS, bucket_name, stream_name


class Role(StrEnum):
    """The users of a run's broker."""

    CONTROLLER = "controller"
    """Creates the streams; the others wait for them."""
    LEARNER = "learner"
    ACTOR = "actor"
    MONITOR = "monitor"
    """Reads where the run stands: `horizonrl status`."""


WRITES = {
    Role.CONTROLLER: ("tickets.train", "tickets.demo", "tickets.eval", "tickets.again"),
    Role.LEARNER: ("weights.frame", "dead.groups"),
    Role.ACTOR: (
        *("groups.train", "groups.demo", "groups.eval", "groups.void", "groups.part", "groups.joined"),
        "dead.tickets",
    ),
    Role.MONITOR: (),
}
SETS = {
    Role.CONTROLLER: (Key.HORIZON, Key.RUN),
    Role.LEARNER: (Key.PROGRESS, Key.POLICY),
    Role.ACTOR: (),
    Role.MONITOR: (),
}
READS = {
    Role.CONTROLLER: (Stream.TICKETS,),
    Role.LEARNER: (Stream.TICKETS, Stream.GROUPS),
    Role.ACTOR: (Stream.WEIGHTS,),
    Role.MONITOR: (Stream.TICKETS,),
}
"""The streams whose messages a role reads in order."""
PURGES = {
    Role.CONTROLLER: (Stream.TICKETS,),
    Role.LEARNER: (Stream.GROUPS, Stream.WEIGHTS),
    Role.ACTOR: (),
    Role.MONITOR: (),
}


def inbox(run: str, role: Role) -> str:
    """Return the prefix of the subjects on which a role takes answers."""
    return f"_INBOX.{run}.{role.value}"


def names(run: str) -> list[str]:
    """Return the names of a run's streams on the server."""
    return [*(stream_name(run, stream) for stream in Stream), f"KV_{bucket_name(run)}"]


def publishes(run: str, role: Role) -> list[str]:
    """Return the subjects that a role may publish to."""
    bucket = f"KV_{bucket_name(run)}"
    subjects = [f"{run}.{subject}" for subject in WRITES[role]]
    subjects += [f"$KV.{bucket_name(run)}.{key.value}" for key in SETS[role]]
    subjects += [f"$JS.API.STREAM.INFO.{name}" for name in names(run)]
    for stream in READS[role]:
        subjects += _reading(stream_name(run, stream), f"{run}.{stream.value.lower()}.>")
    subjects += _reading(bucket, f"$KV.{bucket_name(run)}.*")
    subjects += [f"$JS.API.STREAM.PURGE.{stream_name(run, stream)}" for stream in PURGES[role]]
    return [*subjects, *_tickets(run, role)]


def denies(run: str, role: Role) -> list[str]:
    """Return what a role may not publish to although `publishes` covers it: a reader's `*` is also the queue."""
    consumer = f"{stream_name(run, Stream.TICKETS)}.{ACTORS}"
    denied = [f"$JS.API.CONSUMER.DELETE.{consumer}", f"$JS.API.CONSUMER.CREATE.{consumer}.>"]
    return denied if role is Role.ACTOR else [*denied, f"$JS.API.CONSUMER.MSG.NEXT.{consumer}"]


def _tickets(run: str, role: Role) -> Iterator[str]:
    """Yield what concerns the queue of tickets. Acknowledgements have two forms: nats-server may ask for either."""
    consumer = f"{stream_name(run, Stream.TICKETS)}.{ACTORS}"
    yield f"$JS.API.CONSUMER.INFO.{consumer}"
    if role is Role.ACTOR:
        yield f"$JS.API.DIRECT.GET.{stream_name(run, Stream.WEIGHTS)}"
        yield f"$JS.API.CONSUMER.MSG.NEXT.{consumer}"
        yield f"$JS.ACK.{consumer}.>"
        yield f"$JS.ACK.*.*.{consumer}.>"
    if role is Role.CONTROLLER:
        yield f"$JS.API.STREAM.MSG.GET.{stream_name(run, Stream.GROUPS)}"  # how far the log goes
        for name in names(run):
            yield f"$JS.API.STREAM.CREATE.{name}"
            yield f"$JS.API.STREAM.UPDATE.{name}"
        yield f"$JS.API.CONSUMER.CREATE.{consumer}"


def _reading(name: str, subjects: str) -> Iterator[str]:
    """Yield what reading a stream needs: single messages, and a short-lived consumer of one's own."""
    yield f"$JS.API.STREAM.MSG.GET.{name}"
    yield f"$JS.API.CONSUMER.CREATE.{name}.*.{subjects}"
    yield f"$JS.API.CONSUMER.MSG.NEXT.{name}.*"
    yield f"$JS.API.CONSUMER.DELETE.{name}.*"
