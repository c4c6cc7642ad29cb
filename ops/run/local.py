"""`horizonrl train`: broker, controller, learner and actors on this machine, watched over from one console.

Every part is a process of its own with a log file, and may be killed: the console starts it again. The console itself
may be killed: the parts end with it (`bound`), and the same command resumes the run.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop

from horizonrl.actors.engines import registry as engines
from horizonrl.broker.api import Key, Transport
from horizonrl.broker.nats.access import Role
from horizonrl.broker.nats.connect import connect, connected
from horizonrl.broker.nats.folder import Keys
from horizonrl.broker.nats.server import EmbeddedServer
from horizonrl.broker.state import StateStore
from horizonrl.common.children import bound
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import BrokerUnreachable, CheckpointError, ConfigError, HorizonError, RunFailed
from horizonrl.common.logs import configure_logs, get_logger
from horizonrl.common.run_dir import ADDRESS, BEST, REPORT
from horizonrl.common.service import until_stopped
from horizonrl.common.state import Progress
from horizonrl.envs import registry
from horizonrl.learner.controller.curriculum import eval_tasks
from horizonrl.learner.controller.main import sources_of
from horizonrl.learner.records.best import Best
from horizonrl.learner.records.checkpoint import CheckpointStore
from horizonrl.ops.observe.broker_status import Observer
from horizonrl.ops.observe.console import Console
from horizonrl.ops.observe.trackers import require
from horizonrl.ops.observe.troubles import STARTED
from horizonrl.ops.report.page import save_page
from horizonrl.ops.run.directory import only_train, read_address, read_config, write_config
from horizonrl.ops.run.logfiles import keep_short
from horizonrl.ops.run.models import resolve_model
from horizonrl.ops.run.roles import stop_within_s

log = get_logger()

MAX_RESTARTS = 5
"""Restarts of one part without progress of the run in between, after which the run has failed."""
LONGEST_WAIT_S = 30.0
"""The longest pause before a start."""
ANSWER_S = 10.0
"""How long the broker may take to say whether a run is over: a part that ended too early is started again soon."""
LOOK_S = 2.0
"""How often a console on a terminal looks at the broker."""
PLAIN_LOOK_S = 15.0
"""And one that only explains long waits."""
KILL_S = 5.0
"""A part that has not ended by itself this long after its own deadline is killed."""


@dataclass
class Course:
    """How far a run has come, by its broker's account."""

    transport: Transport
    total_steps: int
    step: int = 0
    settled: int = 0
    """The most that was ever seen: what a learner repeats after its death is no progress."""

    async def is_over(self) -> bool:
        """Ask whether the learner has said that the run is finished; no answer in time is none."""
        with contextlib.suppress(BrokerUnreachable, TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                progress = await StateStore(self.transport).get(Key.PROGRESS)
            if isinstance(progress, Progress):
                self.note(progress)
                return progress.finished and progress.step >= self.total_steps
        return False

    def note(self, progress: Progress) -> None:
        self.step = max(self.step, progress.step)
        self.settled = max(self.settled, sum(ends.settled for ends in progress.outcomes.values()))


@dataclass
class Restarts:
    """How often something had to be started again since the run last came further."""

    name: str
    log_file: Path
    count: int = 0
    reached: tuple[int, int] | None = None
    """Steps and settled tickets of the run at the last end."""

    async def wait(self, code: int, course: Course) -> None:
        """Count an end and wait longer each time before the next start. Raises RunFailed after MAX_RESTARTS."""
        before, self.reached = self.reached, (course.step, course.settled)
        self.count = self.count + 1 if self.reached == before else 1
        log.warning("part_ended", part=self.name, code=code, restarts=self.count)
        if self.count > MAX_RESTARTS:
            raise RunFailed(
                f"the {self.name} ended {self.count} times with code {code}; the end of {self.log_file}:\n"
                + last_lines(self.log_file)
            )
        await asyncio.sleep(min(2.0 ** (self.count - 1), LONGEST_WAIT_S))


@dataclass
class SupervisedProcess:
    """One supervised process."""

    role: str
    name: str
    recipe: Path
    log_file: Path
    environment: dict[str, str]
    stop_within_s: float
    process: asyncio.subprocess.Process | None = None
    started_at: float = 0.0
    """When the process was last started, in seconds since the epoch."""

    def __post_init__(self) -> None:
        self.restarts = Restarts(self.name, self.log_file)

    async def start(self) -> None:
        self.started_at = time.time()
        with self.log_file.open("ab") as sink:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "horizonrl.ops.cli.main", self.role, str(self.recipe)),
                stdout=sink,
                stderr=sink,
                stdin=asyncio.subprocess.DEVNULL,
                env=os.environ | self.environment,
                start_new_session=True,  # Ctrl-C reaches the console alone, which ends the parts
                preexec_fn=bound(),
            )

    async def watch(self, course: Course) -> None:
        """Return when the process has ended and the run is over; until then start it again whenever it ends.

        Its exit code does not say: whoever sends SIGTERM to a part gets 0. Raises RunFailed when it would end so again,
        and after MAX_RESTARTS ends without progress of the run.
        """
        while True:
            assert self.process is not None
            code = await self.process.wait()
            if code == ConfigError.exit_code:
                raise RunFailed(f"the {self.name} cannot go on, {last_error(self.log_file)}")
            if await course.is_over():
                return
            await self.restarts.wait(code, course)
            await self.start()

    async def stop(self) -> None:
        """End the process: SIGTERM, and SIGKILL by pid once its time is over."""
        if self.process is None or self.process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.process.wait(), self.stop_within_s + KILL_S)
        except TimeoutError:
            log.warning("part_killed", part=self.name, after_s=self.stop_within_s + KILL_S)
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()


def train(config: RunConfig, resume_command: str) -> int:
    """Run everything here until the last step; return 0 when the run is finished, 130 when it was interrupted."""
    _try_environments(config)
    require(config.tracker.kind)
    with only_train(config.run_dir):
        return _train_and_export(config, resume_command)


def _train_and_export(config: RunConfig, resume_command: str) -> int:
    (config.run_dir / "logs").mkdir(parents=True, exist_ok=True)
    with (config.run_dir / "logs" / "console.log").open("a") as sink:
        configure_logs(run=config.run.name, role="console", stream=sink)
        console = Console(config)
        log.info(STARTED)
        with console.waiting("preparing the model") as tell:
            model_dir = resolve_model(config.model.name, tell=tell)
        config = config.model_copy(update={"model": config.model.model_copy(update={"name": str(model_dir)})})
        finished = uvloop.run(_train(config, console))
    if not finished:
        console.say(f"stopped. Resume with:  {resume_command}")
        return 130
    out = config.run_dir / "model"
    with console.waiting("exporting the model"):
        beside = config.run_dir / ".model"
        shutil.rmtree(beside, ignore_errors=True)
        export_run(config.run_dir, beside)
        shutil.rmtree(out, ignore_errors=True)  # of the same run, when it was shorter
        beside.rename(out)
    report = config.run_dir / REPORT
    with console.waiting("writing the report"):
        save_page(config.run_dir, config, report)
    console.summary(out, report, resume_command)
    return 0


def _try_environments(config: RunConfig) -> None:
    """Raise ConfigError or MissingDependency for what a part would die of, half a minute later."""
    engines.factory(config.actor.engine)
    sources_of(config.envs, demonstrations=config.demos_due(1) > 0)
    eval_tasks(config)
    for env in config.envs:
        asyncio.run(registry.versioned_id(env.id, env.options))


async def _train(config: RunConfig, console: Console) -> bool:
    """Return whether the run was finished, rather than interrupted."""
    interrupted = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, interrupted.set)
    if config.broker.url is not None:
        return await _supervise(config, console, interrupted)
    port = earlier_port(config.run_dir)
    async with EmbeddedServer(config.run_dir / "nats", config.broker.durability, port=port) as server:
        broker = config.broker.model_copy(update={"url": server.url, "shared_files": True})
        (config.run_dir / ADDRESS).write_text(server.url)
        return await _supervise(config.model_copy(update={"broker": broker}), console, interrupted, server)


def earlier_port(run_dir: Path) -> int | None:
    """Return the port of the run's last broker if it is free: an actor that was started by hand finds its run again."""
    port = urlsplit(read_address(run_dir) or "").port
    if port is None:
        return None
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            log.warning("broker_moved", taken=port)
            return None
    return port


async def _keep_up(server: EmbeddedServer, restarts: Restarts, course: Course) -> None:
    """Start the broker again, on its files and its port, whenever it has ended; the parts wait for it meanwhile."""
    while True:
        await restarts.wait(await server.wait(), course)
        await server.start()


async def _cure(server: EmbeddedServer) -> None:
    """End a broker that a new start would mend; `_keep_up` starts it."""
    while True:
        await server.curable()
        await server.kill()


async def _supervise(
    config: RunConfig, console: Console, interrupted: asyncio.Event, server: EmbeddedServer | None = None
) -> bool:
    """Start the parts, watch them until the learner has finished or someone interrupts, and end them."""
    parts = _parts(config, write_config(config))
    broker = Restarts("broker", config.run_dir / "nats" / "nats-server.log")
    async with connected(config.run.name, config.broker) as transport:
        course = Course(transport, config.total_steps)
        try:
            for part in parts:
                await part.start()
            async with asyncio.TaskGroup() as group:
                watches = {part.name: group.create_task(part.watch(course)) for part in parts}
                others = [
                    group.create_task(console.follow(lambda: {part.name: part.started_at for part in parts})),
                    group.create_task(_listen(transport, course, console)),
                    group.create_task(keep_short(config.run_dir / "logs")),
                ]
                if server is not None:
                    others.append(group.create_task(_keep_up(server, broker, course)))
                    others.append(group.create_task(_cure(server)))
                stop = group.create_task(interrupted.wait())
                await asyncio.wait({watches["learner"], stop}, return_when=asyncio.FIRST_COMPLETED)
                for task in (*watches.values(), *others, stop):
                    task.cancel()
        except* HorizonError as failures:
            raise failures.exceptions[0] from None
        finally:
            with console.waiting("ending the actors, the controller and the learner"):
                async with asyncio.TaskGroup() as ending:  # actors give their leases back: the broker still listens
                    for part in parts:
                        ending.create_task(part.stop())
    return not interrupted.is_set()


async def _listen(transport: Transport, course: Course, console: Console) -> None:
    """Keep up to date what is known of the run by the broker's account; a broker that is away is waited for."""
    observer = Observer(transport)
    while True:
        with contextlib.suppress(BrokerUnreachable):
            console.standing = await observer.look()
            if console.standing.progress is not None:
                course.note(console.standing.progress)
        await asyncio.sleep(LOOK_S if console.is_terminal else PLAIN_LOOK_S)


def _parts(config: RunConfig, recipe: Path) -> list[SupervisedProcess]:
    names = [("learner", "learner"), ("controller", "controller")]
    names += [("actor", f"actor-{number}") for number in range(config.actor.count)]
    secret = config.broker.password
    environment: dict[str, str] = {}
    port = config.metrics.port
    if secret is not None:  # not as an argument: every user of the machine can read those
        environment["HORIZONRL_BROKER__PASSWORD"] = secret.get_secret_value()
    parts = []
    for place, (role, name) in enumerate(names):
        own = {"HORIZONRL_METRICS__PORT": str(port + place)} if port else {}
        log_file = config.run_dir / "logs" / f"{name}.log"
        parts.append(SupervisedProcess(role, name, recipe, log_file, environment | own, stop_within_s(role, config)))
    return parts


def last_error(path: Path) -> str:
    """Return what a role told when it ended, from `error:` on."""
    return "error: " + f"\n{path.read_text(errors='replace')}".rpartition("\nerror: ")[2].strip()


def last_lines(path: Path, count: int = 15) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-count:])


def export_run(run_dir: Path, out: Path, *, best: bool = False) -> int:
    """Write a run's newest checkpoint, or its best version, as a Hugging Face directory; return its step."""
    from horizonrl.learner.engine.weights_file import export
    from horizonrl.ops.publish.card import model_card
    from horizonrl.ops.report.facts import Files

    config = read_config(run_dir)
    weights, facts = _best_of(run_dir) if best else _newest_of(run_dir, config.learner.keep_checkpoints)
    facts |= {"run": config.run.name, "environments": [env.id for env in config.envs]}
    model_dir, files = resolve_model(config.model.name), Files.read(run_dir)
    export(model_dir, weights, out, facts, lambda written: model_card(config, files, model_dir, written))
    return int(facts["step"])


def _newest_of(run_dir: Path, keep: int) -> tuple[Path, dict[str, Any]]:
    checkpoint = CheckpointStore(run_dir / "checkpoints", keep=keep).newest()
    if checkpoint is None:
        raise CheckpointError(f"{run_dir} holds no checkpoint yet: let the run reach its first one")
    return checkpoint.path / "weights.safetensors", {key: checkpoint.state[key] for key in ("step", "lineage")}


def _best_of(run_dir: Path) -> tuple[Path, dict[str, Any]]:
    best = Best(run_dir / BEST)
    result = best.read()
    if result is None:
        raise CheckpointError(f"{run_dir} holds no evaluated version: set eval.every, or export without --best")
    return best.weights(result), {key: result[key] for key in ("step", "lineage", "success_rate", "low", "high")}


async def serve_broker(config: RunConfig) -> None:
    """Run a nats-server with the run's streams until SIGTERM; `broker.url` says where, 127.0.0.1:4222 by default.

    SIGHUP has it read the keys again.
    """
    address = urlsplit(config.broker.url or "nats://127.0.0.1:4222")
    keys = Keys(config.broker.keys) if config.broker.keys else None
    if keys and config.run.name not in keys.runs():
        raise ConfigError(
            f"broker.keys is {keys.folder}, which holds no keys of run {config.run.name}: make them with "
            f"`horizonrl broker keys --out {keys.folder} --run {config.run.name} --host NAME`"
        )
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    async with EmbeddedServer(
        config.run_dir / "nats",
        config.broker.durability,
        host=address.hostname or "127.0.0.1",
        port=address.port or 4222,
        extra=keys.included(config.run_dir / "nats") if keys else "",
    ) as server:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, server.reload)
        own = {"nkey_seed": keys.seed(config.run.name, Role.CONTROLLER), "ca_file": keys.authority} if keys else {}
        transport = await connect(config.run.name, config.broker.model_copy(update={"url": server.url, **own}))
        await transport.close()
        log.info("broker_started", url=server.url)
        scheme = "tls" if keys else "nats"
        print(f"broker of run {config.run.name} listens at {scheme}://{server.host}:{server.port}", flush=True)
        await until_stopped(_alive(server), stopping)


async def _alive(server: EmbeddedServer) -> None:
    """Raise RunFailed when the server ends: whoever watches this process starts both again, on the same files."""
    async with asyncio.TaskGroup() as group:
        curing = group.create_task(_cure(server))
        code = await server.wait()
        curing.cancel()
    raise RunFailed(f"the nats-server of {server.directory} ended with code {code}; start the same command again")
