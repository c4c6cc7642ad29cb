"""An actor without an engine: follows the weights of a run, and prints each version with the digest of its file.

    python -m tests.follower_program URL RUN FOLDER

FOLDER is the host's shared memory: programs with the same one are actors of one host.
"""

import asyncio
import sys
from pathlib import Path

from horizonrl.actors.engines.scripted import ScriptedPolicy
from horizonrl.actors.weights import WeightsFollower
from horizonrl.broker.api import Role
from horizonrl.broker.connect import connected
from horizonrl.broker.weights.frames import digest_file
from horizonrl.common.config.schema import BrokerSection
from horizonrl.common.scratch import shared_scratch
from horizonrl.common.types import PolicyVersion


class PrintingPolicy(ScriptedPolicy):
    """Says what an engine would have loaded."""

    async def apply(self, weights: Path, version: PolicyVersion) -> None:
        await super().apply(weights, version)
        digest = await asyncio.to_thread(digest_file, weights)
        sys.stdout.write(f"{version} {digest}\n")
        sys.stdout.flush()


async def follow(url: str, run: str, folder: Path) -> None:
    with shared_scratch(run, folder) as place:
        async with connected(run, BrokerSection(url=url), Role.ACTOR) as transport:
            await WeightsFollower(transport, PrintingPolicy(), place).run(total_steps=1_000_000)


if __name__ == "__main__":
    asyncio.run(follow(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
