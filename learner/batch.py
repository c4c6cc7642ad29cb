"""Groups become a Batch: aligned arrays per episode, the form in which experience reaches the engine.

Place in the flow: Group → **Batch** → Version. Pure functions of records; no torch. Token ids, masks and logprobs
are the recorded ones, position for position; nothing is re-tokenised (invariant 4). Axis: L, the tokens of one trace.
"""

from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from horizonrl.common.types import Episode


@dataclass(frozen=True, slots=True)
class Trace:
    """One episode of L tokens: prompt, generations and observations in order."""

    ids_L: NDArray[np.int32]
    mask_L: NDArray[np.bool_]
    """True where a token was generated, and so carries loss."""
    logprobs_L: NDArray[np.float32]
    """The behaviour policy's logprob where `mask_L`, else 0."""
    versions_L: NDArray[np.int32]
    """The policy version that sampled the token where `mask_L`, else -1."""
    advantages_L: NDArray[np.float32]
    """The advantage of each generated token, else 0."""

    @property
    def trained_tokens(self) -> int:
        return int(self.mask_L.sum())


@dataclass(frozen=True, slots=True)
class Batch:
    """The traces of one optimizer step, in the order of the group log."""

    traces: tuple[Trace, ...]
    version: int
    """The policy version that is trained: the step makes `version + 1`."""

    @property
    def trained_tokens(self) -> int:
        return sum(trace.trained_tokens for trace in self.traces)

    def digest(self) -> str:
        """Return the xxh3_128 of everything in the batch that reaches the weights."""
        hasher = xxhash.xxh3_128()
        for trace in self.traces:
            for array in (trace.ids_L, trace.mask_L, trace.logprobs_L, trace.versions_L, trace.advantages_L):
                hasher.update(array.tobytes())
        return hasher.hexdigest()


def trace_of(episode: Episode, advantage: float) -> Trace:
    """Lay a valid episode out as one trace whose generated tokens all carry `advantage`.

    The observation that ends an episode was never read by the policy and is left out.
    """
    ids, versions, logprobs = list(episode.prompt_ids), [-1] * len(episode.prompt_ids), [0.0] * len(episode.prompt_ids)
    for place, turn in enumerate(episode.turns):
        ids += turn.output_ids
        logprobs += turn.logprobs
        for span in turn.spans:
            versions += [span.version] * span.tokens
        if place + 1 < len(episode.turns):
            ids += turn.observation_ids
            logprobs += [0.0] * len(turn.observation_ids)
            versions += [-1] * len(turn.observation_ids)
    versions_L = np.asarray(versions, dtype=np.int32)
    mask_L = versions_L >= 0
    return Trace(
        ids_L=np.asarray(ids, dtype=np.int32),
        mask_L=mask_L,
        logprobs_L=np.asarray(logprobs, dtype=np.float32),
        versions_L=versions_L,
        advantages_L=np.where(mask_L, np.float32(advantage), np.float32(0.0)),
    )
