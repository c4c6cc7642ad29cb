"""The actor's wiring: engine, chat, broker, loop."""

import asyncio
import json
import os
import socket
import sys
from pathlib import Path

from horizonrl.actors.chat import ChatTemplate
from horizonrl.actors.engines.scripted import ScriptedPolicy
from horizonrl.actors.loop import ActorLoop, ActorSettings
from horizonrl.actors.policy import Policy
from horizonrl.actors.rollout import Rollout
from horizonrl.actors.weights import WeightsFollower
from horizonrl.broker.api import Key, Role, Transport
from horizonrl.broker.connect import connected
from horizonrl.broker.state import StateStore
from horizonrl.common.config.schema import EnvSection, RunConfig
from horizonrl.common.errors import ConfigError, RunFailed
from horizonrl.common.logs import get_logger
from horizonrl.common.service import Service, until_stopped
from horizonrl.common.types import Provenance, RunSettings
from horizonrl.envs import registry

log = get_logger()

AGREEMENT_WAIT_S = 120.0
"""A controller that was started together with this actor, on a changed recipe, has said so within this."""


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
                await until_stopped(agreed(transport, config.settings), service.stopping)
                service.ready = True
                await loop.run()
    finally:
        await policy.close()


async def agreed(transport: Transport, mine: RunSettings, wait_s: float = AGREEMENT_WAIT_S) -> None:
    """Return once the key `run` says what this actor's recipe says; a controller that has yet to start is waited for.

    Raises ConfigError when it still says something else after `wait_s`: what this actor played would be another run's.
    """
    differing = ""
    try:
        async with asyncio.timeout(None) as patience:
            async for said in StateStore(transport).watch(Key.RUN):
                if not isinstance(said, RunSettings) or not (differing := differences(mine, said)):
                    return
                if patience.when() is None:
                    log.warning("recipe_differs", differences=differing, wait_s=wait_s)
                    patience.reschedule(asyncio.get_running_loop().time() + wait_s)
    except TimeoutError:
        raise ConfigError(
            f"this actor's recipe is not the run's: {differing}. Start it with the recipe that the controller was "
            "started with, or start the controller again with this one"
        ) from None
    raise RunFailed("the broker stopped sending the run's settings; start this role again")


def differences(mine: RunSettings, said: RunSettings) -> str:
    """Name what two recipes disagree on, and both values; empty when they agree."""
    here, there = _by_name(mine), _by_name(said)
    return "; ".join(
        f"{name} is {here.get(name, 'absent')!s:.300} here and {there.get(name, 'absent')!s:.300} in the run"
        for name in here | there
        if here.get(name, "absent") != there.get(name, "absent")
    )


def _by_name(settings: RunSettings) -> dict[str, object]:
    of_environments = {
        f"{env.env_id}.{name}": value for env in settings.environments for name, value in env if name != "env_id"
    }
    return {name: value for name, value in settings if name != "environments"} | of_environments


async def version_of(env: EnvSection) -> str:
    """Return an environment's id and version. Made once, it refuses options it cannot take before any ticket comes."""
    environment = registry.make(env.id, env.options)
    await environment.close()
    return f"{env.id} {environment.version}"


async def start_policy(config: RunConfig, model_dir: Path) -> Policy:
    """Start the engine that the config names; neither imports what the other one needs."""
    return _scripted(config, model_dir) if config.actor.engine == "scripted" else await _vllm(config, model_dir)


async def _vllm(config: RunConfig, model_dir: Path) -> Policy:
    from horizonrl.actors.engines.vllm import VllmPolicy, VllmSettings

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
