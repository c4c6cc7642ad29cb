from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horizonrl.common.errors import ConfigError
from horizonrl.learner.packing import MicroBatch, fill, pack, spread
from tests.learner.traces import make_batch, make_trace

lengths_of = st.lists(st.integers(1, 100), max_size=40)
budgets = st.integers(100, 1000)
rank_counts = st.integers(1, 5)


@given(lengths_of, budgets, rank_counts)
def test_every_trace_is_in_exactly_one_micro_batch(lengths: list[int], budget: int, ranks: int) -> None:
    plans = spread(fill(lengths, budget), lengths, ranks)
    assert sorted(place for plan in plans for rows in plan for place in rows) == list(range(len(lengths)))


@given(lengths_of, budgets, rank_counts)
def test_no_micro_batch_exceeds_the_budget(lengths: list[int], budget: int, ranks: int) -> None:
    plans = spread(fill(lengths, budget), lengths, ranks)
    assert all(len(rows) * max(lengths[place] for place in rows) <= budget for plan in plans for rows in plan if rows)


@given(lengths_of, budgets, rank_counts)
def test_every_rank_has_the_same_number_of_micro_batches(lengths: list[int], budget: int, ranks: int) -> None:
    assert len({len(plan) for plan in spread(fill(lengths, budget), lengths, ranks)}) == 1


@given(st.lists(st.integers(50, 100), min_size=8, max_size=40), budgets)
def test_two_ranks_get_about_the_same_work(lengths: list[int], budget: int) -> None:
    work = [
        sum(len(rows) * lengths[rows[0]] for rows in plan if rows)
        for plan in spread(fill(lengths, budget), lengths, ranks=2)
    ]
    assert max(work) - min(work) <= budget


def test_one_full_micro_batch_is_halved_for_two_ranks() -> None:
    assert spread(fill([10, 9, 8, 7], 40), [10, 9, 8, 7], ranks=2) == [[(0, 1)], [(2, 3)]]


def test_a_rank_without_traces_gets_a_micro_batch_without_loss() -> None:
    batch = make_batch(traces=1)
    first, second = pack(batch.traces, 2, 100)
    assert len(first) == len(second) == 1
    assert second[0].ids_BT.shape == (1, 1) and second[0].trained_N.size == 0


def test_packing_is_deterministic() -> None:
    first, second = (pack(make_batch(seed=3).traces, 2, 128) for _ in range(2))
    for mine, theirs in zip(chain(*first), chain(*second), strict=True):
        assert all(np.array_equal(getattr(mine, name), getattr(theirs, name)) for name in MicroBatch.__slots__)


@given(st.integers(0, 1000), budgets, st.integers(1, 3))
def test_trained_tokens_keep_what_was_recorded_of_them(seed: int, budget: int, ranks: int) -> None:
    batch = make_batch(seed)
    recorded = sorted(
        (int(t.ids_L[at]), float(t.logprobs_L[at]), float(t.advantages_L[at]), int(t.versions_L[at]))
        for t in batch.traces
        for at in np.flatnonzero(t.mask_L)
    )
    packed = sorted(
        (int(token), float(logprob), float(advantage), int(version))
        for plan in pack(batch.traces, ranks, budget)
        for mb in plan
        for token, logprob, advantage, version in zip(
            mb.ids_BT.flatten()[mb.trained_N], mb.logprobs_N, mb.advantages_N, mb.versions_N, strict=True
        )
    )
    assert packed == recorded


def test_rows_are_of_similar_length() -> None:
    rng = np.random.default_rng(0)
    traces = [make_trace(rng, tokens) for tokens in [10, 100] * 8]
    assert {mb.ids_BT.shape for mb in pack(traces, 1, 800)[0]} == {(8, 100), (8, 10)}


def test_a_trace_over_the_budget_is_refused_with_the_cure() -> None:
    with pytest.raises(ConfigError, match=r"raise learner\.micro_batch_tokens"):
        fill([10, 200], 100)
