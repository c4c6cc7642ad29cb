from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horizonrl.common.errors import ConfigError
from horizonrl.learner.engine.model.packing import MicroBatch, fill, pack, spread
from tests.learner.traces import make_batch, make_groups, make_trace

lengths_of = st.lists(st.integers(1, 100), max_size=40)
budgets = st.integers(100, 1000)
rank_counts = st.integers(1, 5)


@given(lengths_of, budgets, rank_counts)
def test_every_trace_is_in_exactly_one_micro_batch(
    lengths: list[int], budget: int, ranks: int
) -> None:
    plans = spread(fill(lengths, range(len(lengths)), budget), lengths, ranks)
    assert sorted(place for plan in plans for cut in plan for place in cut.rows) == list(
        range(len(lengths))
    )


@given(lengths_of, budgets, rank_counts)
def test_no_rectangle_exceeds_the_budget(lengths: list[int], budget: int, ranks: int) -> None:
    plans = spread(
        fill(lengths, range(len(lengths)), budget, flat=False), lengths, ranks, flat=False
    )
    for cut in (cut for plan in plans for cut in plan):
        assert len(cut.rows) * max(lengths[place] for place in cut.rows) == cut.tokens <= budget


@given(st.integers(0, 1000), budgets, rank_counts, st.booleans())
def test_every_rank_has_the_same_number_of_micro_batches(
    seed: int, budget: int, ranks: int, flat: bool
) -> None:
    assert len({len(plan) for plan in pack(make_batch(seed).traces, ranks, budget, flat)}) == 1


@given(st.lists(st.integers(50, 100), min_size=8, max_size=40), budgets)
def test_two_ranks_get_about_the_same_work(lengths: list[int], budget: int) -> None:
    plans = spread(fill(lengths, range(len(lengths)), budget), lengths, ranks=2)
    work = [sum(cut.tokens for cut in plan) for plan in plans]
    assert max(work) - min(work) <= budget


def test_one_full_micro_batch_is_halved_for_two_ranks() -> None:
    lengths = [10, 9, 8, 7]
    plans = spread(fill(lengths, range(4), 40), lengths, ranks=2)
    assert [[cut.rows for cut in plan] for plan in plans] == [[(0, 1)], [(2, 3)]]


def test_a_rank_without_traces_gets_a_micro_batch_without_loss() -> None:
    batch = make_batch(traces=1)
    first, second = pack(batch.traces, 2, 100)
    assert len(first) == len(second) == 1
    assert second[0].ids_T.shape == (1,) and second[0].trained_N.size == 0


def test_packing_is_deterministic() -> None:
    first, second = (pack(make_batch(seed=3).traces, 2, 128) for _ in range(2))
    for mine, theirs in zip(chain(*first), chain(*second), strict=True):
        assert all(
            np.array_equal(getattr(mine, name), getattr(theirs, name))
            for name in MicroBatch.__slots__
        )


@given(st.integers(0, 1000), budgets, st.integers(1, 3), st.booleans())
def test_each_trained_token_is_of_the_trace_that_it_names(
    seed: int, budget: int, ranks: int, flat: bool
) -> None:
    traces = make_batch(seed).traces
    recorded = [(place, trace.ids_L[trace.mask_L].tolist()) for place, trace in enumerate(traces)]
    packed = [
        (place, mb.ids_T[mb.trained_N[mb.episodes_N == row]].tolist())
        for mb in chain(*pack(traces, ranks, budget, flat))
        for row, place in enumerate(mb.indices_B)
    ]
    assert sorted(packed) == recorded


def test_the_rows_of_a_rectangle_are_of_similar_length() -> None:
    rng = np.random.default_rng(0)
    traces = [make_trace(rng, tokens) for tokens in [10, 100] * 8]
    longest = [
        np.diff(mb.segments_S4[:, :2]).flatten().tolist()
        for mb in pack(traces, 1, 800, flat=False)[0]
    ]
    assert sorted(longest) == [[10] * 8, [100] * 8]


def test_episodes_of_several_groups_fill_one_micro_batch() -> None:
    traces = make_groups(0, groups=4, group_size=2, prompt=60).traces
    (micro_batch,) = pack(traces, 1, 2000)[0]
    assert len(micro_batch.ids_T) == sum(len(trace.ids_L) for trace in traces) - 4 * 59


def test_a_trace_over_the_budget_is_refused_with_the_cure() -> None:
    with pytest.raises(ConfigError, match=r"raise learner\.micro_batch_tokens"):
        fill([10, 200], range(2), 100)


@given(st.integers(0, 1000), st.integers(300, 1000), st.integers(1, 3))
def test_a_shared_prompt_stands_once_before_its_episodes(
    seed: int, budget: int, ranks: int
) -> None:
    traces = make_groups(seed, groups=3, group_size=4, prompt=100).traces
    micro_batches = list(chain(*pack(traces, ranks, budget)))
    rows = [tuple(row) for mb in micro_batches for row in whole_rows(mb)]
    assert sorted(rows) == sorted(tuple(trace.ids_L.tolist()) for trace in traces)
    assert any([0, 99, 0, 0] in mb.segments_S4.tolist() for mb in micro_batches)
    assert all(mb.ids_T.size <= budget for mb in micro_batches)
    assert sum(mb.trained_N.size for mb in micro_batches) == sum(
        trace.trained_tokens for trace in traces
    )


def whole_rows(micro_batch: MicroBatch) -> list[list[int]]:
    """Put prefixes and segments together again; check the positions."""
    rows = []
    for start, end, prefix_start, prefix_end in micro_batch.segments_S4.tolist():
        if not any(start <= place < end for place in micro_batch.trained_N):
            continue  # a prefix
        row = [*range(prefix_start, prefix_end), *range(start, end)]
        assert micro_batch.positions_T[row].tolist() == list(range(len(row)))
        rows.append(micro_batch.ids_T[row].tolist())
    return rows


def test_no_segment_asks_for_its_first_token() -> None:
    for mb in chain(*pack(make_groups(0, groups=3, group_size=4, prompt=100).traces, 2, 500)):
        assert not set(mb.trained_N.tolist()) & set(mb.segments_S4[:, 0].tolist())


def test_a_rectangle_has_no_prefix() -> None:
    traces = make_groups(0, groups=2, group_size=4, prompt=100).traces
    assert not any(mb.segments_S4[:, 2:].any() for mb in chain(*pack(traces, 1, 1000, flat=False)))


def test_short_prompts_are_not_worth_sharing() -> None:
    traces = make_groups(0, groups=4, group_size=2, prompt=20).traces
    assert not any(mb.segments_S4[:, 2:].any() for mb in pack(traces, 1, 2000)[0])
