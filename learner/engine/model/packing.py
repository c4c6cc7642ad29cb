"""Pack traces into micro-batches: flat sequences of episodes within a token budget, spread evenly over the ranks.

Place in the flow: Batch → **micro-batches** → loss. Pure NumPy. The episodes of a group begin with the same prompt,
which goes through the model once for all of them. Nothing is padded, because `attention.py` knows where each episode
begins. A model that cannot be packed gets one rectangle of similar rows per micro-batch. Axes: B episodes, T positions
of the flat sequence, N the trained tokens in its order, S segments.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from horizonrl.common.errors import ConfigError
from horizonrl.learner.algorithm.batch import Trace

PADDING_ID = 0
"""The one token of a micro-batch without episodes. Any id will do: it reaches no trained token."""
WORTH_SHARING_TOKENS = 32
"""A family that saves fewer tokens is read row by row: its attention would be cut into more parts than it saves."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Positions `start` to `end` of the flat sequence, which continue positions `prefix_start` to `prefix_end`."""

    start: int
    end: int
    prefix_start: int = 0
    prefix_end: int = 0


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Whole episodes, one after the other. A prompt that several continue stands once, before them."""

    ids_T: NDArray[np.int64]
    positions_T: NDArray[np.int64]
    """The place of each id in its episode."""
    segments_S4: NDArray[np.int64]
    """The segments, each as the four numbers of `Segment`."""
    trained_N: NDArray[np.int64]
    """Positions in the flat sequence. The token before each of them belongs to the same segment."""
    episodes_N: NDArray[np.int64]
    """The episode of each trained token, as its place in `indices_B`."""
    demo_N: NDArray[np.bool_]
    """True where an expert wrote the trained token."""
    indices_B: tuple[int, ...]
    """The trace of each episode; empty if the micro-batch has none."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Traces that go through the model together: indices in the batch, longest first, and how many ids they share."""

    rows: tuple[int, ...]
    prefix_tokens: int
    tokens: int
    """What goes through the model: the prefix once and the rest of each trace, or rows padded to the longest."""


def pack(
    traces: Sequence[Trace], ranks: int, micro_batch_tokens: int, flat: bool = True
) -> list[list[MicroBatch]]:
    """Return each rank's micro-batches: every trace once, the same number of micro-batches for every rank.

    The result is deterministic. A rank with less to do gets empty micro-batches, because every rank must take part in
    the collectives of every forward and backward pass. Without `flat`, no prefix is shared, and a micro-batch is a
    rectangle once its rows are padded.
    """
    lengths = [len(trace.ids_L) for trace in traces]
    kinds = families(traces) if flat else [(0, range(len(traces)))]
    cuts = [
        cut
        for prefix_tokens, places in kinds
        for cut in fill(lengths, places, micro_batch_tokens, prefix_tokens, flat)
    ]
    plans = [
        joined(plan, micro_batch_tokens) if flat else [[cut] for cut in plan]
        for plan in spread(cuts, lengths, ranks, flat)
    ]
    most = max(map(len, plans))
    return [
        [_micro_batch(traces, rows) for rows in [*plan, *[[]] * (most - len(plan))]]
        for plan in plans
    ]


def families(traces: Sequence[Trace]) -> list[tuple[int, list[int]]]:
    """Return (shared prefix tokens, indices) for the traces with a common prompt, and for the rest without a prefix.

    A prefix ends one token before the first trained one: that token's score comes from the position before it.
    """
    prompts: defaultdict[bytes, list[int]] = defaultdict(list)
    for index, trace in enumerate(traces):
        first_trained = int(trace.mask_L.argmax())
        prompts[trace.ids_L[:first_trained].tobytes()].append(index)
    cuts, alone = [], []
    for places in prompts.values():
        prefix_tokens = int(traces[places[0]].mask_L.argmax()) - 1
        if (len(places) - 1) * prefix_tokens >= WORTH_SHARING_TOKENS:
            cuts.append((prefix_tokens, places))
        else:
            alone += places
    return [*cuts, (0, alone)]


def fill(
    lengths: Sequence[int],
    places: Iterable[int],
    micro_batch_tokens: int,
    prefix_tokens: int = 0,
    flat: bool = True,
) -> list[Cut]:
    """Split a family, longest trace first, into cuts of at most `micro_batch_tokens`."""
    cuts: list[Cut] = []
    # Neighbours in length share a rectangle, which keeps padding small. The place breaks ties: every rank computes this
    # plan for itself, and all have to get the same one.
    for index in sorted(places, key=lambda index: (-lengths[index], index)):
        if lengths[index] > micro_batch_tokens:
            raise ConfigError(
                f"a trace of {lengths[index]} tokens does not fit into a micro-batch of {micro_batch_tokens}: "
                "raise learner.micro_batch_tokens or lower model.max_context_tokens"
            )
        if cuts:
            longer = _cut((*cuts[-1].rows, index), prefix_tokens, lengths, flat)
            if longer.tokens <= micro_batch_tokens:
                cuts[-1] = longer
                continue
        cuts.append(_cut((index,), prefix_tokens, lengths, flat))
    return cuts


def _cut(rows: tuple[int, ...], prefix_tokens: int, lengths: Sequence[int], flat: bool) -> Cut:
    suffixes = [lengths[row] - prefix_tokens for row in rows]
    return Cut(
        rows,
        prefix_tokens,
        prefix_tokens + (sum(suffixes) if flat else len(suffixes) * max(suffixes)),
    )


def spread(
    cuts: Sequence[Cut], lengths: Sequence[int], ranks: int, flat: bool = True
) -> list[list[Cut]]:
    """Give every rank about the same number of tokens: the next heaviest goes to the rank with the least so far."""
    waiting, fair = list(cuts), sum(cut.tokens for cut in cuts) / ranks
    while ranks > 1:
        # No cut of several episodes may far outweigh what a rank should have. Each one halved reads its prompt twice.
        heavy = [
            cut
            for cut in waiting
            if len(cut.rows) > 1 and (cut.tokens > 1.25 * fair or len(waiting) < ranks)
        ]
        if not heavy:
            break
        heaviest = max(heavy, key=lambda cut: cut.tokens)
        waiting.remove(heaviest)
        half = len(heaviest.rows) // 2
        for rows in (heaviest.rows[:half], heaviest.rows[half:]):
            waiting.append(_cut(rows, heaviest.prefix_tokens, lengths, flat))
    plans: list[list[Cut]] = [[] for _ in range(ranks)]
    for cut in sorted(waiting, key=lambda cut: (-cut.tokens, cut.rows)):
        min(plans, key=lambda plan: sum(cut.tokens for cut in plan)).append(cut)
    return plans


def joined(plan: Sequence[Cut], micro_batch_tokens: int) -> list[list[Cut]]:
    """Put the cuts of one rank into as few micro-batches as first fit finds, the heaviest first."""
    micro_batches: list[list[Cut]] = []
    for cut in plan:
        room = micro_batch_tokens - cut.tokens
        taken = next(
            (
                candidate
                for candidate in micro_batches
                if sum(other.tokens for other in candidate) <= room
            ),
            None,
        )
        if taken is None:
            micro_batches.append([cut])
        else:
            taken.append(cut)
    return micro_batches


def _micro_batch(batch: Sequence[Trace], cuts: Sequence[Cut]) -> MicroBatch:
    """Lay cuts out one after the other; without any, make one token that nobody trains on."""
    pieces, segments, indices = (
        list[NDArray[np.int64]](),
        list[tuple[int, int, int, int]](),
        list[int](),
    )
    places, trained, end = list[NDArray[np.int64]](), list[NDArray[np.int64]](), 0
    for cut in cuts:
        shared, prefix = cut.prefix_tokens, (end, end + cut.prefix_tokens)
        if shared:
            pieces.append(batch[cut.rows[0]].ids_L[:shared].astype(np.int64))
            places.append(np.arange(shared))
            segments.append((*prefix, 0, 0))
            end += shared
        for row in cut.rows:
            ids_L, mask_L = batch[row].ids_L[shared:], batch[row].mask_L[shared:]
            pieces.append(ids_L.astype(np.int64))
            places.append(np.arange(shared, shared + len(ids_L)))
            segments.append((end, end + len(ids_L), *(prefix if shared else (0, 0))))
            trained.append(end + np.flatnonzero(mask_L))
            indices.append(row)
            end += len(ids_L)
    counts = [len(positions) for positions in trained]
    demo = np.array([batch[index].demo for index in indices], np.bool_)
    return MicroBatch(
        ids_T=np.concatenate(pieces) if pieces else np.array([PADDING_ID]),
        positions_T=np.concatenate(places) if places else np.zeros(1, np.int64),
        segments_S4=np.array(segments or [(0, 1, 0, 0)], np.int64),
        trained_N=np.concatenate([np.empty(0, np.int64), *trained]),
        episodes_N=np.repeat(np.arange(len(indices)), counts),
        demo_N=np.repeat(demo, counts),
        indices_B=tuple(indices),
    )
