"""The storm: fires a plan's events at a cluster, and keeps account of what it did.

Events on one victim follow one another; events on different victims overlap.
"""

import asyncio
import json
import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from horizonrl.broker.api import Message, Stream
from horizonrl.common.errors import LogGap
from horizonrl.ops.bench.cluster import Cluster
from horizonrl.ops.bench.plan import PAUSE_S, ROLES, Event, Fault, Target

START_S = 180.0
PROGRESS_S = 60.0
"""After so long without progress the learner is killed all the same: one death must not wait for the last for ever."""
MAX_DELAY_S = 0.3
FETCH_S = 5.0


class Storm:
    def __init__(self, whole: Cluster, plan: Sequence[Event], say: Callable[[str], None]) -> None:
        self.fired: list[Event] = []
        self.starved = 0
        """How often the learner was killed although the run had made no progress since its last death."""
        self._whole = whole
        self._plan = plan
        self._say = say
        self._busy: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._deadly_step = 0
        """How far the run had come when the learner was last killed."""
        self._started = time.monotonic()

    async def rage(self) -> None:
        """Fire every event. Raises RunFailed when the run does not start, or when a role ends by itself."""
        await self._whole.until("the first RL step", lambda: self._whole.rl_step > 0, START_S)
        async with asyncio.TaskGroup() as group:
            for event in self._plan:
                await asyncio.sleep(event.pause_s)
                self._whole.check()
                victim = self._victim(event)
                await self._busy[victim].acquire()
                group.create_task(self._fire(event, victim))

    def counts(self) -> dict[str, Any]:
        """Return how many events there were, in all, by role and by fault."""
        roles = {role.value: sum(event.target is role for event in self.fired) for role in ROLES}
        sigkills = Counter(event.target.value for event in self.fired if event.fault is Fault.KILL)
        return {
            "kills": len(self.fired),
            "by_role": roles,
            "sigkills": dict(sigkills),
            "by_event": dict(Counter(event.fault.value for event in self.fired)),
            "starved": self.starved,
        }

    def _victim(self, event: Event) -> str:
        """Return whose turn it is: one of the actors, or the target itself."""
        if event.target is not Target.ACTOR:
            return event.target.value
        return self._whole.actors[int(event.choice * len(self._whole.actors))].name

    async def _fire(self, event: Event, victim: str) -> None:
        try:
            if event.fault is Fault.KILL and event.target is Target.LEARNER:
                await self._progress(event)
            self._note(event, victim)
            match event.fault:
                case Fault.KILL:
                    await self._kill(event, victim)
                case Fault.STOP:
                    await self._stop(event, victim)
                case Fault.DELAY:
                    await self._delay(event)
                case Fault.BREAK:
                    self._whole.proxy.break_connections()
                case Fault.REPEAT_GROUP:
                    await self._repeat(Stream.GROUPS, event.choice)
                case Fault.REPEAT_TICKET:
                    await self._repeat(Stream.TICKETS, event.choice)
        finally:
            self._busy[victim].release()

    async def _progress(self, event: Event) -> None:
        """Wait until the run has come further than where the learner last died, and some random time more.

        An impatient event does not: it hits a learner that is still resuming.
        """
        if not event.impatient:
            further = await self._whole.within(PROGRESS_S, lambda: self._whole.last_step > self._deadly_step)
            self.starved += not further
            await asyncio.sleep(event.choice * PAUSE_S)
        self._deadly_step = max(self._deadly_step, self._whole.last_step)

    async def _kill(self, event: Event, victim: str) -> None:
        if event.target is Target.BROKER:
            await self._whole.server.kill()
            await asyncio.sleep(event.length_s)
            await self._whole.server.start()
        else:
            await self._whole.roles[victim].kill(event.length_s)

    async def _stop(self, event: Event, victim: str) -> None:
        def send(number: signal.Signals) -> None:
            if event.target is Target.BROKER:
                os.kill(self._whole.server.pid, number)
            else:
                self._whole.roles[victim].signal(number)

        send(signal.SIGSTOP)
        await asyncio.sleep(event.length_s)
        send(signal.SIGCONT)

    async def _delay(self, event: Event) -> None:
        self._whole.proxy.delay_s = MAX_DELAY_S * event.choice
        await asyncio.sleep(event.length_s)
        self._whole.proxy.delay_s = 0.0

    async def _repeat(self, stream: Stream, choice: float) -> None:
        """Store a message again that the stream holds, past the server's memory of message ids."""
        message: Message | None = None
        while message is None:
            extent = await self._whole.transport.extent(stream)
            place = int(choice * (extent.last_sequence + 1 - extent.first_sequence))
            message = await self._read(stream, extent.first_sequence + place)
        await self._whole.transport.publish(message.subject, message.data, message_id=f"repeat-{time.time_ns()}")

    async def _read(self, stream: Stream, sequence: int) -> Message | None:
        """Return the message at a sequence or the next one; None when it was purged just now."""
        reader = await self._whole.transport.reader(stream, sequence - 1)
        try:
            messages = await reader.fetch(1, FETCH_S)
        except LogGap:
            return None
        finally:
            await reader.close()
        return messages[0] if messages else None

    def _note(self, event: Event, victim: str) -> None:
        self.fired.append(event)
        at_s = round(time.monotonic() - self._started, 2)
        step = self._whole.last_step
        line = {"at_s": at_s, "fault": event.fault.value, "victim": victim, "length_s": round(event.length_s, 2)}
        with (self._whole.directory / "events.jsonl").open("a") as file:
            file.write(json.dumps(line | {"step": step}) + "\n")
        self._say(f"{len(self.fired):4d}  {at_s:7.1f} s  step {step:5d}  {event.fault.value} {victim}")
