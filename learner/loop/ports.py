"""What the parts of a learner share: the ways out of the process. `learner/main.py` opens them.

Place in the flow: everyone in this room → broker, engine, run directory, Prometheus.
"""

import asyncio
from dataclasses import dataclass

from horizonrl.broker.api import Transport
from horizonrl.broker.groups import GroupLog
from horizonrl.broker.tickets import TicketQueue
from horizonrl.common.metrics import Metrics
from horizonrl.common.state import RunSettings
from horizonrl.learner.engine.thread import EngineThread
from horizonrl.learner.loop.fence import Fence
from horizonrl.learner.records.checkpoint import CheckpointStore
from horizonrl.learner.records.journal import Journal


@dataclass(frozen=True, slots=True)
class Ports:
    transport: Transport
    log: GroupLog
    tickets: TicketQueue
    fence: Fence
    engine: EngineThread
    journal: Journal
    checkpoints: CheckpointStore
    metrics: Metrics
    stopping: asyncio.Event
    """Ends every wait for the broker: a resumed learner announces all of it again."""
    settings: RunSettings
    """What must agree with the controller's recipe."""
