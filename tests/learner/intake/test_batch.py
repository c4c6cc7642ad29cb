"""An episode becomes a trace position for position."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from horizonrl.common.types import Episode, StopReason, Turn, VersionSpan
from horizonrl.learner.intake.batch import Batch, trace_of

ids = st.lists(st.integers(0, 500), min_size=1, max_size=6).map(tuple)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    output = draw(ids)
    cut = draw(st.integers(1, len(output)))
    spans = [VersionSpan(version=3, lineage=0, tokens=cut)]
    if cut < len(output):
        spans.append(VersionSpan(version=4, lineage=0, tokens=len(output) - cut))
    logprobs = draw(st.lists(st.floats(-10, 0, width=32), min_size=len(output), max_size=len(output)))
    reward = draw(st.floats(-1, 1, width=32))
    answer = draw(ids)
    return Turn(output_ids=output, logprobs=tuple(logprobs), spans=tuple(spans), observation_ids=answer, reward=reward)


episodes = st.builds(
    lambda prompt, turns: Episode(index=0, prompt_ids=prompt, turns=tuple(turns), stop=StopReason.TERMINATED),
    prompt=ids,
    turns=st.lists(turns(), min_size=1, max_size=4),
)


@given(episodes)
def test_generated_tokens_keep_id_logprob_version_and_turn_in_order(episode: Episode) -> None:
    trace = trace_of(episode)
    trained = trace.mask_L
    assert tuple(trace.ids_L[trained]) == sum((turn.output_ids for turn in episode.turns), ())
    assert np.array_equal(
        trace.logprobs_L[trained],
        np.array(sum((turn.logprobs for turn in episode.turns), ()), dtype=np.float32),
    )
    versions = [span.version for turn in episode.turns for span in turn.spans for _ in range(span.tokens)]
    assert trace.versions_L[trained].tolist() == versions
    turns = [place for place, turn in enumerate(episode.turns) for _ in turn.output_ids]
    assert trace.turns_L[trained].tolist() == turns
    assert trace.trained_tokens == episode.generated_tokens


@given(episodes)
def test_the_ids_are_what_the_policy_read_and_wrote(episode: Episode) -> None:
    read = episode.prompt_ids
    for turn in episode.turns[:-1]:
        read += turn.output_ids + turn.observation_ids
    assert tuple(trace_of(episode).ids_L) == read + episode.turns[-1].output_ids


@given(episodes)
def test_what_was_not_generated_carries_nothing(episode: Episode) -> None:
    trace = trace_of(episode)
    assert not trace.mask_L[: len(episode.prompt_ids)].any()
    assert not trace.logprobs_L[~trace.mask_L].any() and not trace.rewards_L[~trace.mask_L].any()
    assert (trace.versions_L[~trace.mask_L] == -1).all()


@given(episodes)
def test_a_turns_reward_stands_at_its_last_generated_token(episode: Episode) -> None:
    trace = trace_of(episode)
    for place, turn in enumerate(episode.turns):
        rewards = trace.rewards_L[trace.turns_L == place].tolist()
        assert rewards == [0.0] * (len(rewards) - 1) + [turn.reward]


def test_a_batch_counts_its_trained_tokens() -> None:
    turn = Turn(output_ids=(5, 6), logprobs=(-1.0, -1.0), spans=(VersionSpan(version=0, lineage=0, tokens=2),))
    episode = Episode(index=0, prompt_ids=(1,), turns=(turn,), stop=StopReason.HORIZON)
    assert Batch((trace_of(episode), trace_of(episode)), version=0).trained_tokens == 4
