"""The learner's wiring: ranks, engine, broker, loop."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from horizonrl.broker.api import Role
from horizonrl.broker.connect import connected
from horizonrl.common.children import bind
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.service import Service
from horizonrl.learner.controller.curriculum import eval_tasks
from horizonrl.learner.engine.deepspeed import DeepSpeedEngine, EngineSettings
from horizonrl.learner.engine.ranks import Leader, follow
from horizonrl.learner.intake.collector import Rules
from horizonrl.learner.loop import EngineThread, LearnerLoop
from horizonrl.learner.records.journal import only_learner

LAST_CHECKPOINT_S = 120
"""How long torchrun lets its ranks end after SIGTERM; its own 30 s are too short for a last checkpoint."""
LAUNCHER = "HORIZONRL_LAUNCHER"
"""Tells the ranks which process has launched them: they do not outlive it."""


def spawn_ranks(ranks: int) -> None:
    """Launch one process per rank and end with their exit code, unless this is one of the ranks or the only one."""
    if launcher := os.environ.get(LAUNCHER):
        bind(int(launcher))
    elif ranks > 1:
        os.environ[LAUNCHER] = str(os.getpid())
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(LAST_CHECKPOINT_S))
        try:
            torchrun(["--standalone", f"--nproc-per-node={ranks}", "-m", "horizonrl.ops.cli.main", *sys.argv[1:]])
        except ChildFailedError as error:  # its own end would be code 1, which says "try again"
            sys.exit(max(1, error.get_first_failure()[1].exitcode))
        sys.exit(0)


async def run_learner(config: RunConfig, model_dir: Path, identity: dict[str, str], service: Service) -> None:
    """Run one rank of the learner until SIGTERM or the last step: rank 0 leads, the others follow its calls."""

    async def learn(engine: EngineThread, rules: Rules) -> None:
        with only_learner(config.run_dir):
            async with (
                connected(config.run.name, config.broker, Role.LEARNER) as transport,
                service.open(config.metrics.host, config.metrics.port, transport),
            ):
                checked = replace(rules, model_digest=identity["model"], template_digest=identity["template"])
                loop = LearnerLoop(
                    *(config, transport, engine, checked, identity, service.stopping, service.metrics),
                    eval_tasks=eval_tasks(config),
                )
                service.ready = True
                await loop.run()

    await on_ranks(config, model_dir, learn)


async def on_ranks(config: RunConfig, model_dir: Path, lead: Callable[[EngineThread, Rules], Awaitable[None]]) -> None:
    """Make this rank's engine; rank 0 runs `lead` with it, the other ranks follow the calls that it makes."""
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
    call = partial(asyncio.get_running_loop().run_in_executor, thread)
    local = await call(DeepSpeedEngine, _engine_settings(config, model_dir))
    if local.rank != 0:
        for number in (signal.SIGTERM, signal.SIGINT):  # rank 0 decides when all end: its last checkpoint needs us
            signal.signal(number, signal.SIG_IGN)
        await call(follow, local)
        return
    engine = Leader(local)
    rules = Rules(
        max_staleness=config.rl.max_staleness,
        vocabulary=local.vocabulary,
        max_context_tokens=config.model.max_context_tokens,
        advantage=config.advantage,
        demos_in_rl=config.rl.demos_per_step > 0,
    )
    host = EngineThread(engine, thread, config.learner.step_timeout_s)
    await lead(host, rules)
    await host.call(engine.close)


def _engine_settings(config: RunConfig, model_dir: Path) -> EngineSettings:
    return EngineSettings(
        model_dir=model_dir,
        lora_rank=config.lora.rank,
        zero_stage=config.learner.zero_stage,
        threads=config.learner.threads,
        micro_batch_tokens=config.learner.micro_batch_tokens,
        max_grad_norm=config.learner.max_grad_norm,
        weight_decay=config.learner.weight_decay,
        gradient_checkpointing=config.learner.gradient_checkpointing,
        seed=config.run.seed,
        temperature=config.rollout.temperature,
        collective_timeout_s=config.learner.step_timeout_s,
        objective=config.objective,
        longest_episode_tokens=config.longest_episode_tokens,
    )
