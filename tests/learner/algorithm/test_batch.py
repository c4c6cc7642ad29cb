"""An episode becomes a trace position for position, and one of several branches a trace for each."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from horizonrl.common.types import Episode, StopReason, Turn, VersionSpan
from horizonrl.learner.algorithm.batch import Batch, Trace, by_episode, sampled_by, traces_of
from tests.learner.branching import branching_episode, branching_group, straightened
from tests.records import make_group

ids = st.lists(st.integers(0, 500), min_size=1, max_size=6).map(tuple)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    output = draw(ids)
    cut = draw(st.integers(1, len(output)))
    spans = [VersionSpan(version=3, lineage=0, tokens=cut)]
    if cut < len(output):
        spans.append(VersionSpan(version=4, lineage=0, tokens=len(output) - cut))
    logprobs = draw(
        st.lists(st.floats(-10, 0, width=32), min_size=len(output), max_size=len(output))
    )
    reward = draw(st.floats(-1, 1, width=32))
    answer = draw(ids)
    return Turn(
        output_ids=output,
        logprobs=tuple(logprobs),
        spans=tuple(spans),
        observation_ids=answer,
        reward=reward,
    )


episodes = st.builds(
    lambda prompt, turns: Episode(
        index=0, prompt_ids=prompt, turns=tuple(turns), stop=StopReason.TERMINATED
    ),
    prompt=ids,
    turns=st.lists(turns(), min_size=1, max_size=4),
)


seeds = st.integers(0, 1 << 32)


def trace_of(episode: Episode) -> Trace:
    (trace,) = traces_of(episode)
    return trace


@given(episodes)
def test_generated_tokens_keep_id_logprob_version_and_turn_in_order(episode: Episode) -> None:
    trace = trace_of(episode)
    trained = trace.mask_L
    assert tuple(trace.ids_L[trained]) == sum((turn.output_ids for turn in episode.turns), ())
    assert np.array_equal(
        trace.logprobs_L[trained],
        np.array(sum((turn.logprobs for turn in episode.turns), ()), dtype=np.float32),
    )
    versions = [
        span.version for turn in episode.turns for span in turn.spans for _ in range(span.tokens)
    ]
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
    turn = Turn(
        output_ids=(5, 6),
        logprobs=(-1.0, -1.0),
        spans=(VersionSpan(version=0, lineage=0, tokens=2),),
    )
    episode = Episode(index=0, prompt_ids=(1,), turns=(turn,), stop=StopReason.HORIZON)
    assert Batch((trace_of(episode), trace_of(episode)), version=0).trained_tokens == 4


@given(seeds)
def test_each_branch_with_a_trained_turn_is_a_trace_of_its_ids(seed: int) -> None:
    episode = branching_episode(np.random.default_rng(seed))
    kept = [branch for branch in episode.by_branch() if any(turn.trained for _, turn in branch[1])]
    for trace, (prompt, turns) in zip(traces_of(episode), kept, strict=True):
        read = prompt + sum((turn.output_ids + turn.observation_ids for _, turn in turns), ())
        assert tuple(trace.ids_L) == read
        assert not trace.mask_L[: len(prompt)].any()


@given(seeds)
def test_each_trained_token_is_trained_once_with_its_own_turn_logprob_and_version(
    seed: int,
) -> None:
    episode = branching_episode(np.random.default_rng(seed))
    traces = traces_of(episode)
    for place, turn in enumerate(episode.turns):
        holders = [trace for trace in traces if (trace.turns_L == place).any()]
        assert len(holders) == turn.trained
        for trace in holders:
            own_L = trace.turns_L == place
            assert tuple(trace.ids_L[own_L]) == turn.output_ids
            assert np.array_equal(trace.logprobs_L[own_L], np.array(turn.logprobs, np.float32))
            assert trace.versions_L[own_L].tolist() == [
                s.version for s in turn.spans for _ in range(s.tokens)
            ]
            assert trace.rewards_L[own_L].tolist() == [0.0] * (len(turn.output_ids) - 1) + [
                turn.reward
            ]
    assert sum(trace.trained_tokens for trace in traces) == sum(
        len(t.output_ids) for t in episode.turns if t.trained
    )
    for trace, tokens in zip(traces, sampled_by(episode), strict=True):
        assert tokens.total() == trace.trained_tokens
        assert (
            not trace.logprobs_L[~trace.mask_L].any() and not trace.rewards_L[~trace.mask_L].any()
        )
        assert (trace.versions_L[~trace.mask_L] == -1).all()


@given(seeds)
def test_each_trace_of_an_episode_knows_the_rewards_of_all_its_turns(seed: int) -> None:
    episode = branching_episode(np.random.default_rng(seed), index=3)
    for trace in traces_of(episode):
        assert trace.episode == (None if episode.linear else 3)
        assert trace.rewards_K.tolist() == (
            [] if episode.linear else [turn.reward for turn in episode.turns]
        )


@given(seeds)
def test_the_traces_of_an_episode_are_found_again_in_their_batch(seed: int) -> None:
    made = [branching_group(seed), branching_group(seed + 1)]
    traces = [
        trace for g, group in enumerate(made) for e in group.episodes for trace in traces_of(e, g)
    ]
    sizes = [len(traces_of(e)) for group in made for e in group.episodes]
    assert by_episode(traces) == [
        list(range(end - size, end)) for size, end in zip(sizes, np.cumsum(sizes), strict=True)
    ]


def test_a_batch_of_linear_episodes_has_the_digest_that_it_always_had() -> None:
    """It is in the ledger of every run: a replay compares it."""
    traces = [trace_of_group for n in range(3) for trace_of_group in traces_in(n)]
    assert Batch(tuple(traces), 3).digest() == "28b56f92a4bfda5daff05eee84343a76"


def traces_in(number: int) -> list[Trace]:
    group = make_group(number, (1.0, 0.5, 0.0))
    return [trace for episode in group.episodes for trace in traces_of(episode, number)]


def test_a_batch_with_branches_has_a_digest_of_its_own() -> None:
    """What the traces alone do not hold, the rewards of turns without loss, is part of it."""
    rng = np.random.default_rng(5)
    episode = branching_episode(rng, fork=1.0, trained=0.5)
    assert not all(turn.trained for turn in episode.turns)
    richer = [
        turn if turn.trained else turn.model_copy(update={"reward": 9.0}) for turn in episode.turns
    ]
    digests = {
        Batch(tuple(traces_of(each)), 0).digest()
        for each in (
            episode,
            episode.model_copy(update={"turns": tuple(richer)}),
            straightened(episode),
        )
    }
    assert len(digests) == 3
