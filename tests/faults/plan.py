"""The plan of a chaos run: what happens to which target in which order, a pure function of `(events, seed)`.

The plan holds pauses, not times: when an event happens depends on the machine.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum


class Fault(StrEnum):
    KILL = "kill"
    """SIGKILL; the role starts again after `length_s`."""
    TERMINATE = "terminate"
    """SIGTERM; the role starts again after `length_s`."""
    STOP = "stop"
    """SIGSTOP, and SIGCONT after `length_s`: the process comes back with expired leases and outdated state."""
    DELAY = "delay"
    """For `length_s`, every byte between the roles and the broker is late."""
    BREAK = "break"
    """Every connection to the broker breaks."""
    REPEAT_GROUP = "repeat_group"
    """A message of the group log is published again under another message id."""
    REPEAT_TICKET = "repeat_ticket"
    FULL_LOG = "full_log"
    """For `length_s`, the group log has room for only a few groups."""
    FULL_DISK = "full_disk"
    """For `length_s`, the broker can write nothing. Once it has complained and there is room, it is started again."""
    ISOLATE = "isolate"
    """For `length_s`, one server of a cluster is cut off from the others, and from its clients too or not."""
    FENCE = "fence"
    """Another process writes `progress`, so the learner gives up and is started again."""
    TWO_LEARNERS = "two_learners"
    """A second learner starts on a copy of the run directory, and one of the two gives up. Then the second dies."""
    STORE_BACK = "store_back"
    """The broker's store goes back by 1 to 20 steps, as after a power cut or from a backup; every role lives on."""
    RUN_BACK = "run_back"
    """The run directory goes back by 1 to 20 steps."""
    CHECKPOINT_BIT = "checkpoint_bit"
    """One bit of the newest checkpoint flips."""
    EMPTY_WEIGHTS = "empty_weights"
    """Every weights file goes, and an actor is killed."""
    FOREIGN_FILES = "foreign_files"
    """Somebody keeps files of his own in the run's folders, and a learner starts on them."""
    ZOMBIE_CONTROLLER = "zombie_controller"
    """The controller stands still while another one takes over, and comes back."""
    DAMAGE_REPLICA = "damage_replica"
    """One server of a cluster loses a block, a part of one or a bit; later it is started without its store."""


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
    (Fault.STORE_BACK, Target.BROKER),
    (Fault.RUN_BACK, Target.LEARNER),
    (Fault.CHECKPOINT_BIT, Target.LEARNER),
    (Fault.EMPTY_WEIGHTS, Target.ACTOR),
    (Fault.FOREIGN_FILES, Target.LEARNER),
    (Fault.ZOMBIE_CONTROLLER, Target.CONTROLLER),
)
DEADLY = (Fault.KILL, Fault.TERMINATE, Fault.FENCE, Fault.TWO_LEARNERS)
"""Events that end a learner."""
ROLE_SHARE = 6
"""At least one event in this many hits each role: kills, one stop and one SIGTERM."""
PAUSE_S = 2.0
"""Longest pause before an event."""
STOP_S = (0.3, 6.0)
"""From 0.2 to 4 times the lease of the chaos recipe (`ack_wait_s` 1.5), so that some leases expire and some do not."""
SERVER_FAULTS = (Fault.KILL, Fault.STOP, Fault.ISOLATE, Fault.TERMINATE)
"""What happens to the servers of a cluster in turn, where a single server is only killed."""
AWAY_S = (2.0, 30.0)
"""How long a server of a cluster is paused or cut off: from shorter than an election (5 s) to much longer than the 10 s
after which clients leave it."""
LASTING = (Fault.STOP, Fault.FULL_LOG, Fault.FULL_DISK)
RESTART_S = 2.0
IMPATIENT_SHARE = 0.2
"""Share of events that do not wait for progress, so that a learner also dies while it resumes."""


@dataclass(frozen=True, slots=True)
class Event:
    fault: Fault
    target: Target
    pause_s: float
    """Pause between the previous event and this one."""
    length_s: float
    """How long the fault lasts. If the fault ends a role: how long the role stays dead."""
    impatient: bool = False
    """If true, the event does not wait for progress since the learner's last death."""
    choice: float = 0.0
    """Chooses one of several actors or messages; from 0 to 1."""


def make_plan(events: int, seed: int, servers: int = 1) -> tuple[Event, ...]:
    """Return `events` events in random order, of which at least a sixth hit each of the four roles.

    Each role is killed `events // 6 - 1` times, but at least once; if there is room, it is also terminated once and
    stopped once. The disturbances fill the next places, and the rest is drawn from all kinds. With several servers, the
    broker's kills are divided among `SERVER_FAULTS`.
    """
    # A text seeds by its own bytes: the same plan in every process, whatever PYTHONHASHSEED is.
    draw = random.Random(f"chaos/{seed}")
    once = [(fault, role) for fault in (Fault.KILL, Fault.TERMINATE, Fault.STOP) for role in ROLES]
    kills = [(Fault.KILL, role) for role in ROLES for _ in range(events // ROLE_SHARE - 2)]
    disturbances = list(DISTURBANCES)
    if servers > 1:
        turns = itertools.cycle(SERVER_FAULTS)
        kills = [(next(turns) if role is Target.BROKER else fault, role) for fault, role in kills]
        disturbances[:0] = [(Fault.ISOLATE, Target.BROKER), (Fault.DAMAGE_REPLICA, Target.BROKER)]
    anything = [*once, *disturbances]
    kinds = [*once, *kills, *disturbances][:events]
    kinds += draw.choices(anything, k=events - len(kinds))
    draw.shuffle(kinds)
    plan = tuple(_events(kinds, draw))
    return plan if servers == 1 else tuple(_prolonged(plan, draw))


def _prolonged(plan: Sequence[Event], draw: random.Random) -> Iterator[Event]:
    """Yield the events, with servers that stay away for AWAY_S: short absences as often as long ones."""
    for event in plan:
        away = event.target is Target.BROKER and event.fault in (Fault.STOP, Fault.ISOLATE)
        yield (
            replace(event, length_s=AWAY_S[0] * (AWAY_S[1] / AWAY_S[0]) ** draw.random())
            if away
            else event
        )


def _events(kinds: list[tuple[Fault, Target]], draw: random.Random) -> Iterator[Event]:
    for fault, target in kinds:
        at_once = fault in (Fault.KILL, Fault.TERMINATE) and draw.random() < 0.5
        yield Event(
            fault=fault,
            target=target,
            pause_s=draw.uniform(0.0, PAUSE_S),
            length_s=0.0
            if at_once
            else draw.uniform(*STOP_S if fault in LASTING else (0.0, RESTART_S)),
            impatient=draw.random() < IMPATIENT_SHARE,
            choice=draw.random(),
        )
