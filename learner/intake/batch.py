"""Groups become a Batch: aligned arrays per episode, the form in which experience reaches the engine.

Place in the flow: Group → **Batch** → Version. Pure functions of records; no torch. Token ids, logprobs and rewards
are the recorded ones, position for position; text is never tokenised again (docs/invariants.md: token exactness).
Axis: L, the tokens of one trace.
"""

from dataclasses import dataclass, fields

import numpy as np
import xxhash
from numpy.typing import NDArray

from horizonrl.common.types import Episode


@dataclass(frozen=True, slots=True)
class Trace:
    """One episode of L tokens: prompt, generations and observations in order."""

    ids_L: NDArray[np.int32]
    turns_L: NDArray[np.int32]
    """Index of the turn that generated the token; -1 for other tokens."""
    logprobs_L: NDArray[np.float32]
    """The behaviour policy's logprob of a generated token; 0 for other tokens."""
    versions_L: NDArray[np.int32]
    """The policy version that sampled a generated token; -1 for other tokens."""
    rewards_L: NDArray[np.float32]
    """The reward of a turn, at its last generated token; 0 for other tokens."""
    group: int = 0
    """Index of its group in the batch. An episode is compared with the other episodes of its group."""
    demo: bool = False
    """An expert's episode: it is cloned, and has no behaviour policy."""
    truncated: bool = False
    """Ended by the horizon, the context or the environment's own limit."""

    @property
    def mask_L(self) -> NDArray[np.bool_]:
        """True for generated tokens: only they carry loss."""
        return self.turns_L >= 0

    @property
    def trained_tokens(self) -> int:
        return int(self.mask_L.sum())


@dataclass(frozen=True, slots=True)
class Batch:
    """The traces of one optimizer step, in the order of the group log."""

    traces: tuple[Trace, ...]
    version: int
    """The policy version that is trained: the batch turns it into `version + 1`."""

    @property
    def trained_tokens(self) -> int:
        return sum(trace.trained_tokens for trace in self.traces)

    def digest(self) -> str:
        """Return the xxh3_128 digest of everything in the batch that affects the weights."""
        hasher = xxhash.xxh3_128()
        for trace in self.traces:
            # In the order of the class: a field that is added or moved changes the digests that a replay must match.
            for field in fields(trace):
                hasher.update(np.asarray(getattr(trace, field.name)).tobytes())
        return hasher.hexdigest()


def trace_of(episode: Episode, group: int = 0, demo: bool = False) -> Trace:
    """Return a valid episode as one trace. The last observation is left out: the policy never read it."""
    prompt = len(episode.prompt_ids)
    ids, turns, versions = list(episode.prompt_ids), [-1] * prompt, [-1] * prompt
    logprobs, rewards = [0.0] * prompt, [0.0] * prompt
    for place, turn in enumerate(episode.turns):
        ids += turn.output_ids
        turns += [place] * len(turn.output_ids)
        logprobs += turn.logprobs
        for span in turn.spans:
            versions += [span.version] * span.tokens
        # On a token with loss. On an observation, which the mask leaves out, every return would be 0.
        rewards += [0.0] * (len(turn.output_ids) - 1) + [turn.reward]
        if place + 1 < len(episode.turns):
            read = len(turn.observation_ids)
            ids += turn.observation_ids
            for column, nothing in ((turns, -1), (versions, -1), (logprobs, 0.0), (rewards, 0.0)):
                column += [nothing] * read
    return Trace(
        ids_L=np.asarray(ids, dtype=np.int32),
        turns_L=np.asarray(turns, dtype=np.int32),
        logprobs_L=np.asarray(logprobs, dtype=np.float32),
        versions_L=np.asarray(versions, dtype=np.int32),
        rewards_L=np.asarray(rewards, dtype=np.float32),
        group=group,
        demo=demo,
        truncated=episode.stop.truncated,
    )
