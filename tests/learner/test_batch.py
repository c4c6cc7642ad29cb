"""An episode becomes a trace position for position."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from horizonrl.common.types import Episode, StopReason, Turn, VersionSpan
from horizonrl.learner.batch import Batch, trace_of

ids = st.lists(st.integers(0, 500), min_size=1, max_size=6).map(tuple)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    output = draw(ids)
    cut = draw(st.integers(1, len(output)))
    spans = [VersionSpan(version=3, lineage=0, tokens=cut)]
    if cut < len(output):
        spans.append(VersionSpan(version=4, lineage=0, tokens=len(output) - cut))
    logprobs = draw(st.lists(st.floats(-10, 0, width=32), min_size=len(output), max_size=len(output)))
    return Turn(output_ids=output, logprobs=tuple(logprobs), spans=tuple(spans), observation_ids=draw(ids))


episodes = st.builds(
    lambda prompt, turns: Episode(index=0, prompt_ids=prompt, turns=tuple(turns), stop=StopReason.TERMINATED),
    prompt=ids,
    turns=st.lists(turns(), min_size=1, max_size=4),
)


@given(episodes, st.floats(-5, 5, width=32))
def test_generated_tokens_keep_id_logprob_and_version_in_order(episode: Episode, advantage: float) -> None:
    trace = trace_of(episode, advantage)
    trained = trace.mask_L
    assert tuple(trace.ids_L[trained]) == sum((turn.output_ids for turn in episode.turns), ())
    assert np.array_equal(
        trace.logprobs_L[trained],
        np.array(sum((turn.logprobs for turn in episode.turns), ()), dtype=np.float32),
    )
    versions = [span.version for turn in episode.turns for span in turn.spans for _ in range(span.tokens)]
    assert trace.versions_L[trained].tolist() == versions
    assert (trace.advantages_L[trained] == np.float32(advantage)).all()
    assert trace.trained_tokens == episode.generated_tokens


@given(episodes)
def test_the_ids_are_what_the_policy_read_and_wrote(episode: Episode) -> None:
    read = episode.prompt_ids
    for turn in episode.turns[:-1]:
        read += turn.output_ids + turn.observation_ids
    assert tuple(trace_of(episode, 1.0).ids_L) == read + episode.turns[-1].output_ids


@given(episodes)
def test_what_was_not_generated_carries_nothing(episode: Episode) -> None:
    trace = trace_of(episode, 1.0)
    assert not trace.mask_L[: len(episode.prompt_ids)].any()
    assert not trace.logprobs_L[~trace.mask_L].any() and not trace.advantages_L[~trace.mask_L].any()
    assert (trace.versions_L[~trace.mask_L] == -1).all()


def test_a_batch_counts_its_trained_tokens() -> None:
    turn = Turn(output_ids=(5, 6), logprobs=(-1.0, -1.0), spans=(VersionSpan(version=0, lineage=0, tokens=2),))
    episode = Episode(index=0, prompt_ids=(1,), turns=(turn,), stop=StopReason.HORIZON)
    assert Batch((trace_of(episode, 1.0), trace_of(episode, -1.0)), version=0).trained_tokens == 4
