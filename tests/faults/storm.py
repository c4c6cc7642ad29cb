"""The storm: fires the events of a plan at a cluster and records what it did.

Events on the same victim happen one after another; events on different victims overlap.
"""

import asyncio
import contextlib
import json
import os
import resource
import shutil
import signal
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from horizonrl.broker.api import Key, Message, Stream
from horizonrl.broker.connect import connected
from horizonrl.common.config.schema import BrokerSection
from horizonrl.common.errors import LogGap, RunFailed, StateConflict
from horizonrl.learner.records.checkpoint import CheckpointStore
from tests.faults import damage
from tests.faults.cluster import POLL_S, Cluster, RoleProcess
from tests.faults.plan import DEADLY, PAUSE_S, ROLES, Event, Fault, Target
from tests.faults.witness import Witness

START_S = 180.0
PROGRESS_S = 60.0
"""After this long without progress the learner is killed anyway, so that no death waits for progress for ever."""
MAX_DELAY_S = 0.3
FETCH_S = 5.0
LOG_ROOM_BYTES = 8 << 10
"""Room left in a full group log: a few groups may arrive while its limit is lowered."""
AILS_S = 60.0
LEADER_S = 15.0
FENCED_S = 120.0
UNREACHED_CODE = 1
"""The exit code of a role that found no broker, or no streams, in its time."""
FENCED_CODE = 2
"""The exit code of a learner that another one has replaced. Nobody should start it again, but a chaos run does."""


class Storm:
    def __init__(
        self, whole: Cluster, plan: Sequence[Event], say: Callable[[str], None], witness: Witness
    ) -> None:
        self.fired: list[Event] = []
        self.findings: list[str] = []
        """Events that did not end as they should have."""
        self.starved = 0
        """How often the learner was killed although the run had made no progress since its last death."""
        self.leaders_hit = 0
        """How often a server of a cluster was hit as the leader of a stream."""
        self.stores_back = 0
        """How often the broker's store was put back."""
        self.whole = whole
        self.witness = witness
        self._plan = plan
        self._say = say
        self._busy: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._deadly_step = 0
        """The run's last step when the learner was last killed."""
        self._started = time.monotonic()

    async def rage(self) -> None:
        """Fire every event. Raises RunFailed if the run does not start, or if a role ends by itself."""
        await self.whole.until("the first RL step", lambda: self.whole.rl_step > 0, START_S)
        async with asyncio.TaskGroup() as group:
            for event in self._plan:
                await asyncio.sleep(event.pause_s)
                self.whole.check()
                victim = self._victim(event)
                # Taken here and not in the task, so that events on one victim keep the plan's order.
                await self._busy[victim].acquire()
                group.create_task(self._fire(event, victim))

    def counts(self) -> dict[str, Any]:
        """Return the number of events: in total, by role and by fault."""
        roles = {role.value: sum(event.target is role for event in self.fired) for role in ROLES}
        sigkills = Counter(event.target.value for event in self.fired if event.fault is Fault.KILL)
        return {
            "kills": len(self.fired),
            "by_role": roles,
            "sigkills": dict(sigkills),
            "by_event": dict(Counter(event.fault.value for event in self.fired)),
            "leaders_hit": self.leaders_hit,
            "starved": self.starved,
        }

    def _victim(self, event: Event) -> str:
        """Return the name of the victim: one of the actors, or the target itself."""
        if event.target is not Target.ACTOR:
            return event.target.value
        return self.whole.actors[int(event.choice * len(self.whole.actors))].name

    async def _fire(self, event: Event, victim: str) -> None:
        try:
            if event.fault in DEADLY and event.target is Target.LEARNER:
                await self._progress(event)
            async with contextlib.AsyncExitStack() as stack:
                # A store that goes back ends the learner: whoever expects another end of it would be surprised.
                for role in ("learner", "controller") if event.fault is Fault.STORE_BACK else ():
                    await stack.enter_async_context(self._busy[role])
                self._note(event, victim)
                await FIRE[event.fault](self, event, victim)
        finally:
            self._busy[victim].release()

    async def _progress(self, event: Event) -> None:
        """Wait until the run has passed the step at which the learner last died, and then for a random time.

        An impatient event does not wait, so it hits a learner that is still resuming.
        """
        if not event.impatient:
            further = await self.whole.within(
                PROGRESS_S, lambda: self.whole.last_step > self._deadly_step
            )
            self.starved += not further
            await asyncio.sleep(event.choice * PAUSE_S)
        # A learner that resumes cuts the ledger: without `max`, the steps that it repeats would count as progress.
        self._deadly_step = max(self._deadly_step, self.whole.last_step)

    async def _kill(self, event: Event, victim: str) -> None:
        if event.target is Target.BROKER:
            server = self.whole.servers.members[await self._member(event)]
            await server.kill()
            await asyncio.sleep(event.length_s)
            await server.start()
        else:
            await self.whole.roles[victim].end(signal.SIGKILL, event.length_s)

    async def _terminate(self, event: Event, victim: str) -> None:
        if event.target is Target.BROKER:
            server = self.whole.servers.members[await self._member(event)]
            await server.stop()
            await asyncio.sleep(event.length_s)
            await server.start()
        else:
            code = await self.whole.roles[victim].end(signal.SIGTERM, event.length_s)
            # -15 if it was still starting.
            self.expect(f"the {victim} after SIGTERM", code, 128 + signal.SIGTERM, -signal.SIGTERM)

    async def _stop(self, event: Event, victim: str) -> None:
        member = await self._member(event) if event.target is Target.BROKER else 0

        def send(number: signal.Signals) -> None:
            if event.target is Target.BROKER:
                os.kill(self.whole.servers.members[member].pid, number)
            else:
                self.whole.roles[victim].signal(number)

        send(signal.SIGSTOP)
        await asyncio.sleep(event.length_s)
        send(signal.SIGCONT)

    async def _delay(self, event: Event, _: str) -> None:
        for proxy in self.whole.servers.clients:
            proxy.delay_s = MAX_DELAY_S * event.choice
        await asyncio.sleep(event.length_s)
        for proxy in self.whole.servers.clients:
            proxy.delay_s = 0.0

    async def _isolate(self, event: Event, _: str) -> None:
        """Cut one server off. Its connections break at the start or not, and its clients are cut off too or not."""
        member = await self._member(event)
        # The last digits of the choice: its first ones have chosen the server.
        breaks, with_clients = int(event.choice * 1e4) % 2 == 0, int(event.choice * 1e5) % 2 == 0
        lines = list(self.whole.servers.lines(member, with_clients=with_clients))
        for line in lines:
            line.hold()
            if breaks:
                line.break_connections()
        await asyncio.sleep(event.length_s)
        for line in lines:
            line.release()

    async def _member(self, event: Event) -> int:
        """Return the number of the server that an event hits: mostly the leader of a stream, else any."""
        members = self.whole.servers.members
        if len(members) == 1:
            return 0
        # None is the bucket of the keys. Two times out of seven, any server.
        led = [*Stream, None][int(event.choice * 7) : int(event.choice * 7) + 1]
        # While the streams have no leader, any server will do.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEADER_S):
                if led and (leader := await self.whole.transport.leader(led[0])):
                    self.leaders_hit += 1
                    return self.whole.servers.number(leader)
        return int(event.choice * len(members))

    async def _break(self, _: Event, __: str) -> None:
        for proxy in self.whole.servers.clients:
            proxy.break_connections()

    async def _repeat_group(self, event: Event, _: str) -> None:
        await self._repeat(Stream.GROUPS, event.choice)

    async def _repeat_ticket(self, event: Event, _: str) -> None:
        await self._repeat(Stream.TICKETS, event.choice)

    async def _fill_log(self, event: Event, _: str) -> None:
        """Lower the limit of the group log to its present size plus LOG_ROOM_BYTES, and raise it again later.

        A controller that starts meanwhile raises it too.
        """
        config = self.whole.config
        before = await self.whole.transport.extent(Stream.GROUPS)
        limit = before.stored_bytes + LOG_ROOM_BYTES
        # Whoever connects as the controller sets the stream's limit.
        async with connected(config.run.name, self._broker(max_log_bytes=limit)):
            await asyncio.sleep(event.length_s)
        async with connected(config.run.name, self._broker()):
            after = await self.whole.transport.extent(Stream.GROUPS)
        # A full log refuses entries (`discard=new`). One that dropped its oldest instead would lose tickets.
        if after.first_sequence != before.first_sequence:
            self.findings.append(
                f"full log: the broker removed what is below sequence {after.first_sequence}"
            )

    async def _fill_disk(self, event: Event, _: str) -> None:
        """Let the broker write nothing; then start it again as `train` would."""
        server = self.whole.servers.members[await self._member(event)]
        # A limit on file size stands in for a full disk, and hits this process alone. Only the soft limit moves, since
        # nobody but root may raise a hard one again.
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        async with _within(AILS_S, "a write of the broker to its full disk"):
            while await server.complaint() is None:
                await asyncio.sleep(POLL_S)
        await asyncio.sleep(event.length_s)
        resource.prlimit(
            server.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        )
        await server.curable()
        await server.kill()
        await server.start()

    async def _fence(self, event: Event, _: str) -> None:
        """Write the learner's last `progress` again. To the learner it looks as if another process wrote it."""
        learner, transport = self.whole.roles["learner"], self.whole.transport
        restarts = learner.restarts
        async with _within(FENCED_S, "the end of a learner that was fenced"):
            # A learner that is still starting has not written progress yet.
            while learner.restarts == restarts:
                revision = await transport.revision(Key.PROGRESS)
                if (progress := await transport.get(Key.PROGRESS)) is not None:
                    # Only its last word: an older one looks like a broker that has gone back in time.
                    with contextlib.suppress(StateConflict):
                        await transport.put(Key.PROGRESS, progress, revision)
                await asyncio.sleep(1.0)
        self.expect("the learner that was fenced", learner.crashes[-1], FENCED_CODE)

    async def _two_learners(self, event: Event, _: str) -> None:
        """Start a second learner on a copy of the run directory, as on another machine; one of the two has to end.

        It is a race: the one that finds that the other has written `progress` since ends. Then the second learner is
        killed, and the run goes on from its own directory.
        """
        learner, root = (
            self.whole.roles["learner"],
            self.whole.directory / f"second-{len(self.fired)}",
        )
        restarts = learner.restarts
        await asyncio.to_thread(
            copy_run, self.whole.config.run_dir, root / self.whole.config.run.name
        )
        log_file = self.whole.directory / "logs" / "second.log"
        # Not one of the cluster's roles: once it has ended, nothing starts it again.
        second = RoleProcess("second", [*learner.command, f"--run.root={root}"], log_file)
        ended = asyncio.create_task(second.run_once())
        try:
            await self.whole.until(
                "the end of one of two learners",
                lambda: learner.restarts > restarts or ended.done(),
                FENCED_S,
            )
            code = ended.result() if ended.done() else (learner.crashes or [0])[-1]
            if code != UNREACHED_CODE:  # else other events kept the second one from the broker
                self.expect("the first of two learners to end", code, FENCED_CODE)
        finally:
            second.signal(signal.SIGKILL)
            await ended

    async def _repeat(self, stream: Stream, choice: float) -> None:
        """Publish a stored message again under a new id, so that the server does not recognise the repeat."""
        message: Message | None = None
        # The learner may purge the log between the look and the read.
        while message is None:
            extent = await self.whole.transport.extent(stream)
            place = int(choice * (extent.last_sequence + 1 - extent.first_sequence))
            message = await self._read(stream, extent.first_sequence + place)
        await self.whole.transport.publish(
            message.subject, message.data, message_id=f"repeat-{time.time_ns()}"
        )

    async def _read(self, stream: Stream, sequence: int) -> Message | None:
        """Return the message at a sequence, or the next one; None if it has just been purged."""
        reader = await self.whole.transport.reader(stream, sequence - 1)
        try:
            messages = await reader.fetch(1, FETCH_S)
        except LogGap:
            return None
        finally:
            await reader.close()
        return messages[0] if messages else None

    def _broker(self, **changes: Any) -> BrokerSection:
        return self.whole.config.broker.model_copy(
            update={"url": self.whole.servers.direct_url, **changes}
        )

    def expect(self, who: str, code: int, *codes: int) -> None:
        if code not in codes:
            self.findings.append(
                f"{who} ended with code {code}, not {' or '.join(map(str, codes))}"
            )

    def _note(self, event: Event, victim: str) -> None:
        self.fired.append(event)
        at_s = round(time.monotonic() - self._started, 2)
        step = self.whole.last_step
        line = {
            "at_s": at_s,
            "fault": event.fault.value,
            "victim": victim,
            "length_s": round(event.length_s, 2),
        }
        with (self.whole.directory / "events.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line | {"step": step}) + "\n")
        self._say(
            f"{len(self.fired):4d}  {at_s:7.1f} s  step {step:5d}  {event.fault.value} {victim}"
        )


FIRE: dict[Fault, Callable[[Storm, Event, str], Awaitable[None]]] = {
    Fault.KILL: Storm._kill,
    Fault.TERMINATE: Storm._terminate,
    Fault.STOP: Storm._stop,
    Fault.DELAY: Storm._delay,
    Fault.BREAK: Storm._break,
    Fault.REPEAT_GROUP: Storm._repeat_group,
    Fault.REPEAT_TICKET: Storm._repeat_ticket,
    Fault.FULL_LOG: Storm._fill_log,
    Fault.FULL_DISK: Storm._fill_disk,
    Fault.ISOLATE: Storm._isolate,
    Fault.FENCE: Storm._fence,
    Fault.TWO_LEARNERS: Storm._two_learners,
    Fault.STORE_BACK: damage.store_back,
    Fault.RUN_BACK: damage.run_back,
    Fault.CHECKPOINT_BIT: damage.checkpoint_bit,
    Fault.EMPTY_WEIGHTS: damage.empty_weights,
    Fault.FOREIGN_FILES: damage.foreign_files,
    Fault.ZOMBIE_CONTROLLER: damage.zombie_controller,
    Fault.DAMAGE_REPLICA: damage.damage_replica,
}


@contextlib.asynccontextmanager
async def _within(limit_s: float, what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        raise RunFailed(f"{what} did not come within {limit_s:g} s") from None


def copy_run(run_dir: Path, copy: Path) -> None:
    """Copy the journal and the newest checkpoint, which is what a learner on another machine would start from."""
    copy.mkdir(parents=True)
    for path in run_dir.glob("*.jsonl"):
        shutil.copy(path, copy)
    newest = CheckpointStore(run_dir / "checkpoints", keep=1).newest()
    if newest is not None:
        shutil.copytree(newest.path, copy / "checkpoints" / newest.path.name)
