"""Who may do what on the broker: the least that each role needs, as subjects of a nats-server (PROTOCOL.md, "Roles").

nats-server checks the subject of a request, but not the subject that its answer goes to. So a run's streams are in an
account that only its controller enters. Each other role has an account of its own, which imports the subjects listed
here from the run's account, and nothing else. An answer therefore stays in the account of whoever asked, whatever
subject it is sent to.

What is not listed is denied. Only the controller creates consumers; a reader asks for messages by their sequence.
"""

from collections.abc import Iterator

from horizonrl.broker.api import Key, Role, Stream
from horizonrl.broker.nats.streams import (
    ACTORS,
    bucket_name,
    news_subject,
    stream_name,
    stream_spec,
)

GUESTS = (Role.LEARNER, Role.ACTOR, Role.MONITOR)
"""The roles with an account of their own."""
WRITES = {
    Role.CONTROLLER: ("tickets.train", "tickets.demo", "tickets.eval", "tickets.again"),
    Role.LEARNER: ("weights.frame", "weights.changes", "weights.base", "dead.groups"),
    Role.ACTOR: (
        "groups.train",
        "groups.demo",
        "groups.eval",
        "groups.void",
        "groups.part",
        "groups.joined",
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
    Role.CONTROLLER: (Stream.TICKETS, Stream.GROUPS),
    Role.LEARNER: (Stream.TICKETS, Stream.GROUPS),
    Role.ACTOR: (Stream.WEIGHTS,),
    Role.MONITOR: (Stream.TICKETS,),
}
"""The streams whose messages a role reads. Every role reads the state."""
PURGES = {
    Role.CONTROLLER: (Stream.TICKETS,),
    Role.LEARNER: (Stream.GROUPS, Stream.WEIGHTS),
    Role.ACTOR: (),
    Role.MONITOR: (),
}


def account(run: str, role: Role) -> str:
    """Return the name of a role's account. No run's name has a dot, so that no two runs share an account."""
    # The controller needs no other account: who may create streams may do anything in the run's account (ADR 16).
    return f"{run}.{role.value}" if role in GUESTS else run


def inbox(run: str, role: Role, user: str = "") -> str:
    """Return the prefix of the subjects on which a user receives answers; `user` is its public nkey, if it has one."""
    return ".".join(filter(None, ("_INBOX", run, role.value, user)))


def names(run: str) -> list[str]:
    """Return the names of a run's streams on the server."""
    return [*(stream_name(run, stream) for stream in Stream), f"KV_{bucket_name(run)}"]


def publishes(run: str, role: Role) -> list[str]:
    """Return the subjects that a role may publish to."""
    return [
        *(f"{run}.{subject}" for subject in WRITES[role]),
        *(f"$KV.{bucket_name(run)}.{key.value}" for key in SETS[role]),
        "$JS.API.INFO",
        # Actors too: a publisher of parts asks whether a purge has overtaken them (`GroupLog._holds`).
        *(f"$JS.API.STREAM.INFO.{name}" for name in names(run)),
        *(subject for stream in READS[role] for subject in _reading(run, stream)),
        f"$JS.API.STREAM.MSG.GET.KV_{bucket_name(run)}",
        *(f"$JS.API.STREAM.PURGE.{stream_name(run, stream)}" for stream in PURGES[role]),
        *_queue(run, role),
        *(_creating(run) if role is Role.CONTROLLER else ()),
    ]


def hears(run: str) -> str:
    """Return the subject that every role may subscribe to in addition to its inbox: the news that a key was set."""
    return news_subject(run, "*")


def answered_often(subject: str) -> bool:
    """Return whether a request to a subject gets more than one answer."""
    return ".CONSUMER.MSG.NEXT." in subject or ".DIRECT.GET." in subject


def _reading(run: str, stream: Stream) -> Iterator[str]:
    if not stream_spec(stream).direct:
        yield f"$JS.API.STREAM.MSG.GET.{stream_name(run, stream)}"
    yield f"$JS.API.DIRECT.GET.{stream_name(run, stream)}"


def _queue(run: str, role: Role) -> Iterator[str]:
    """Yield the subjects of the ticket queue. Acknowledgements have two forms: nats-server may ask for either."""
    consumer = f"{stream_name(run, Stream.TICKETS)}.{ACTORS}"
    yield f"$JS.API.CONSUMER.INFO.{consumer}"
    # Every other role may see how long the queue is, but cannot take a ticket or end one.
    if role is Role.ACTOR:
        yield f"$JS.API.CONSUMER.MSG.NEXT.{consumer}"
        yield f"$JS.ACK.{consumer}.>"
        yield f"$JS.ACK.*.*.{consumer}.>"


def _creating(run: str) -> Iterator[str]:
    """Yield the subjects that create streams and queue, and that remove consumers which do not belong there."""
    for name in names(run):
        yield f"$JS.API.STREAM.CREATE.{name}"
        yield f"$JS.API.STREAM.UPDATE.{name}"
        yield f"$JS.API.CONSUMER.LIST.{name}"
        yield f"$JS.API.CONSUMER.DELETE.{name}.*"
    yield f"$JS.API.CONSUMER.CREATE.{stream_name(run, Stream.TICKETS)}.{ACTORS}"
