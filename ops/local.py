"""`horizonrl train`: broker, controller, learner and actors on this machine, watched over from one console.

Every part is a process of its own with a log file, and may be killed: the console starts it again. The console itself
may be killed: the parts end with it (`die_with_parent`), and the same command resumes the run.
"""

import asyncio
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import uvloop

from horizonrl.broker.api import Key
from horizonrl.broker.connect import connect
from horizonrl.broker.server import EmbeddedServer
from horizonrl.broker.state import StateStore
from horizonrl.common.config import RunConfig
from horizonrl.common.errors import CheckpointError, HorizonError, RunFailed
from horizonrl.common.logs import configure_logs, get_logger
from horizonrl.common.types import Progress
from horizonrl.learner.checkpoint import CheckpointStore
from horizonrl.ops.console import Console
from horizonrl.ops.models import resolve_model
from horizonrl.ops.roles import SUPERVISED
from horizonrl.ops.rundir import ADDRESS, read_config, write_config

log = get_logger()

MAX_RESTARTS = 5
"""Restarts of one part without progress in between, after which the run has failed."""
STABLE_S = 300.0
"""A part that ran this long has made progress: its restarts count from zero again."""
STOP_S = {"actor": 30.0, "controller": 10.0, "learner": 120.0}
"""How long each part may take to end after SIGTERM: the learner writes a checkpoint."""


@dataclass
class Part:
    """One supervised process."""

    role: str
    name: str
    recipe: Path
    log_file: Path
    environment: dict[str, str]
    restarts: int = 0
    process: asyncio.subprocess.Process | None = None
    started: float = field(default_factory=time.monotonic)

    async def start(self) -> None:
        self.started = time.monotonic()
        with self.log_file.open("ab") as sink:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "horizonrl.ops.cli", self.role, str(self.recipe)),
                stdout=sink,
                stderr=sink,
                stdin=asyncio.subprocess.DEVNULL,
                env=os.environ | self.environment,
                start_new_session=True,  # Ctrl-C reaches the console alone, which ends the parts in order
            )

    async def watch(self) -> None:
        """Return when the process has ended well; start it again when it has not.

        Raises RunFailed after MAX_RESTARTS ends without progress.
        """
        while True:
            assert self.process is not None
            code = await self.process.wait()
            if code == 0:
                return
            self.restarts = 1 if time.monotonic() - self.started > STABLE_S else self.restarts + 1
            log.warning("part_ended", part=self.name, code=code, restarts=self.restarts)
            if self.restarts > MAX_RESTARTS:
                raise RunFailed(
                    f"the {self.name} ended {self.restarts} times with code {code}; the end of {self.log_file}:\n"
                    + last_lines(self.log_file)
                )
            await asyncio.sleep(min(2.0 ** (self.restarts - 1), 30.0))
            await self.start()

    async def stop(self) -> None:
        """End the process: SIGTERM, and SIGKILL by pid once its time is over."""
        if self.process is None or self.process.returncode is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.process.wait(), STOP_S[self.role])
        except TimeoutError:
            log.warning("part_killed", part=self.name, after_s=STOP_S[self.role])
            self.process.kill()
            await self.process.wait()


def train(config: RunConfig, resume_command: str) -> int:
    """Run everything here until the last step; return 0 when the run is finished, 130 when it was interrupted."""
    (config.run_dir / "logs").mkdir(parents=True, exist_ok=True)
    with (config.run_dir / "logs" / "console.log").open("a") as sink:
        configure_logs(run=config.run.name, role="console", stream=sink)
        console = Console(config)
        with console.waiting("preparing the model"):
            model_dir = resolve_model(config.model.name)
        config = config.model_copy(update={"model": config.model.model_copy(update={"name": str(model_dir)})})
        finished = uvloop.run(_train(config, console))
    if not finished:
        console.say(f"stopped. Resume with:  {resume_command}")
        return 130
    out = config.run_dir / "model"
    with console.waiting("exporting the model"):
        export_run(config.run_dir, out)
    console.summary(out)
    return 0


async def _train(config: RunConfig, console: Console) -> bool:
    """Return whether the run was finished, rather than interrupted."""
    interrupted = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, interrupted.set)
    if config.broker.url is not None:
        return await _supervise(config, console, interrupted)
    async with EmbeddedServer(config.run_dir / "nats", config.broker.durability) as server:
        broker = config.broker.model_copy(update={"url": server.url, "shared_files": True})
        (config.run_dir / ADDRESS).write_text(server.url)
        return await _supervise(config.model_copy(update={"broker": broker}), console, interrupted)


async def _supervise(config: RunConfig, console: Console, interrupted: asyncio.Event) -> bool:
    """Start the parts, watch them until the learner has finished or someone interrupts, and end them in order."""
    parts = _parts(config, write_config(config))
    for part in parts:
        await part.start()
    try:
        async with asyncio.TaskGroup() as group:
            watches = {part.name: group.create_task(part.watch()) for part in parts}
            drawing = group.create_task(console.follow(lambda: {part.name: part.restarts for part in parts}))
            listening = group.create_task(_listen(config, console))
            stop = group.create_task(interrupted.wait())
            await asyncio.wait({watches["learner"], stop}, return_when=asyncio.FIRST_COMPLETED)
            for task in (*watches.values(), drawing, listening, stop):
                task.cancel()
    except* HorizonError as failures:
        raise failures.exceptions[0] from None
    finally:
        with console.waiting("ending the actors, the controller and the learner"):
            for part in reversed(parts):  # actors give their leases back while the broker still listens
                await part.stop()
    return not interrupted.is_set()


async def _listen(config: RunConfig, console: Console) -> None:
    """Keep the console's view of the learner's progress up to date."""
    transport = await connect(config.run.name, config.broker)
    try:
        async for progress in StateStore(transport).watch(Key.PROGRESS):
            if isinstance(progress, Progress):
                console.progress = progress
    finally:
        await transport.close()


def _parts(config: RunConfig, recipe: Path) -> list[Part]:
    names = [("learner", "learner"), ("controller", "controller")]
    names += [("actor", f"actor-{number}") for number in range(config.actor.count)]
    secret = config.broker.password
    environment = {SUPERVISED: "1"}
    if secret is not None:  # not as an argument: every user of the machine can read those
        environment["HORIZONRL_BROKER__PASSWORD"] = secret.get_secret_value()
    return [Part(role, name, recipe, config.run_dir / "logs" / f"{name}.log", environment) for role, name in names]


def last_lines(path: Path, count: int = 15) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-count:])


def export_run(run_dir: Path, out: Path) -> int:
    """Write a run's newest checkpoint as a Hugging Face directory; return its step."""
    from horizonrl.learner.export import export

    config = read_config(run_dir)
    checkpoint = CheckpointStore(run_dir / "checkpoints", keep=config.learner.keep_checkpoints).newest()
    if checkpoint is None:
        raise CheckpointError(f"{run_dir} holds no checkpoint yet: let the run reach its first one")
    facts = {
        "run": config.run.name,
        "step": checkpoint.state["step"],
        "lineage": checkpoint.state["lineage"],
        "environments": [env.id for env in config.envs],
    }
    export(resolve_model(config.model.name), checkpoint.path / "weights.safetensors", out, facts)
    return int(checkpoint.state["step"])


async def serve_broker(config: RunConfig) -> None:
    """Run a nats-server with the run's streams until SIGTERM; `broker.url` says where, 127.0.0.1:4222 by default."""
    address = urlsplit(config.broker.url or "nats://127.0.0.1:4222")
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    async with EmbeddedServer(
        config.run_dir / "nats",
        config.broker.durability,
        host=address.hostname or "127.0.0.1",
        port=address.port or 4222,
    ) as server:
        transport = await connect(config.run.name, config.broker.model_copy(update={"url": server.url}))
        await transport.close()
        log.info("broker_started", url=server.url)
        print(f"broker of run {config.run.name} listens at {server.url}", flush=True)
        await stopping.wait()
