"""What each of the learner's ranks runs: an engine. Rank 0 leads with it, the others follow; `spawn.py` starts them.

Used by the learner and by `horizonrl replay`, which trains without a broker to announce anything to.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from horizonrl.common.config.schema import RunConfig
from horizonrl.learner.engine.api import EngineSettings
from horizonrl.learner.engine.ranks import Leader, follow
from horizonrl.learner.engine.registry import make_engine
from horizonrl.learner.engine.thread import EngineThread
from horizonrl.learner.intake.collector import Rules


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
        reward=config.reward,
        loss_weights={env.id: env.loss_weight for env in config.envs},
        demo_weight=config.rl.demo_weight,
        demos_in_rl=config.rl.demos_per_step > 0,
        temperature=config.rollout.temperature,
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
        betas=config.learner.betas,
        epsilon=config.learner.epsilon,
        gradient_checkpointing=config.learner.gradient_checkpointing,
        head_dtype=config.learner.head_dtype,
        seed=config.run.seed,
        temperature=config.rollout.temperature,
        collective_timeout_s=config.learner.step_timeout_s,
        objective=config.objective,
        deepspeed=config.learner.deepspeed,
        longest_episode_tokens=config.longest_episode_tokens,
    )
