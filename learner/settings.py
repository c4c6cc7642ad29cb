"""What the learner's parts are told of the config. Used where a learner starts and where a replay stands in for it."""

from pathlib import Path

from horizonrl.common.config.schema import RunConfig
from horizonrl.learner.engine.api import EngineSettings
from horizonrl.learner.intake.collector import Rules


def collecting_rules(config: RunConfig, vocabulary: int) -> Rules:
    return Rules(
        max_staleness=config.rl.max_staleness,
        vocabulary=vocabulary,
        max_context_tokens=config.model.max_context_tokens,
        advantage=config.advantage,
        reward=config.reward,
        demos_in_rl=config.rl.demos_per_step > 0,
        temperature=config.rollout.temperature,
    )


def engine_settings(config: RunConfig, model_dir: Path) -> EngineSettings:
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
        gradient_checkpointing=config.learner.gradient_checkpointing,
        seed=config.run.seed,
        temperature=config.rollout.temperature,
        collective_timeout_s=config.learner.step_timeout_s,
        objective=config.objective,
        deepspeed=config.learner.deepspeed,
        longest_episode_tokens=config.longest_episode_tokens,
    )
