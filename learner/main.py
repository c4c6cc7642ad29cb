"""The learner's wiring: ranks, engine, broker, loop, and what each of them is told of the config."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from horizonrl.broker.api import Role, Transport
from horizonrl.broker.connect import connected
from horizonrl.broker.groups import GroupLog
from horizonrl.broker.signing import TicketSigner
from horizonrl.broker.tickets import TicketQueue
from horizonrl.broker.weights.changes import warm_up_in_thread
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.metrics import Metrics
from horizonrl.common.run_dir import BEST, CHECKPOINTS, WEIGHTS
from horizonrl.common.service import Service
from horizonrl.learner.controller.curriculum import Curriculum, EvalTask, eval_tasks, sources_of
from horizonrl.learner.engine.thread import EngineThread
from horizonrl.learner.intake.collector import Rules
from horizonrl.learner.loop.announcer import Announcer
from horizonrl.learner.loop.fence import Fence
from horizonrl.learner.loop.log_intake import LogIntake
from horizonrl.learner.loop.log_space import LogSpace
from horizonrl.learner.loop.loop import LearnerLoop
from horizonrl.learner.loop.ports import Ports
from horizonrl.learner.loop.publication import Publication
from horizonrl.learner.loop.recorder import Recorder
from horizonrl.learner.loop.recovery import LORA_RANK, Recovery, RunRecord, machine
from horizonrl.learner.loop.state import LearnerState
from horizonrl.learner.loop.weights_publisher import WeightsPublisher
from horizonrl.learner.ranks.launch import on_ranks
from horizonrl.learner.records.best import Best
from horizonrl.learner.records.checkpoint import CheckpointStore
from horizonrl.learner.records.evaluation import plan_digest
from horizonrl.learner.records.journal import Journal, only_learner
from horizonrl.learner.settings import collecting_rules, engine_settings


async def run_learner(
    config: RunConfig, model_dir: Path, identity: dict[str, str], service: Service
) -> None:
    """Run one rank of the learner until SIGTERM or the last step. Rank 0 leads; the others follow its calls."""

    async def learn(engine: EngineThread, vocabulary: int) -> None:
        # Before the broker is asked: a second learner on this machine ends without having displaced the first one.
        with only_learner(config.run_dir):
            async with (
                connected(config.run.name, config.broker, Role.LEARNER) as transport,
                service.open(config.metrics.host, config.metrics.port, transport),
            ):
                planned = eval_tasks(config)
                ports = open_ports(config, transport, engine, service.stopping, service.metrics)
                rules = collecting_rules(config, vocabulary).of_model(identity)
                loop = build_loop(config, ports, rules, identity, planned)
                service.ready = True
                if not config.broker.shared_files:  # the first groups are being sampled meanwhile
                    warm_up_in_thread()
                await loop.run()
                await service.last_reading()

    await on_ranks(engine_settings(config, model_dir), learn)


def open_ports(
    config: RunConfig,
    transport: Transport,
    engine: EngineThread,
    stopping: asyncio.Event,
    metrics: Metrics,
) -> Ports:
    signer = TicketSigner.load(config.run.name, config.broker.ticket_key)
    return Ports(
        transport=transport,
        log=GroupLog(transport, signer),
        tickets=TicketQueue(transport, signer),
        fence=Fence(transport),
        engine=engine,
        journal=Journal(config.run_dir),
        checkpoints=CheckpointStore(
            config.run_dir / CHECKPOINTS, keep=config.learner.keep_checkpoints
        ),
        metrics=metrics,
        stopping=stopping,
        settings=config.settings.model_copy(update={"ticket_key": signer.fingerprint}),
    )


def learner_state(
    config: RunConfig, rules: Rules, planned: Sequence[EvalTask] = ()
) -> LearnerState:
    """Return the state of a run that has not begun; `planned` are the tasks of every evaluation round, in order."""
    # The learner draws no tasks: it tells how the curriculum draws, from what it has consumed.
    adaptive = config.curriculum.kind == "adaptive"
    sources = sources_of(config.envs) if adaptive else ()
    return LearnerState(
        config, rules, Curriculum(config.run.seed, sources, adaptive=adaptive), planned
    )


def build_loop(
    config: RunConfig,
    ports: Ports,
    rules: Rules,
    model: Mapping[str, str],
    planned: Sequence[EvalTask] = (),
) -> LearnerLoop:
    """Return the loop of rank 0; `model` has the digests that a checkpoint must match."""
    learner, state = config.learner, learner_state(config, rules, planned)
    weights = WeightsPublisher(
        ports.transport,
        ports.fence,
        config.run_dir / WEIGHTS,
        config.broker.shared_files,
        metrics=ports.metrics,
    )
    publication = Publication(
        ports,
        state,
        weights,
        Announcer(ports, state, weights),
        Recorder(ports, state, Best(config.run_dir / BEST), weights, learner.keep_episodes_bytes),
    )
    log_space = LogSpace(ports, keep=learner.keep_log, total_steps=config.total_steps)
    return LearnerLoop(
        ports,
        state,
        LogIntake(ports, state, publication, log_space, learner.step_timeout_s),
        publication,
        Recovery(ports, state, run_record(config, model, planned), publication, log_space),
        learner.checkpoint_every,
    )


def run_record(
    config: RunConfig, model: Mapping[str, str], planned: Sequence[EvalTask]
) -> RunRecord:
    """Return what checkpoints say of a run; `model` has the digests of model, tokenizer and template."""
    identity = dict(model)
    if planned:
        identity["evaluation"] = plan_digest(config.eval, planned)
    if config.lora.rank:
        identity[LORA_RANK] = str(config.lora.rank)
    # The addresses of the broker and of the metrics may change freely.
    sections = config.model_dump(mode="json", exclude={"metrics"})
    names = ("ack_wait_s", "max_deliver", "max_log_bytes", "ticket_key")
    sections["broker"] = {name: sections["broker"][name] for name in names}
    return RunRecord(
        directory=config.run_dir,
        identity=identity,
        config=sections,
        machine=machine(config.learner.threads),
        ranks=config.learner.ranks * config.learner.nodes,
    )
