"""A process of light actors: `python -m tests.scale.light_actors RECIPE COUNT URL PLAY_S`.

Each of the COUNT actors plays a group in PLAY_S seconds, on average. The process prints READY once every actor has its
connection. It is ended by a signal, which drops the actors as they are.
"""

import asyncio
import gc
import random
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop

from horizonrl.actors.chat.template import ChatTemplate
from horizonrl.actors.engines.scripted import ScriptedPolicy
from horizonrl.actors.loop import ActorLoop, ActorSettings
from horizonrl.actors.rollout.rollout import Rollout
from horizonrl.actors.weights.follower import WeightsFollower
from horizonrl.broker.api import Role, Transport
from horizonrl.broker.connect import connected
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.logs import configure_logs
from horizonrl.common.metrics import Metrics
from horizonrl.common.types import Provenance
from horizonrl.envs import registry

READY = "light actors are connected"
ENTERING = 32
"""Actors that connect at once."""
GROUP_TOKENS = 16
"""Tokens of the longer of a group's two episodes: four turns of almost four tokens each."""
GARBAGE = 200_000
"""New objects after which Python's collector looks at them."""
SLOWER = (0.5, 1.5)
"""How much slower than the mean an actor plays. If all played alike, their groups would come in waves."""


async def serve(config: RunConfig, count: int, play_s: float) -> None:
    """Run the actors until the run ends or the process does."""
    model_dir = Path(config.model.name)
    chat, metrics = await asyncio.to_thread(ChatTemplate.load, model_dir), Metrics()
    entering, entered = asyncio.Semaphore(ENTERING), asyncio.Semaphore(0)
    # In the bench's directory, which outlives this process: it is killed.
    with tempfile.TemporaryDirectory(prefix="scratch-", dir=config.run.root) as scratch:

        async def act(number: int) -> None:
            async with AsyncExitStack() as held:
                async with entering:
                    transport = await held.enter_async_context(
                        connected(config.run.name, config.broker, Role.ACTOR)
                    )
                entered.release()
                token_s = play_s / GROUP_TOKENS * random.uniform(*SLOWER)
                policy = ScriptedPolicy(
                    max_context_tokens=config.model.max_context_tokens, seed=number, token_s=token_s
                )
                await _actor(
                    config, transport, policy, chat, metrics, Path(scratch) / str(number)
                ).run()

        async with asyncio.TaskGroup() as group:
            for number in range(count):
                group.create_task(act(number))
            for _ in range(count):
                await entered.acquire()
            # A process of one actor has few objects. Here the collector would walk millions, for half of the CPU time.
            gc.collect()
            gc.freeze()
            gc.set_threshold(GARBAGE)
            print(READY, flush=True)


def _actor(
    config: RunConfig,
    transport: Transport,
    policy: ScriptedPolicy,
    chat: ChatTemplate,
    metrics: Metrics,
    directory: Path,
) -> ActorLoop:
    # Its own, as if every actor were on a host of its own: nobody downloads for it.
    directory.mkdir()
    return ActorLoop(
        settings=ActorSettings(
            slots=config.actor.slots,
            group_size=config.rollout.group_size,
            max_deliver=config.broker.max_deliver,
            drain_s=config.actor.drain_s,
            total_steps=config.total_steps,
        ),
        transport=transport,
        rollouts={env.id: Rollout(policy, chat, None, env.step_timeout_s) for env in config.envs},
        make_environment=lambda env_id: registry.make(env_id, {}),
        follower=WeightsFollower(transport, policy, directory, metrics),
        provenance=Provenance(actor=f"light-{directory.name}"),
        stopping=asyncio.Event(),
        # One for all: each would have dozens of series.
        metrics=metrics,
    )


def main() -> None:
    recipe, count, url, play_s = sys.argv[1:]
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers would import it: 8 s and 300 MB
    config = RunConfig.load([Path(recipe)], [f"--broker.url={url}"])
    configure_logs(run=config.run.name, role="actor")
    uvloop.run(serve(config, int(count), float(play_s)))


if __name__ == "__main__":
    main()
