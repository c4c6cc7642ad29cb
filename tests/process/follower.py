"""An actor that plays nothing: it follows the weights of a run, and logs what its engine is given.

    python -m tests.process.follower URL RUN FOLDER

FOLDER is the host's shared memory: programs with the same one are actors of one host. The program ends with the run.
"""

import asyncio
import sys
from pathlib import Path

from horizonrl.actors.engines.scripted import ScriptedPolicy
from horizonrl.actors.policy import ChangedWords
from horizonrl.actors.weights.follower import WeightsFollower
from horizonrl.broker.api import Role
from horizonrl.broker.connect import connected
from horizonrl.broker.weights.frames import digest_file
from horizonrl.common.config.schema import BrokerSection
from horizonrl.common.logs import configure_logs, get_logger
from horizonrl.common.scratch import shared_scratch
from horizonrl.common.types import PolicyVersion

log = get_logger()


class DigestingPolicy(ScriptedPolicy):
    """Digests each file that it is given, and logs it."""

    async def apply(
        self, weights: Path, version: PolicyVersion, words: ChangedWords | None = None
    ) -> None:
        digest = await asyncio.to_thread(digest_file, weights)
        await super().apply(weights, version)
        log.info("weights_loaded", version=str(version), digest=digest)


async def follow(url: str, run: str, folder: Path) -> None:
    with shared_scratch(run, folder) as directory:
        async with connected(run, BrokerSection(url=url), Role.ACTOR) as transport:
            follower = WeightsFollower(transport, DigestingPolicy(), directory)
            following = asyncio.create_task(follower.run(total_steps=1))
            ended = asyncio.create_task(follower.finished.wait())
            log.info("follower_ready")
            await asyncio.wait({following, ended}, return_when=asyncio.FIRST_COMPLETED)
            following.cancel()
            await asyncio.wait({following})
            if not following.cancelled():
                following.result()  # raises what ended it


if __name__ == "__main__":
    configure_logs(run=sys.argv[2], role="actor", stream=sys.stdout)
    asyncio.run(follow(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
