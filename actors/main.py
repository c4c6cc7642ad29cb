"""The actor's wiring: engine, chat, broker, loop."""

import json
import os
import socket
import sys
from pathlib import Path

from horizonrl.actors.chat import ChatTemplate
from horizonrl.actors.loop import ActorLoop, ActorSettings
from horizonrl.actors.policy import Policy
from horizonrl.actors.rollout import Rollout
from horizonrl.actors.scripted_policy import ScriptedPolicy
from horizonrl.actors.weights import WeightsFollower
from horizonrl.broker.access import Role
from horizonrl.broker.connect import connected
from horizonrl.common.config import EnvSection, RunConfig
from horizonrl.common.service import Service
from horizonrl.common.types import Provenance
from horizonrl.envs import registry


async def run(
    config: RunConfig, model_dir: Path, identity: dict[str, str], scratch_dir: Path, service: Service
) -> None:
    """Run one actor until SIGTERM or the end of the run. The engine starts first: it forks before any thread exists."""
    policy = await start_policy(config, model_dir)
    chat = ChatTemplate.load(model_dir)
    environments = {env.id: env for env in config.envs}
    shared_dir = config.run_dir / "weights" if config.broker.shared_files else None
    try:
        versions = ", ".join([await version_of(env) for env in config.envs])
        async with connected(config.run.name, config.broker, Role.ACTOR) as transport:
            loop = ActorLoop(
                settings=ActorSettings(
                    slots=config.actor.slots,
                    group_size=config.rollout.group_size,
                    max_deliver=config.broker.max_deliver,
                    drain_s=config.actor.drain_s,
                    total_steps=config.total_steps,
                ),
                transport=transport,
                rollouts={
                    env.id: Rollout(policy, chat, config.rollout.system_prompt, env.step_timeout_s)
                    for env in config.envs
                },
                make_environment=lambda env_id: registry.make(env_id, environments[env_id].options),
                follower=WeightsFollower(transport, policy, scratch_dir, service.metrics, shared_dir),
                provenance=Provenance(
                    actor=f"{socket.gethostname()}-{os.getpid()}".replace(".", "-"),
                    engine=policy.engine,
                    model_digest=identity["model"],
                    template_digest=identity["template"],
                    environment=versions,
                ),
                stopping=service.stopping,
                metrics=service.metrics,
            )
            async with service.open(config.metrics.host, config.metrics.port, transport):
                service.ready = True
                await loop.run()
    finally:
        await policy.close()


async def version_of(env: EnvSection) -> str:
    """Return an environment's id and version. Made once, it refuses options it cannot take before any ticket comes."""
    environment = registry.make(env.id, env.options)
    await environment.close()
    return f"{env.id} {environment.version}"


async def start_policy(config: RunConfig, model_dir: Path) -> Policy:
    """Start the engine that the config names; neither imports what the other one needs."""
    return _scripted(config, model_dir) if config.actor.engine == "scripted" else await _vllm(config, model_dir)


async def _vllm(config: RunConfig, model_dir: Path) -> Policy:
    from horizonrl.actors.vllm_policy import VllmPolicy, VllmSettings

    return await VllmPolicy.start(
        VllmSettings(
            model_dir=model_dir,
            max_context_tokens=config.model.max_context_tokens,
            max_running=config.actor.slots,
            threads=config.actor.threads,
            kv_cache_mib=config.actor.kv_cache_mib,
            gpu_memory_share=config.actor.gpu_memory_share,
            seed=config.run.seed,
        )
    )


def _scripted(config: RunConfig, model_dir: Path) -> Policy:
    """Return a policy of random tokens in this process, which then never imports torch.

    transformers imports torch where it finds it, for 8 seconds; its tokenizers work without.
    """
    sys.modules["torch"] = None  # type: ignore[assignment]  # what an import takes for "not installed"
    return ScriptedPolicy(
        vocabulary=json.loads((model_dir / "config.json").read_text())["vocab_size"],
        max_context_tokens=config.model.max_context_tokens,
        seed=os.getpid(),  # two actors that play one ticket answer differently, as two engines would
    )
