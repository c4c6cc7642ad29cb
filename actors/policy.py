"""The policy's seam: ids in, ids out, with the logprob and the version of each.

`vllm_policy.py` keeps it on vLLM's AsyncLLM; `ScriptedPolicy` keeps it without a model, for tests and for chaos runs.
The policy knows nothing of text, environments or the broker.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from horizonrl.common.types import PolicyVersion, VersionSpan


@dataclass(frozen=True, slots=True)
class Generation:
    """T sampled tokens: `ids` [T], `logprobs` [T] of the sampling distribution, `spans` that partition T by version."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]


class Policy(Protocol):
    max_context_tokens: int
    engine: str
    """Name, version and precision of the engine, for provenance."""

    @property
    def version(self) -> PolicyVersion:
        """The version that samples now."""

    async def generate(
        self,
        ids: Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        stop_ids: Sequence[int],
        seed: int | None,
    ) -> Generation:
        """Sample a continuation of `ids`, up to and including the first of `stop_ids` or `max_tokens` tokens.

        Raises PolicyFailure for a request that failed, EngineDead when the engine is gone. Cancelling it frees the
        request.
        """

    async def apply(self, weights: Path, policy: PolicyVersion) -> None:
        """Load a safetensors file of Hugging Face named tensors between two tokens of the running requests.

        The file's digest has been verified. Raises WeightsRejected when the loaded weights fail the probe; the
        caller then replaces the engine.
        """

    async def close(self) -> None: ...
