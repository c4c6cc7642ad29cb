"""A whole run in one process: controller, actor and learner on the in-memory broker, each of which may die.

The learner's engine is `HashEngine`: a group that is lost, doubled or moved changes the digest of every later version.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from horizonrl.broker.api import Key
from horizonrl.broker.codec import encode
from horizonrl.broker.groups import GroupLog
from horizonrl.broker.leases import Lease
from horizonrl.broker.memory import MemoryServer, MemoryTransport
from horizonrl.broker.state import StateStore
from horizonrl.broker.tickets import TicketQueue
from horizonrl.broker.weights.frames import digest_file
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import LeaseLost
from horizonrl.common.metrics import Metrics
from horizonrl.common.run_dir import METRICS
from horizonrl.common.state import Progress, WeightsManifest
from horizonrl.common.types import (
    Group,
    Kind,
    PolicyVersion,
    Provenance,
    StopReason,
    Task,
    Ticket,
    Void,
)
from horizonrl.learner.controller.curriculum import EvalTask, TaskSource
from horizonrl.learner.controller.main import build_controller
from horizonrl.learner.engine.backends.hash import HashEngine
from horizonrl.learner.engine.thread import EngineThread
from horizonrl.learner.intake.collector import Rules
from horizonrl.learner.loop.loop import LearnerLoop
from horizonrl.learner.main import build_loop, open_ports
from horizonrl.learner.records.best import Best
from horizonrl.learner.records.replay import Replay
from horizonrl.ops.rundir.lines import read_lines
from tests.records import make_episode, make_turn

T = TypeVar("T")
SOURCES = [TaskSource("textcraft", tuple(f"task{n}" for n in range(7)), 1.0)]
EVAL_TASKS = tuple(
    EvalTask(Task(env_id="textcraft", task_id=f"held{n}"), "ab"[n % 2]) for n in range(3)
)
EVALUATING = ("--eval.every=2", "--eval.samples=2")
IDENTITY = {"model": "m"}
RULES = Rules(max_staleness=2, vocabulary=100, max_context_tokens=64)
DEADLINE_S = 60.0


class InlineExecutor(ThreadPoolExecutor):
    """Runs every call at once: a cancelled learner leaves no thread behind that still writes."""

    def submit(self, call: Callable[..., T], /, *arguments: Any, **named: Any) -> Future[T]:  # type: ignore[override]
        future: Future[T] = Future()
        try:
            future.set_result(call(*arguments, **named))
        except Exception as error:  # noqa: BLE001 - the future's owner is told
            future.set_exception(error)
        return future


class MortalTransport(MemoryTransport):
    """A transport whose program is cancelled in its n-th request to the broker, before or after it took effect."""

    def __init__(self, server: MemoryServer, dies_at: int | None = None, run: str = "run") -> None:
        super().__init__(server, run)
        self._dies_at = dies_at
        self.requests = 0
        self.program: asyncio.Task[None] | None = None

    async def _live(self, request: Coroutine[Any, Any, T]) -> T:
        self.requests += 1
        doomed = self._dies_at is not None and self.requests > self._dies_at // 2
        if doomed and self._dies_at is not None and self._dies_at % 2 == 0:
            request.close()
            await self._die()
        result = await request
        if doomed:
            await self._die()
        return result

    async def _die(self) -> None:
        assert self.program is not None
        self.program.cancel()
        await asyncio.Event().wait()

    async def publish(self, *arguments: Any, **named: Any) -> Any:
        return await self._live(super().publish(*arguments, **named))

    async def lease(self, *arguments: Any, **named: Any) -> Any:
        return await self._live(super().lease(*arguments, **named))

    async def last(self, *arguments: Any, **named: Any) -> Any:
        return await self._live(super().last(*arguments, **named))

    async def purge(self, *arguments: Any, **named: Any) -> Any:
        return await self._live(super().purge(*arguments, **named))

    async def put(self, *arguments: Any, **named: Any) -> Any:
        return await self._live(super().put(*arguments, **named))

    async def get(self, *arguments: Any, **named: Any) -> Any:
        return await self._live(super().get(*arguments, **named))

    async def revision(self, *arguments: Any, **named: Any) -> Any:
        return await self._live(super().revision(*arguments, **named))

    async def queue(self) -> Any:
        return await self._live(super().queue())


@dataclass
class World:
    run_root: Path
    deaths: dict[str, list[int]] = field(default_factory=dict)
    """Per role, in which request each of its lives ends; odd: after the request took effect. Then it lives on."""
    seed: int = 0
    faults: float = 0.0
    """Share of the deliveries that end as void, of those that the broker loses after all, and of repeated groups."""

    server: MemoryServer = field(default_factory=lambda: MemoryServer(ack_wait_s=0.05))
    overrides: tuple[str, ...] = ()
    make_engine: Callable[[], HashEngine] = HashEngine
    hand: int = 1
    """Most tickets that the actor holds at once. It ends the newest first, so that groups arrive out of order."""
    patience_s: float = 0.02
    """How long an actor that holds tickets waits for another one before it ends the newest."""
    sources: Sequence[TaskSource] | None = None
    """What the controller draws tasks from; None: SOURCES."""
    idle_from: int | None = None
    """The actor leaves tickets that were issued at this version or a later one."""

    def __post_init__(self) -> None:
        self.config = RunConfig.load(
            [],
            [
                "--run.name=run",
                f"--run.root={self.run_root}",
                "--learner.keep_log=true",
                "--learner.checkpoint_every=2",
                "--learner.keep_checkpoints=2",
                "--imitation.steps=2",
                "--imitation.groups_per_step=2",
                "--rl.steps=5",
                "--rl.groups_per_step=2",
                "--rollout.group_size=2",
                "--horizon.horizons=[4,6]",
                "--horizon.steps_per_stage=2",
                *self.overrides,
            ],
        )
        self.eval_tasks = EVAL_TASKS if self.config.eval.every else ()
        rl = self.config.rl
        self.rules = replace(
            RULES, max_staleness=rl.max_staleness, demos_in_rl=rl.demos_per_step > 0
        )
        self.lives: Counter[str] = Counter()
        self.stopping = asyncio.Event()
        """Stops the learner, as SIGTERM does."""
        self.requests: dict[str, int] = {}
        """Requests that the last life of each role made."""
        self.metrics = Metrics()
        self.dice = random.Random(self.seed)

    async def run(self) -> None:
        """Let the run come to its end, starting again whoever dies."""
        asyncio.get_running_loop().set_default_executor(InlineExecutor())
        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
            actor = group.create_task(self._relive("actor", self._act))
            controller = group.create_task(self._relive("controller", self._control))
            await self._relive("learner", self.learn)
            await controller
            actor.cancel()

    async def _relive(
        self, role: str, program: Callable[[MortalTransport], Coroutine[Any, Any, None]]
    ) -> None:
        while True:
            life, deaths = self.lives[role], self.deaths.get(role, [])
            dies_at = deaths[life] if life < len(deaths) else None
            transport = MortalTransport(self.server, dies_at, self.config.run.name)
            self.lives[role] += 1
            transport.program = task = asyncio.create_task(program(transport))
            try:
                await asyncio.wait([task])
            finally:
                task.cancel()
            self.requests[role] = transport.requests
            if not task.cancelled():
                return task.result()
            assert life < len(deaths), f"the {role} ended without being killed"

    async def _control(self, transport: MortalTransport) -> None:
        await build_controller(
            self.config, transport, self.sources or SOURCES, self.metrics, self.eval_tasks
        ).run()

    async def learn(self, transport: MortalTransport) -> None:
        await self.learner(transport).run()

    def learner(
        self, transport: MortalTransport, identity: Mapping[str, str] = IDENTITY
    ) -> LearnerLoop:
        engine = EngineThread(self.make_engine(), InlineExecutor())
        ports = open_ports(self.config, transport, engine, self.stopping, self.metrics)
        return build_loop(self.config, ports, self.rules, identity, self.eval_tasks)

    async def _act(self, transport: MortalTransport) -> None:
        tickets, log, state = TicketQueue(transport), GroupLog(transport), StateStore(transport)
        held: list[tuple[Lease, PolicyVersion]] = []
        while True:
            taken = (
                await tickets.lease(self.patience_s if held else 0.2)
                if len(held) < self.hand
                else None
            )
            if taken is not None:
                if (
                    self.idle_from is None
                    or taken.ticket.issued_at_version.version < self.idle_from
                ):
                    manifest = await state.get(Key.POLICY)
                    policy = (
                        manifest.policy
                        if isinstance(manifest, WeightsManifest)
                        else PolicyVersion()
                    )
                    held.append((taken, policy))
                if len(held) < self.hand:
                    continue
            if not held:
                continue
            lease, policy = held.pop()
            if self._too_early(lease.ticket, policy):
                with suppress(LeaseLost):  # it lapsed while this actor held others
                    await lease.give_back(delay_s=0.001)
                continue
            dice = self.dice
            group = self.play(lease.ticket, policy)
            if dice.random() < self.faults:
                await log.publish_void(Void(ticket=lease.ticket, reason="broken", actor="test"))
            elif dice.random() >= self.faults:
                await log.publish(group)
            await lease.acknowledge()
            if dice.random() < self.faults:  # long after: the server remembers ids for an hour
                await transport.publish(f"groups.{group.ticket.kind.value}", encode(group))

    def play(self, ticket: Ticket, policy: PolicyVersion) -> Group:
        return played(ticket, policy, self.dice)

    def _too_early(self, ticket: Ticket, policy: PolicyVersion) -> bool:
        """Play a round's tickets two versions apart: it is open at checkpoints, and its own weights are long past.

        Not where groups are lost: those are found once every older ticket is done, and no version would come before.
        """
        wanted = ticket.issued_at_version.version + 2 * (ticket.number % len(EVAL_TASKS))
        return (
            not self.faults
            and ticket.kind is Kind.EVAL
            and policy.version < min(wanted, self.config.total_steps)
        )

    # ---- what must be true afterwards

    def ledger(self) -> list[dict[str, Any]]:
        return read_lines(self.config.run_dir / "ledger.jsonl")

    def evals(self) -> list[dict[str, Any]]:
        return read_lines(self.config.run_dir / "evals.jsonl")

    async def check(self) -> None:
        """Every ticket ended once, and an undisturbed run of the same log has the same weights."""
        lines = self.ledger()
        assert [line["step"] for line in lines] == list(range(1, self.config.total_steps + 1))
        ends: Counter[str] = Counter()
        for line in lines:
            ends.update(ticket for _, ticket in [*line["trained"], *line["voids"]])
            ends.update(ticket for _, ticket, _ in line["dropped"])
        assert not any(ticket.startswith("eval") for ticket in ends)
        ends.update(ticket for line in self.evals() for _, ticket, _ in line["ends"])
        assert set(ends.values()) == {1}
        transport = MemoryTransport(self.server, "run")
        for kind in Kind:
            numbers = sorted(
                int(ticket.partition("-")[2]) for ticket in ends if ticket.startswith(kind.value)
            )
            issued = await TicketQueue(transport).count_issued(kind)
            if kind is Kind.DEMO and self.rules.demos_in_rl:  # the last ones are not waited for
                assert set(numbers) <= set(range(issued))
            else:
                assert numbers == list(range(issued))
        progress = await StateStore(transport).get(Key.PROGRESS)
        assert isinstance(progress, Progress)
        assert progress.finished
        assert sum(outcomes.settled for outcomes in progress.outcomes.values()) == len(ends)
        assert self.metrics.value("conservation_violations") == 0
        await self._check_horizons(transport)
        self._check_journal(lines)
        await self._check_evaluations(transport)
        engine = EngineThread(HashEngine(), InlineExecutor())
        log, frame = GroupLog(transport), self.run_root / "frame"
        replay = Replay(self.config, transport, log, engine, self.rules, frame)
        assert all([done.equal async for done in replay.steps(None, lines)])

    async def _check_evaluations(self, transport: MemoryTransport) -> None:
        """Each round was written once, from the groups that the log holds, and the best weights are those judged."""
        reader = await GroupLog(transport).read(after=0)
        groups: dict[int, Group] = {}
        while (entry := await reader.next(0.0)) is not None:
            if isinstance(entry.record, Group):
                groups[entry.sequence] = entry.record
        rounds = [
            [int(ticket.removeprefix("eval-")) // 3 for _, ticket, _ in line["ends"]]
            for line in self.evals()
        ]
        assert sorted(rounds) == [[number] * 3 for number in range(self.config.eval_rounds)]
        for line in self.evals():
            played = [groups[sequence] for sequence, _, how in line["ends"] if how == "evaluated"]
            assert {group.ticket.task.task_id for group in played} <= {
                planned.task.task_id for planned in EVAL_TASKS
            }
            assert line["successes"] == sum(
                episode.success for group in played for episode in group.episodes
            )
            assert line["episodes"] == sum(len(group.episodes) for group in played)
            assert all(
                line["oldest_version"] <= group.newest_version <= line["newest_version"]
                for group in played
            )
        files = sorted((self.config.run_dir / "episodes").glob("eval-*.jsonl"))
        kept_texts = Counter(line["ticket"] for file in files for line in read_lines(file))
        evaluated = [
            ticket for line in self.evals() for _, ticket, how in line["ends"] if how == "evaluated"
        ]
        assert kept_texts == dict.fromkeys(evaluated, self.config.eval.samples)
        best = Best(self.config.run_dir / "best")
        if (kept := best.read()) is not None and kept["version"]:
            assert (
                digest_file(best.weights(kept))
                == self.ledger()[kept["version"] - 1]["weights_digest"]
            )

    async def _check_horizons(self, transport: MemoryTransport) -> None:
        """No stage skipped or repeated: in the order of their numbers, the tickets' horizons only grow."""
        reader = await GroupLog(transport).read(after=0)
        horizons: dict[int, int] = {}
        while (entry := await reader.next(0.0)) is not None:
            if isinstance(entry.record, Group | Void) and entry.record.ticket.kind is Kind.TRAIN:
                horizons.setdefault(entry.record.ticket.number, entry.record.ticket.horizon_turns)
        in_order = [horizons[number] for number in sorted(horizons)]
        assert in_order == sorted(in_order)
        assert set(in_order) == {4, 6}

    def _check_journal(self, ledger: list[dict[str, Any]]) -> None:
        """Each step has one line: its cost is that of what it consumed, and a horizon grew when it should have."""
        lines = read_lines(self.config.run_dir / METRICS)
        sizes = {"demo": 1, "train": self.config.rollout.group_size}
        assert [line["step"] for line in lines] == [line["step"] for line in ledger]
        assert [line["environment_steps"] for line in lines] == [
            sum(
                sizes[kind]
                for _, ticket, *_ in [*line["trained"], *line["dropped"]]
                if ticket.startswith(kind)
            )
            for line in ledger
            for kind in [self.config.phase(line["step"] - 1)[0].kind.value]
        ]
        grown = [(line["step"], growth["to_turns"]) for line in lines for growth in line["growths"]]
        assert grown == ([(4, 6)] if self.config.horizon.kind == "adaptive" else [])


def played(ticket: Ticket, policy: PolicyVersion, dice: random.Random) -> Group:
    """Return a group for a ticket. A train ticket's episodes earn differently and are cut; version 2 is the best."""
    demo = ticket.kind is Kind.DEMO
    rewards = [1.0] if demo else dice.sample([0.0, -0.25, -0.5, -1.0], ticket.group_size)
    stop = StopReason.TERMINATED if demo else StopReason.HORIZON
    if ticket.kind is Kind.EVAL:
        rewards = (
            [1.0, 1.0] if ticket.issued_at_version.version == 2 else [0.0, dice.choice([0.0, 1.0])]
        )
    return Group(
        ticket=ticket,
        episodes=tuple(
            make_episode(
                index, make_turn((dice.randrange(100), index), policy.version, reward), stop=stop
            )
            for index, reward in enumerate(rewards)
        ),
        provenance=Provenance(actor="test"),
    )
