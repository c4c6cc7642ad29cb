"""`horizonrl train`: broker, controller, learner and actors on this machine, supervised from one console.

Each part is a process of its own with a log file. If one dies, the console restarts it. If the console dies, the parts
end with it (`bound`), and the same command resumes the run.
"""

import asyncio
import contextlib
import json
import shutil
import signal
from pathlib import Path

import uvloop

from horizonrl.broker.api import Role, Transport
from horizonrl.broker.connect import connected
from horizonrl.broker.nats.server import EmbeddedServer
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import BrokerUnreachable, ConfigError, HorizonError, raise_first
from horizonrl.common.files import atomic_write
from horizonrl.common.gpus import visible_gpus
from horizonrl.common.logs import configure_logs, get_logger
from horizonrl.common.processes import Child, horizonrl_command
from horizonrl.common.run_dir import ADDRESS, REPORT
from horizonrl.envs import registry
from horizonrl.learner.controller.curriculum import eval_tasks, sources_of
from horizonrl.learner.controller.yields import followed_categories
from horizonrl.ops.launch.broker import earlier_port, restart_broker
from horizonrl.ops.launch.gpus import Division, divide
from horizonrl.ops.launch.names import require_names
from horizonrl.ops.launch.roles import KILL_S, stop_within_s
from horizonrl.ops.launch.supervision import RunProgress, keep_running
from horizonrl.ops.models.models import trainable_model
from horizonrl.ops.observe.console import Console
from horizonrl.ops.observe.trackers import require
from horizonrl.ops.publish.export import export_run
from horizonrl.ops.report.page import save_page
from horizonrl.ops.rundir.broker_status import Observer
from horizonrl.ops.rundir.directory import only_train, write_config
from horizonrl.ops.rundir.finished import ended_at, how_to_go_on, newest_checkpoint
from horizonrl.ops.rundir.logfiles import keep_short
from horizonrl.ops.rundir.troubles import STARTED
from horizonrl.ops.rundir.variables import recipe_environment

log = get_logger()

LOOK_S = 2.0
"""Time between two looks at the broker while the console is a terminal."""
PLAIN_LOOK_S = 15.0
"""The same elsewhere, where the answer only explains long waits."""


def train(config: RunConfig, resume_command: str) -> int:
    """Run every process here until the last step; return 0 when the run is finished, 130 when it was interrupted."""
    if (step := _left_as_finished(config)) is not None:
        print(how_to_go_on(config, step))
        return 0
    _try_environments(config)
    require(config.tracker.kind)
    with only_train(config.run_dir):
        return _train_and_export(config, resume_command)


def _left_as_finished(config: RunConfig) -> int | None:
    """Return the step at which an earlier `train` ended the run and exported it; None if there is something to do."""
    newest = newest_checkpoint(config.run_dir)
    if (
        newest is None
        or newest.step < config.total_steps
        or not (config.run_dir / REPORT).is_file()
    ):
        return None
    facts = config.run_dir / "model" / "version.json"
    if not facts.is_file() or json.loads(facts.read_text(encoding="utf-8"))["step"] != newest.step:
        return None
    with only_train(config.run_dir):
        return asyncio.run(_ended_at(config))


async def _ended_at(config: RunConfig) -> int | None:
    if config.broker.url is not None:
        return await ended_at(config, Role.CONTROLLER)
    async with EmbeddedServer(config.run_dir / "nats", config.broker.nats.durability) as server:
        broker = config.broker.model_copy(update={"url": server.url})
        return await ended_at(config.model_copy(update={"broker": broker}), Role.CONTROLLER)


def _try_environments(config: RunConfig) -> None:
    """Raise ConfigError or MissingDependency now for what would otherwise end a process half a minute later."""
    require_names(config)
    if config.actor.engine == "endpoint":
        raise ConfigError(
            "actor.engine is endpoint, whose weights never change: it can evaluate (`horizonrl eval`), not train. Set "
            "actor.engine to vllm"
        )
    sources = sources_of(
        config.envs, demonstrations=config.demos_due(1) > 0, states=config.advantage.compares_states
    )
    if config.curriculum.kind == "adaptive":
        followed_categories(sources)
    eval_tasks(config)
    for env in config.envs:
        asyncio.run(registry.versioned_id(env.id, env.options))


def _train_and_export(config: RunConfig, resume_command: str) -> int:
    (config.run_dir / "logs").mkdir(parents=True, exist_ok=True)
    with (config.run_dir / "logs" / "console.log").open("a", encoding="utf-8") as sink:
        configure_logs(run=config.run.name, role="console", stream=sink)
        console = Console(config)
        log.info(STARTED)
        with console.waiting("preparing the model") as tell:
            # Once, before any part starts: otherwise learner and actors would each wait for the same model, out of
            # sight.
            model_dir = trainable_model(config.model, tell=tell)
        # The parts get a directory, so none of them has to look the name up again.
        config = config.model_copy(
            update={"model": config.model.model_copy(update={"name": str(model_dir)})}
        )
        with raise_first(HorizonError):
            finished = uvloop.run(_train(config, console))
    if not finished:
        console.say(f"stopped. Resume with:  {resume_command}")
        return 130
    out = config.run_dir / "model"
    with console.waiting("exporting the model"), atomic_write(out) as incoming:
        export_run(config.run_dir, incoming)
        # An earlier export of the same run, when it had fewer steps.
        shutil.rmtree(out, ignore_errors=True)
    report = config.run_dir / REPORT
    with console.waiting("writing the report"):
        save_page(config.run_dir, config, report)
    console.summary(out, report, resume_command)
    return 0


async def _train(config: RunConfig, console: Console) -> bool:
    """Return whether the run was finished, rather than interrupted."""
    interrupted = asyncio.Event()
    # Handlers, not KeyboardInterrupt: the parts have to end first, and the broker only after them.
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, interrupted.set)
    if config.broker.url is not None:
        return await _supervise(config, console, interrupted)
    port = earlier_port(config.run_dir)
    async with EmbeddedServer(
        config.run_dir / "nats", config.broker.nats.durability, port=port
    ) as server:
        # Only here: `train` starts every role on this machine, while a loopback url alone proves nothing.
        broker = config.broker.model_copy(update={"url": server.url, "shared_files": True})
        # `horizonrl status` and the next `train` look here: every start may get another port.
        (config.run_dir / ADDRESS).write_text(server.url, encoding="utf-8")
        return await _supervise(
            config.model_copy(update={"broker": broker}), console, interrupted, server
        )


async def _supervise(
    config: RunConfig,
    console: Console,
    interrupted: asyncio.Event,
    server: EmbeddedServer | None = None,
) -> bool:
    """Start the parts, watch them until the learner has finished or someone interrupts, and end them."""
    division = divide(config, visible_gpus())
    if division.learner:
        console.say(str(division))
    parts = _parts(config, write_config(config), division)
    async with connected(config.run.name, config.broker) as transport:
        run = RunProgress(transport, config.total_steps)
        try:
            for part in parts:
                await part.start()
            async with asyncio.TaskGroup() as group:
                watches = {part.name: group.create_task(keep_running(part, run)) for part in parts}
                others = [
                    group.create_task(
                        console.follow(lambda: {part.name: part.started_at for part in parts})
                    ),
                    group.create_task(_observe(transport, run, console)),
                    group.create_task(keep_short(config.run_dir / "logs")),
                ]
                if server is not None:
                    others.append(group.create_task(restart_broker(server, run)))
                    others.append(group.create_task(server.end_when_curable()))
                stop = group.create_task(interrupted.wait())
                # The learner alone decides that a run is over. An end of any other part is followed by a restart.
                # If a watch raises RunFailed, the group cancels this wait too.
                await asyncio.wait({watches["learner"], stop}, return_when=asyncio.FIRST_COMPLETED)
                # Before the parts are ended below: a watch that still ran would start each of them again.
                for task in (*watches.values(), *others, stop):
                    task.cancel()
        finally:
            with console.waiting("ending the actors, the controller and the learner"):
                # All at once, because one after the other the deadlines of the parts would add up.
                # Actors give their leases back: the broker still listens.
                async with asyncio.TaskGroup() as ending:
                    for part in parts:
                        ending.create_task(part.stop())
    return not interrupted.is_set()


async def _observe(transport: Transport, run: RunProgress, console: Console) -> None:
    """Keep the broker's account of the run up to date. While the broker is away, keep the last one."""
    observer = Observer(transport)
    while True:
        with contextlib.suppress(BrokerUnreachable):
            console.broker = await observer.look()
            if console.broker.progress is not None:
                # What counts as progress for the restarts, so a part of a run that moves may be restarted for ever.
                run.note(console.broker.progress)
        await asyncio.sleep(LOOK_S if console.is_terminal else PLAIN_LOOK_S)


def _parts(config: RunConfig, recipe: Path, division: Division) -> list[Child]:
    names = [("learner", "learner"), ("controller", "controller")]
    names += [("actor", f"actor-{number}") for number in range(config.actor.count)]
    # The console has resolved variables and command line: a variable that reached a part would win over both.
    environment = recipe_environment(config)
    port = config.metrics.port
    parts = []
    for offset, (role, name) in enumerate(names):
        # 0: each process takes a free port.
        extra = {"HORIZONRL_METRICS__PORT": str(port + offset)} if port else {}
        extra |= division.environment(role, number=max(0, offset - 2))
        log_file = config.run_dir / "logs" / f"{name}.log"
        # Later than the role's own timer, which logs `stop_overdue` and the stack: SIGKILL would hide what hung.
        stop_s = stop_within_s(role, config) + KILL_S
        parts.append(
            Child(horizonrl_command(role, str(recipe)), log_file, stop_s, environment | extra)
        )
    return parts
