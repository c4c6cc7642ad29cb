"""An actor that plays nothing: it follows the weights of a run, and logs what its engine is given and what it samples.

    python -m tests.faults.follower URL RUN FOLDER [MODEL_DIR]

FOLDER is the host's shared memory: programs with the same one are actors of one host. With MODEL_DIR there is a real
engine, vLLM; without it one that only digests. The program ends with the run.
"""

import asyncio
import sys
from pathlib import Path

from horizonrl.actors.engines.registry import factory
from horizonrl.actors.engines.scripted import ScriptedPolicy
from horizonrl.actors.policy import ChangedWords, InferenceSettings, Policy
from horizonrl.actors.weights.follower import WeightsFollower
from horizonrl.broker.api import Role
from horizonrl.broker.connect import connected
from horizonrl.broker.weights.frames import digest_file
from horizonrl.common.config.schema import BrokerSection
from horizonrl.common.logs import configure_logs, get_logger
from horizonrl.common.metrics import Metrics
from horizonrl.common.scratch import shared_scratch
from horizonrl.common.types import PolicyVersion

log = get_logger()

PROMPT = (1, 2, 3, 4)
SAMPLED = 4
"""Tokens that a real engine samples with each version."""
FORMS = ("frame", "changes")


class DigestingPolicy(ScriptedPolicy):
    """Digests each file that its engine is given, and logs it once the engine samples with that version."""

    def __init__(self, inner: Policy | None, metrics: Metrics) -> None:
        super().__init__()
        self._inner = inner
        self._metrics = metrics

    async def apply(
        self, weights: Path, version: PolicyVersion, words: ChangedWords | None = None
    ) -> None:
        digest = await asyncio.to_thread(digest_file, weights)
        sampled_with = version
        if self._inner is not None:
            await self._inner.apply(weights, version)
            made = await self._inner.generate(
                PROMPT, max_tokens=SAMPLED, temperature=0.0, stop_ids=(), seed=None
            )
            (span,) = made.spans
            sampled_with = PolicyVersion(version=span.version, lineage=span.lineage)
        await super().apply(weights, version)
        received = {
            form: self._metrics.value("weights_received_bytes_total", form=form) for form in FORMS
        }
        log.info("weights_loaded", version=str(sampled_with), digest=digest, **received)


async def follow(url: str, run: str, folder: Path, model_dir: Path | None) -> None:
    inner, metrics = None, Metrics()
    if model_dir is not None:
        # First of all: it forks, which only a process of one thread can do.
        inner = await factory("vllm")(
            InferenceSettings(model_dir, max_context_tokens=512, slots=4, kv_cache_mib=256)
        )
    try:
        with shared_scratch(run, folder) as place:
            async with connected(run, BrokerSection(url=url), Role.ACTOR) as transport:
                follower = WeightsFollower(
                    transport, DigestingPolicy(inner, metrics), place, metrics
                )
                following = asyncio.create_task(follower.run(total_steps=1))
                ended = asyncio.create_task(follower.finished.wait())
                log.info("follower_ready")
                await asyncio.wait({following, ended}, return_when=asyncio.FIRST_COMPLETED)
                following.cancel()
                await asyncio.wait({following})
                if not following.cancelled():
                    following.result()  # raises what ended it
    finally:
        if inner is not None:
            await inner.close()


if __name__ == "__main__":
    configure_logs(run=sys.argv[2], role="actor", stream=sys.stdout)
    asyncio.run(
        follow(
            sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]) if sys.argv[4:] else None
        )
    )
