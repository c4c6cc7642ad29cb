"""Groups become a Batch: aligned arrays per token sequence, the form in which experience reaches the engine.

Place in the flow: Group → **Batch** → Version. Pure functions of records; no torch. Token ids, logprobs and rewards
are the recorded ones, position for position; text is never tokenised again (docs/invariants.md: token exactness).
Axes: L, the tokens of one trace; K, the turns of its episode, in order of time.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from horizonrl.common.types import Episode, PolicyVersion, Turn, sampled_in


@dataclass(frozen=True, slots=True)
class Trace:
    """One token sequence of L tokens: prompt, generations and observations in order. Usually a whole episode."""

    ids_L: NDArray[np.int32]
    turns_L: NDArray[np.int32]
    """The turn that generated the token, by its place in the episode; -1 for tokens without loss."""
    logprobs_L: NDArray[np.float32]
    """The behaviour policy's logprob of a trained token; 0 for other tokens."""
    versions_L: NDArray[np.int32]
    """The policy version that sampled a trained token; -1 for other tokens."""
    rewards_L: NDArray[np.float32]
    """The reward of a trained turn, at its last generated token; 0 for other tokens."""
    group: int = 0
    """Index of its group in the batch. An episode is compared with the other episodes of its group."""
    demo: bool = False
    """An expert's episode: it is cloned, and has no behaviour policy."""
    truncated: bool = False
    """Ended by the horizon, the context or the environment's own limit."""
    states: tuple[str, ...] = ()
    """The state in which each turn of the episode was taken, empty for one without; () if nothing asks for it."""
    episode: int | None = None
    """Index of its episode in the group, if that is more than this trace: it has other branches, or turns without loss.
    None: the trace is the episode, and the next field is empty."""
    rewards_K: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """The reward of every turn of the episode."""

    @property
    def mask_L(self) -> NDArray[np.bool_]:
        """True for trained tokens: generated ones, except those of turns that carry no loss."""
        return self.turns_L >= 0

    @property
    def trained_tokens(self) -> int:
        return int(self.mask_L.sum())


LATER: Mapping[str, Callable[[Trace], bool]] = {
    "states": lambda trace: bool(trace.states),
    "episode": lambda trace: trace.episode is not None,
    "rewards_K": lambda trace: trace.episode is not None,
}
"""The fields that later releases added, and whether a trace uses them."""


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
            for column in fields(trace):
                # What a run does not use is left out, so that its digests are those of releases that did not have it.
                if column.name not in LATER or LATER[column.name](trace):
                    hasher.update(np.asarray(getattr(trace, column.name)).tobytes())
        return hasher.hexdigest()


def traces_of(
    episode: Episode,
    group: int = 0,
    demo: bool = False,
    turn_rewards: Sequence[float] | None = None,
    with_states: bool = False,
) -> list[Trace]:
    """Return a valid episode as one trace per branch that has a trained turn; a linear one is a single trace.

    `turn_rewards` takes the place of the environment's rewards (`algorithm/reward.py`).
    """
    turn_rewards = [turn.reward for turn in episode.turns] if turn_rewards is None else turn_rewards
    return [
        _trace(
            prompt,
            turns,
            turn_rewards,
            group=group,
            demo=demo,
            truncated=episode.stop.truncated,
            states=tuple(turn.state for turn in episode.turns) if with_states else (),
            episode=None if episode.linear else episode.index,
            rewards_K=np.asarray([] if episode.linear else turn_rewards, np.float32),
        )
        for prompt, turns in trained_branches(episode)
    ]


def trained_branches(episode: Episode) -> list[tuple[tuple[int, ...], list[tuple[int, Turn]]]]:
    """Return the branches that become traces, as `Episode.by_branch` does."""
    return [branch for branch in episode.by_branch() if any(turn.trained for _, turn in branch[1])]


def sampled_by(episode: Episode) -> list[Counter[PolicyVersion]]:
    """Return, for each trace of an episode, how many of its trained tokens each version sampled."""
    return [
        sampled_in(turn for _, turn in turns if turn.trained)
        for _, turns in trained_branches(episode)
    ]


def by_episode(traces: Sequence[Trace]) -> list[list[int]]:
    """Return the indices of the traces of each episode, the episodes in the order of their first trace."""
    episodes: dict[Hashable, list[int]] = {}
    for index, trace in enumerate(traces):
        identity = index if trace.episode is None else (trace.group, trace.episode)
        episodes.setdefault(identity, []).append(index)
    return list(episodes.values())


def _trace(
    prompt: Sequence[int],
    placed: Sequence[tuple[int, Turn]],
    turn_rewards: Sequence[float],
    **facts: Any,
) -> Trace:
    """Return a branch as a trace. The last observation is left out: the policy never read it."""
    ids, turns, versions = list(prompt), [-1] * len(prompt), [-1] * len(prompt)
    logprobs, rewards = [0.0] * len(prompt), [0.0] * len(prompt)

    def read(tokens: Sequence[int]) -> None:
        ids.extend(tokens)
        for column, nothing in ((turns, -1), (versions, -1), (logprobs, 0.0), (rewards, 0.0)):
            column += [nothing] * len(tokens)

    for index, turn in placed:
        if turn.trained:
            ids += turn.output_ids
            turns += [index] * len(turn.output_ids)
            logprobs += turn.logprobs
            for span in turn.spans:
                versions += [span.version] * span.tokens
            # On a token with loss. On an observation, which the mask leaves out, every return would be 0.
            rewards += [0.0] * (len(turn.output_ids) - 1) + [turn_rewards[index]]
        else:
            read(turn.output_ids)
        if index != placed[-1][0]:
            read(turn.observation_ids)
    return Trace(
        ids_L=np.asarray(ids, dtype=np.int32),
        turns_L=np.asarray(turns, dtype=np.int32),
        logprobs_L=np.asarray(logprobs, dtype=np.float32),
        versions_L=np.asarray(versions, dtype=np.int32),
        rewards_L=np.asarray(rewards, dtype=np.float32),
        **facts,
    )
