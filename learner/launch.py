"""The learner's ranks: one process per rank, launched by torchrun, each with an engine; rank 0 leads.

Used by the learner and by `horizonrl replay`, which trains without a broker to announce anything to.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from horizonrl.common.children import bind
from horizonrl.common.config.schema import RunConfig
from horizonrl.learner.engine.api import EngineSettings
from horizonrl.learner.engine.ranks import Leader, follow
from horizonrl.learner.engine.registry import make_engine
from horizonrl.learner.engine_thread import EngineThread
from horizonrl.learner.intake.collector import Rules

LAST_CHECKPOINT_S = 120
"""How long torchrun waits for its ranks to end after SIGTERM. Its default of 30 s is too short for a checkpoint."""
LAUNCHER = "HORIZONRL_LAUNCHER"
"""Environment variable with the id of the process that launched the ranks: they do not outlive it."""


def spawn_ranks(ranks: int) -> None:
    """Launch one process per rank and end with their exit code. Returns in each rank, and if there is only one."""
    if launcher := os.environ.get(LAUNCHER):
        # This is a rank: torchrun has started the same command line once more.
        bind(int(launcher))
    elif ranks > 1:
        os.environ[LAUNCHER] = str(os.getpid())
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(LAST_CHECKPOINT_S))
        try:
            torchrun(["--standalone", f"--nproc-per-node={ranks}", "-m", "horizonrl.ops.cli.main", *sys.argv[1:]])
        except ChildFailedError as error:  # raised on, it would become code 1, which says "try again"
            # At least 1, since the code of a rank that a signal ended is negative.
            sys.exit(max(1, error.get_first_failure()[1].exitcode))
        sys.exit(0)


async def on_ranks(config: RunConfig, model_dir: Path, lead: Callable[[EngineThread, Rules], Awaitable[None]]) -> None:
    """Make this rank's engine. Rank 0 runs `lead` with it; the other ranks follow the calls that `lead` makes."""
    # A single worker keeps the calls in order: collectives pair up by their order on every rank.
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
    call = partial(asyncio.get_running_loop().run_in_executor, thread)
    local = await call(make_engine, _engine_settings(config, model_dir))
    if local.rank != 0:
        for number in (signal.SIGTERM, signal.SIGINT):  # rank 0 decides when all end: its last checkpoint needs them
            signal.signal(number, signal.SIG_IGN)
        await call(follow, local)
        return
    rules = Rules(
        max_staleness=config.rl.max_staleness,
        vocabulary=local.vocabulary,
        max_context_tokens=config.model.max_context_tokens,
        advantage=config.advantage,
        demos_in_rl=config.rl.demos_per_step > 0,
    )
    engine = EngineThread(Leader(local) if local.ranks > 1 else local, thread, config.learner.step_timeout_s)
    await lead(engine, rules)
    # Not after an error: every rank has to make this call, and one of them may be stuck.
    await engine.close()


def _engine_settings(config: RunConfig, model_dir: Path) -> EngineSettings:
    return EngineSettings(
        model_dir=model_dir,
        backend=config.learner.backend,
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
