"""The actor's wiring: engine, chat, broker, loop."""

import os
import socket
from pathlib import Path

from horizonrl.actors.chat.template import ChatTemplate
from horizonrl.actors.engines.registry import start_policy
from horizonrl.actors.gateway.server import gateway_for
from horizonrl.actors.loop import ActorLoop, ActorSettings
from horizonrl.actors.rollout.replies import parser_if_needed
from horizonrl.actors.rollout.rollout import Rollout
from horizonrl.actors.weights.follower import WeightsFollower
from horizonrl.broker.agreement import wait_for_agreement
from horizonrl.broker.api import Role
from horizonrl.broker.connect import connected
from horizonrl.broker.weights.changes import warm_up_in_thread
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.run_dir import WEIGHTS
from horizonrl.common.service import Service, until_stopped
from horizonrl.common.types import Provenance
from horizonrl.envs import registry


async def run_actor(
    config: RunConfig, model_dir: Path, identity: dict[str, str], shadow_dir: Path, service: Service
) -> None:
    """Run one actor until SIGTERM or the end of the run. The engine starts first: it forks before any thread exists."""
    policy = await start_policy(config.actor, config.model, model_dir, seed=config.run.seed)
    chat = ChatTemplate.load(model_dir)
    environments = {env.id: env for env in config.envs}
    shared_dir = config.run_dir / WEIGHTS if config.broker.shared_files else None
    try:
        # A template that refuses the system prompt ends the actor here: it would break every episode.
        chat.open(config.rollout.system_prompt, "...")
        # Makes every environment once: a wrong option ends the actor here, before it leases a ticket.
        parser = await parser_if_needed(chat, {env.id: env.options for env in config.envs})
        versions = ", ".join(
            [await registry.versioned_id(env.id, env.options) for env in config.envs]
        )
        async with (
            gateway_for(
                [env.id for env in config.envs],
                policy,
                chat,
                service.metrics,
                config.actor.gateway_host,
            ) as gateway,
            connected(config.run.name, config.broker, Role.ACTOR) as transport,
        ):
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
                    env.id: Rollout(
                        policy=policy,
                        chat=chat,
                        system_prompt=config.rollout.system_prompt,
                        step_timeout_s=env.step_timeout_s,
                        context=config.rollout.context,
                        parser=parser,
                        gateway=gateway,
                        states=config.advantage.compares_states,
                    )
                    for env in config.envs
                },
                make_environment=lambda env_id: registry.make(env_id, environments[env_id].options),
                follower=WeightsFollower(
                    transport, policy, shadow_dir, service.metrics, shared_dir
                ),
                provenance=Provenance(
                    actor=f"{socket.gethostname()}-{os.getpid()}".replace(".", "-"),
                    engine=policy.engine,
                    model_digest=identity["model"],
                    template_digest=identity["template"],
                    stop_ids=identity["stops"],
                    environment=versions,
                ),
                stopping=service.stopping,
                metrics=service.metrics,
            )
            service.refresh = lambda: service.metrics.set("event_loop_lag_seconds", loop.lag.take())
            async with service.open(config.metrics.host, config.metrics.port, transport):
                # Before the first lease: what is played with another recipe would be trained as this run's.
                await until_stopped(
                    wait_for_agreement(transport, config.settings), service.stopping
                )
                # Not earlier: an actor that waits for its recipe to match plays nothing.
                service.ready = True
                # The engine samples the first group meanwhile, in its own process.
                if shared_dir is None:
                    warm_up_in_thread()
                await loop.run()
    finally:
        await policy.close()
