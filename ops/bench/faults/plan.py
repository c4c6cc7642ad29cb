"""The plan of a chaos run: what happens to whom, in which order, as a pure function of `(events, seed)`.

When an event happens depends on the machine; the plan holds the pauses, not the times.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class Fault(StrEnum):
    KILL = "kill"
    """SIGKILL; started again after `length_s`."""
    TERMINATE = "terminate"
    """SIGTERM; started again after `length_s`."""
    STOP = "stop"
    """SIGSTOP, and SIGCONT after `length_s`: a process that was away and comes back with old leases and beliefs."""
    DELAY = "delay"
    """Every byte between the roles and the broker is late for `length_s`."""
    BREAK = "break"
    """Every connection to the broker breaks."""
    REPEAT_GROUP = "repeat_group"
    """A message of the group log is stored again under another message id."""
    REPEAT_TICKET = "repeat_ticket"
    FULL_LOG = "full_log"
    """The group log has room for a few groups only for `length_s`."""
    FULL_DISK = "full_disk"
    """The broker can write nothing for `length_s`; once it says so and there is room, it is started again."""
    FENCE = "fence"
    """Somebody else speaks for the run; the learner that he replaces is started again."""
    TWO_LEARNERS = "two_learners"
    """A second learner begins on a copy of the run directory, and is itself replaced by the first, started again."""


class Target(StrEnum):
    ACTOR = "actor"
    LEARNER = "learner"
    CONTROLLER = "controller"
    BROKER = "broker"
    NETWORK = "network"
    STREAMS = "streams"


ROLES = (Target.ACTOR, Target.LEARNER, Target.CONTROLLER, Target.BROKER)
DISTURBANCES = (
    (Fault.DELAY, Target.NETWORK),
    (Fault.BREAK, Target.NETWORK),
    (Fault.REPEAT_GROUP, Target.STREAMS),
    (Fault.REPEAT_TICKET, Target.STREAMS),
    (Fault.FULL_LOG, Target.STREAMS),
    (Fault.FULL_DISK, Target.BROKER),
    (Fault.FENCE, Target.LEARNER),
    (Fault.TWO_LEARNERS, Target.LEARNER),
)
DEADLY = (Fault.KILL, Fault.TERMINATE, Fault.FENCE, Fault.TWO_LEARNERS)
"""Events that end a learner."""
ROLE_SHARE = 6
"""Each role gets at least one event in so many: kills, and one stop and one SIGTERM."""
PAUSE_S = 2.0
"""Longest pause before an event."""
STOP_S = (0.3, 6.0)
"""Up to four times the lease of the chaos recipe, so that some leases are lost and some are kept."""
LASTING = (Fault.STOP, Fault.FULL_LOG, Fault.FULL_DISK)
RESTART_S = 2.0
IMPATIENT_SHARE = 0.2
"""How many of the learner's deaths may come before it has made progress: it then dies while it resumes."""


@dataclass(frozen=True, slots=True)
class Event:
    fault: Fault
    target: Target
    pause_s: float
    """Between the event before it and this one."""
    length_s: float
    """How long the fault lasts; for what ends a role, how long it stays dead."""
    impatient: bool = False
    """Does not wait for the run to have made progress since the learner's last death."""
    choice: float = 0.0
    """Which of several (actors, messages), from 0 to 1."""


def make_plan(events: int, seed: int) -> tuple[Event, ...]:
    """Return so many events in random order, of which at least a sixth hit each of the four roles.

    Each role is killed `events // 6 - 1` times, at least once, and while there is room ended once and stopped once;
    then come the disturbances, and the rest is drawn from everything.
    """
    draw = random.Random(f"chaos/{seed}")
    once = [(fault, role) for fault in (Fault.KILL, Fault.TERMINATE, Fault.STOP) for role in ROLES]
    kills = [(Fault.KILL, role) for role in ROLES for _ in range(events // ROLE_SHARE - 2)]
    anything = [*once, *DISTURBANCES]
    kinds = [*once, *kills, *DISTURBANCES][:events]
    kinds += draw.choices(anything, k=events - len(kinds))
    draw.shuffle(kinds)
    return tuple(_events(kinds, draw))


def _events(kinds: list[tuple[Fault, Target]], draw: random.Random) -> Iterator[Event]:
    for fault, target in kinds:
        at_once = fault in (Fault.KILL, Fault.TERMINATE) and draw.random() < 0.5
        yield Event(
            fault=fault,
            target=target,
            pause_s=draw.uniform(0.0, PAUSE_S),
            length_s=0.0 if at_once else draw.uniform(*STOP_S if fault in LASTING else (0.0, RESTART_S)),
            impatient=draw.random() < IMPATIENT_SHARE,
            choice=draw.random(),
        )
