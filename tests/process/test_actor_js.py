"""The actor in JavaScript, written from PROTOCOL.md, on real brokers: what the page says is what an actor needs."""

import asyncio
import contextlib
import hashlib
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from horizonrl.broker.api import Message, Role, Stream, Transport
from horizonrl.broker.connect import connected
from horizonrl.broker.groups import PART, DeadLetter, GroupLog
from horizonrl.broker.leases import Lease
from horizonrl.broker.nats.server import EmbeddedServer
from horizonrl.broker.scan import scan
from horizonrl.broker.signing import TicketSigner
from horizonrl.broker.tickets import TicketQueue
from horizonrl.broker.weights.frames import digest_file
from horizonrl.common.config.schema import BrokerSection, RunConfig
from horizonrl.common.metrics import Metrics
from horizonrl.common.types import Group, Kind, Void
from horizonrl.learner.controller.curriculum import TaskSource, eval_tasks
from horizonrl.learner.controller.main import build_controller
from horizonrl.learner.engine.thread import EngineThread
from horizonrl.learner.intake.collector import Rules
from horizonrl.learner.main import build_loop, open_ports
from horizonrl.ops.models.models import model_identity
from horizonrl.ops.rundir.lines import read_lines
from tests.broker.secured import RUN, secured
from tests.learner.world import HashEngine, InlineExecutor

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "examples" / "actor-js"
INSTALL = (
    "npm",
    "install",
    "--no-audit",
    "--no-fund",
    "--no-package-lock",
    "--ignore-scripts",
    "--fetch-retries=0",
)
SMALL_PAYLOAD = 16_384
"""So small that groups travel in parts and weights in chunks."""


@pytest.fixture(scope="session")
def program(request: pytest.FixtureRequest) -> Path:
    """Return the actor's main file, with its packages; they are fetched once and kept in pytest's cache."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    if (SOURCE / "node_modules").is_dir():
        return SOURCE / "main.js"
    wanted = hashlib.sha256((SOURCE / "package.json").read_bytes()).hexdigest()[:12]
    place = Path(request.config.cache.mkdir(f"actor-js-{wanted}"))
    for file in [*SOURCE.glob("*.js"), SOURCE / "package.json"]:
        shutil.copy(file, place)
    if not (place / "node_modules" / ".package-lock.json").is_file():
        try:
            subprocess.run(
                INSTALL, cwd=place, check=True, capture_output=True, text=True, timeout=120
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            pytest.skip(
                f"npm cannot fetch the actor's packages: {str(error.stderr or error).strip()[-300:]}"
            )
    return place / "main.js"


class HeavyEngine(HashEngine):
    """Its weights are several chunks."""

    def write_weights(self, path: Path) -> str:
        super().write_weights(path)
        path.write_text(path.read_text() * 1_000)
        return digest_file(path)


@dataclass
class Run:
    """A run whose controller and learner are tasks of this process; its actors are programs in JavaScript."""

    config: RunConfig
    brokers: dict[Role, BrokerSection]
    program: Path
    log: Path

    @asynccontextmanager
    async def open(self) -> AsyncIterator[asyncio.Task[None]]:
        """Hold controller and learner open; yield the learner, which ends with the run."""
        name, config = self.config.run.name, self.config
        rules = Rules(
            config.rl.max_staleness,
            vocabulary=256,
            max_context_tokens=config.model.max_context_tokens,
        )
        async with (
            connected(name, self.brokers[Role.CONTROLLER], Role.CONTROLLER) as controlling,
            connected(name, self.brokers[Role.LEARNER], Role.LEARNER) as learning,
            asyncio.TaskGroup() as group,
        ):
            source = TaskSource("parity", tuple(f"round-{number:02d}" for number in range(8)), 1.0)
            controller = build_controller(config, controlling, [source], planned=eval_tasks(config))
            engine = EngineThread(HeavyEngine(), InlineExecutor())
            ports = open_ports(config, learning, engine, asyncio.Event(), Metrics())
            learner = build_loop(config, ports, rules, {}, eval_tasks(config))
            tasks = [group.create_task(controller.run()), group.create_task(learner.run())]
            yield tasks[1]
            for task in tasks:
                task.cancel()

    @asynccontextmanager
    async def actor(self, *options: str) -> AsyncIterator[asyncio.subprocess.Process]:
        broker = self.brokers[Role.ACTOR]
        with self.log.open("ab") as sink:
            process = await asyncio.create_subprocess_exec(
                *(
                    "node",
                    str(self.program),
                    "--url",
                    str(broker.url),
                    "--run",
                    self.config.run.name,
                    *options,
                ),
                stdout=sink,
                stderr=sink,
            )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def make_config(root: Path, run: str, *overrides: str) -> RunConfig:
    return RunConfig.load(
        (),
        [
            *(
                f"--run.name={run}",
                f"--run.root={root}",
                '--envs=[{"id": "parity"}]',
                "--horizon.announce=true",
            ),
            *(
                "--rollout.group_size=4",
                "--rollout.system_prompt=Count your letters.",
                "--rollout.max_turn_tokens=12",
            ),
            *(
                "--imitation.steps=1",
                "--imitation.groups_per_step=2",
                "--rl.groups_per_step=2",
                *overrides,
            ),
        ],
    )


async def lease(queue: TicketQueue) -> Lease:
    leased = await queue.lease(10)
    assert leased is not None
    return leased


async def stored(
    transport: Transport, key: Path
) -> tuple[list[Group | Void | DeadLetter], int, list[Message]]:
    """Return what a run left on its broker: the entries of the log, the number of parts, the dead letters."""
    log = GroupLog(transport, TicketSigner.load(transport.run, key))
    end, reader, entries = await log.end(), await log.read(after=0), []
    while (entry := await reader.next(10)) is not None:
        entries.append(entry.record)
        if entry.sequence == end:
            break
    parts = [message async for message in scan(transport, Stream.GROUPS, 0, PART)]
    dead = [message async for message in scan(transport, Stream.DEAD, 0, "dead.>")]
    return entries, len(parts), dead


def test_an_actor_in_javascript_plays_a_run_to_its_end_and_loses_nothing(
    program: Path, tmp_path: Path
) -> None:
    key = tmp_path / "ticket.key"
    key.write_text("k" * 32)
    model, run_log = tmp_path / "model", tmp_path / "actor.log"
    model.mkdir()
    # Without a chat_template.jinja.
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (model / name).write_text(f'{{"name": "{name}"}}')

    async def scenario() -> tuple[list[Group | Void | DeadLetter], int, list[Message]]:
        async with EmbeddedServer(
            tmp_path / "nats", extra=f"max_payload: {SMALL_PAYLOAD}"
        ) as server:
            config = make_config(
                *(
                    tmp_path,
                    "js",
                    "--rl.steps=4",
                    "--learner.keep_log=true",
                    "--rollout.group_size=48",
                    "--actor.slots=48",
                    f"--broker.ticket_key={key}",
                ),
                *(
                    "--eval.every=2",
                    "--eval.tasks=2",
                    "--broker.max_deliver=3",
                    "--broker.ack_wait_s=5",
                ),
            )
            broker = config.broker.model_copy(update={"url": server.url})
            run = Run(config, dict.fromkeys(Role, broker), program, run_log)
            async with (
                asyncio.timeout(60),
                run.open() as learner,
                connected("js", broker, Role.ACTOR) as transport,
            ):
                queue = TicketQueue(transport)
                unlucky, *others = [await lease(queue) for _ in range(4)]
                while unlucky.deliveries < config.broker.max_deliver:
                    await unlucky.give_back()
                    unlucky = await lease(queue)
                for held in (unlucky, *others):
                    await held.give_back()
                async with run.actor("--turn-ms=60000", "--drain-s=0") as slow:
                    while "is leased, delivery 2" not in run.log.read_text():
                        await asyncio.sleep(0.05)
                    slow.send_signal(signal.SIGTERM)
                    assert await slow.wait() == 0
                await transport.publish("tickets.train", b"no ticket", message_id="junk")
                async with run.actor("--model", str(model)) as actor:
                    await learner
                    assert await actor.wait() == 0
                return await stored(transport, key)

    try:
        entries, parts, dead = asyncio.run(scenario())
    finally:
        print(run_log.read_text() if run_log.is_file() else "no actor was started")
    groups = {record.ticket.ticket_id: record for record in entries if isinstance(record, Group)}
    voids = [record.ticket.ticket_id for record in entries if isinstance(record, Void)]
    assert len(groups) + len(voids) == len(entries), "an end that is no record"
    assert (voids, groups["eval-00000001"].deliveries) == (["eval-00000000"], 3)
    assert {kind: sum(group.ticket.kind is kind for group in groups.values()) for kind in Kind} == {
        Kind.DEMO: 2,
        Kind.TRAIN: 8,
        Kind.EVAL: 7,
    }
    assert parts > 8 * 2
    assert [message.data for message in dead] == [b"no ticket"]
    assert groups["eval-00000007"].newest_version == 5
    assert not any(episode.stop.broken for group in groups.values() for episode in group.episodes)
    made = groups["train-00000000"]
    assert made.episodes[0].prompt.endswith(
        "Reply with an even number of characters.\n[10 turns left]"
    )
    assert bytes(made.episodes[0].prompt_ids).startswith(b"Count your letters.\nThis is round-")
    identity = model_identity(model)
    assert (made.provenance.model_digest, made.provenance.template_digest) == (
        identity["model"],
        identity["template"],
    )
    ledger = read_lines(tmp_path / "js" / "ledger.jsonl")
    assert [line["step"] for line in ledger] == [1, 2, 3, 4, 5]
    assert [reason for line in ledger for _, _, reason in line["dropped"]] == []
    assert sorted(ticket for line in ledger for _, ticket in line["trained"]) == sorted(
        ticket for ticket in groups if not ticket.startswith("eval")
    )


def test_an_actor_in_javascript_needs_no_more_than_an_actor_may(
    program: Path, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with secured(tmp_path) as broker:
            config = make_config(
                tmp_path, RUN, "--rl.steps=1", f"--broker.ticket_key={broker.keys.ticket_key(RUN)}"
            )
            run = Run(config, {role: broker.settings(role) for role in Role}, program, run_log)
            own = (
                "--nkey",
                str(broker.keys.seed(RUN, Role.ACTOR)),
                "--ca",
                str(broker.keys.authority),
            )
            async with asyncio.timeout(60), run.open() as learner, run.actor(*own) as actor:
                await learner
                assert await actor.wait() == 0

    run_log = tmp_path / "actor.log"
    try:
        asyncio.run(scenario())
    finally:
        print(run_log.read_text() if run_log.is_file() else "no actor was started")
    dropped = [
        reason
        for line in read_lines(tmp_path / RUN / "ledger.jsonl")
        for *_, reason in line["dropped"]
    ]
    # The actor plays at random, so a group may earn the same throughout.
    assert set(dropped) <= {"zero_variance"}
    assert "Permissions Violation" not in run_log.read_text()
