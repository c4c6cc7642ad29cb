"""Traces become micro-batches: rectangles of similar rows within a token budget, spread evenly over the ranks.

Place in the flow: Batch → **micro-batches** → loss. Pure NumPy. Rows are padded on the right: under causal attention
no real token ever attends to padding, so no attention mask is needed and the fast causal kernel applies. Axes: B rows,
T positions, N the trained tokens of the rectangle in row order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horizonrl.common.errors import ConfigError
from horizonrl.learner.batch import Trace

PADDING_ID = 0
"""Any id serves: what stands in the padding reaches no trained token."""

Rows = tuple[int, ...]
"""The places of a micro-batch's traces in the batch, longest first."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One rectangle. `trained_N` are flat positions in `ids_BT`; the other arrays belong to these tokens."""

    ids_BT: NDArray[np.int64]
    trained_N: NDArray[np.int64]
    logprobs_N: NDArray[np.float32]
    advantages_N: NDArray[np.float32]
    versions_N: NDArray[np.int32]


def pack(traces: Sequence[Trace], ranks: int, micro_batch_tokens: int) -> list[list[MicroBatch]]:
    """Return each rank's micro-batches: every trace once, the same number of micro-batches for every rank.

    Deterministic. A rank with less to do gets empty micro-batches, since every rank must take part in the collectives
    of every forward and backward pass.
    """
    lengths = [len(trace.ids_L) for trace in traces]
    plans = spread(fill(lengths, micro_batch_tokens), lengths, ranks)
    return [[_rectangle([traces[place] for place in rows]) for rows in plan] for plan in plans]


def fill(lengths: Sequence[int], micro_batch_tokens: int) -> list[Rows]:
    """Cut the traces, longest first, into micro-batches of rows × longest <= `micro_batch_tokens`."""
    if max(lengths, default=0) > micro_batch_tokens:
        raise ConfigError(
            f"a trace of {max(lengths)} tokens does not fit into a micro-batch of {micro_batch_tokens}: "
            "raise learner.micro_batch_tokens or lower model.max_context_tokens"
        )
    filled: list[Rows] = []
    rows: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda place: (-lengths[place], place)):
        if rows and (len(rows) + 1) * lengths[rows[0]] > micro_batch_tokens:
            filled.append(tuple(rows))
            rows = []
        rows.append(place)
    return [*filled, tuple(rows)] if rows else filled


def spread(filled: Sequence[Rows], lengths: Sequence[int], ranks: int) -> list[list[Rows]]:
    """Give every rank the same number of micro-batches, each next heaviest to the rank with the least so far."""

    def tokens(rows: Rows) -> int:
        return len(rows) * lengths[rows[0]] if rows else 0

    waiting = list(filled)
    while len(waiting) % ranks:
        halved = max(range(len(waiting)), key=lambda at: (len(waiting[at]) > 1, tokens(waiting[at])))
        if len(waiting[halved]) < 2:
            waiting.append(())
            continue
        rows = waiting.pop(halved)
        waiting += [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    plans: list[list[Rows]] = [[] for _ in range(ranks)]
    for rows in sorted(waiting, key=lambda rows: (-tokens(rows), rows)):
        open_plans = [plan for plan in plans if len(plan) < len(waiting) // ranks]
        min(open_plans, key=lambda plan: sum(map(tokens, plan))).append(rows)
    return plans


def _rectangle(traces: Sequence[Trace]) -> MicroBatch:
    """Pad traces on the right; without traces, one position of padding."""
    longest = max((len(trace.ids_L) for trace in traces), default=1)
    ids_BT = np.full((max(len(traces), 1), longest), PADDING_ID, dtype=np.int64)
    mask_BT = np.zeros(ids_BT.shape, dtype=np.bool_)
    for row, trace in enumerate(traces):
        ids_BT[row, : len(trace.ids_L)] = trace.ids_L
        mask_BT[row, : len(trace.ids_L)] = trace.mask_L
    return MicroBatch(
        ids_BT=ids_BT,
        trained_N=np.flatnonzero(mask_BT),
        logprobs_N=_joined([trace.logprobs_L[trace.mask_L] for trace in traces], np.float32),
        advantages_N=_joined([trace.advantages_L[trace.mask_L] for trace in traces], np.float32),
        versions_N=_joined([trace.versions_L[trace.mask_L] for trace in traces], np.int32),
    )


def _joined(columns: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *columns])
