"""The policy's seam: ids in, ids out, with the logprob and the version of each.

`engines/` holds its implementations, `engines/registry.py` their names, and `tests/contracts/test_policy.py` what holds
for each of them. The policy knows nothing of text, environments or the broker.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from horizonrl.common.types import PolicyVersion, VersionSpan


@dataclass(frozen=True, slots=True)
class Generation:
    """T sampled tokens: `ids` [T], `logprobs` [T] of the sampling distribution, `spans` that partition T by version."""

    ids: tuple[int, ...]
    # They travel with the ids because nobody can compute them again: for the same bfloat16 weights, vLLM and Hugging
    # Face differ by 0.04 nats on average (SmolLM2-135M on CPU).
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]


@dataclass(frozen=True, slots=True)
class ChangedWords:
    """The words of a version that differ from those of `base`, for an engine that can write them into its layers."""

    base: PolicyVersion
    file: Path
    """A safetensors file, as `actors/weights/words.py` writes it."""


class Policy(Protocol):
    max_context_tokens: int
    engine: str
    """Name, version and precision of the engine, for provenance."""
    takes_words: bool
    """True for an engine that can write changed words into its layers: it need not load the whole file."""

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

    async def apply(
        self, weights: Path, version: PolicyVersion, words: ChangedWords | None = None
    ) -> None:
        """Load a safetensors file of Hugging Face named tensors between two tokens of the running requests.

        The file's digest has been verified. An engine that is at the base of `words` may take these alone. Raises
        WeightsRejected when the loaded weights fail the probe; the caller then replaces the engine.
        """

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class InferenceSettings:
    """What a policy is started with. An engine passes over what it has no use for."""

    model_dir: Path
    max_context_tokens: int
    slots: int = 32
    """Requests that are decoded at once; others wait."""
    threads: int = 1
    """CPU threads. Two on a busy machine are slower than one: they wait for each other, spinning."""
    kv_cache_mib: int = 512
    """Memory for the key-value cache on CPU, in MiB; on a GPU the cache takes what its share of memory leaves."""
    gpu_memory_share: float = 0.9
    """Share of a GPU's memory for weights and cache."""
    shares_gpu: bool = False
    """Whether others take and give back memory of the same GPU while the engine starts."""
    tensor_parallel: int = 1
    """GPUs, or processes on CPU, over which one engine spreads its model."""
    renewed: bool = True
    """Whether new weights will come, so that a model whose weights could not be proven is refused at the start."""
    vllm: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's engine, under its names."""
    seed: int = 0
    """Seed of the requests that bring none of their own."""
