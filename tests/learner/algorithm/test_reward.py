"""Shaped rewards against plain formulas, and what they change in a batch."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horizonrl.broker.groups import Entry
from horizonrl.common.config.objective import EnvironmentReward
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import ConfigError
from horizonrl.common.types import Group, Kind, Phase, Task
from horizonrl.learner.algorithm.batch import Batch, traces_of
from horizonrl.learner.algorithm.reward import batch_rewards, overlong, shaped
from horizonrl.learner.intake.accounts import TicketAccounts
from horizonrl.learner.intake.collector import Collector, LearnerPosition, Rules
from tests.learner.sections import make_advantage
from tests.records import make_episode, make_group, make_ticket, make_turn

RULES = Rules(max_staleness=2, vocabulary=100, max_context_tokens=64)


def group_of(*episodes: list[float], env_id: str = "textcraft", kind: Kind = Kind.TRAIN) -> Group:
    """Return a group with an episode for each list of its turns' rewards."""
    made = tuple(
        make_episode(index, *(make_turn(reward=reward) for reward in rewards))
        for index, rewards in enumerate(episodes)
    )
    ticket = make_ticket(kind=kind, group_size=len(made)).model_copy(
        update={"task": Task(env_id=env_id, task_id="a")}
    )
    return make_group(rewards=[0.0]).model_copy(update={"ticket": ticket, "episodes": made})


def test_the_punishment_is_daposs() -> None:
    longest, cache = 512, 128
    for tokens in range(0, 700, 7):
        if tokens <= longest - cache:
            dapo = 0.0
        elif tokens <= longest:
            dapo = ((longest - cache) - tokens) / cache
        else:
            dapo = -1.0
        assert -overlong(tokens, longest - cache, longest) == pytest.approx(dapo)


def test_the_punishment_is_the_last_turns_for_the_whole_length() -> None:
    episode = make_episode(0, make_turn(range(6)), make_turn(range(4), reward=1.0))
    settings = EnvironmentReward(overlong=(8, 12, 2.0))
    assert shaped(episode, settings) == pytest.approx([0.0, 1.0 - 2.0 * 0.5])
    assert shaped(episode, EnvironmentReward()) == [0.0, 1.0]


def test_success_as_the_reward_forgets_partial_scores_and_losses() -> None:
    failed = make_episode(1, make_turn(reward=0.5), make_turn(reward=-1.5))
    solved = make_episode(0, make_turn(reward=0.5), make_turn(reward=0.25))
    settings = EnvironmentReward(kind="success")
    assert shaped(solved, settings) == [0.0, 1.0] and shaped(failed, settings) == [0.0, 0.0]


def test_groups_that_differ_in_partial_scores_alone_are_not_trained_where_success_is_the_reward() -> (
    None
):
    rules = replace(RULES, reward=EnvironmentReward(kind="success"))
    partial = group_of([-0.5], [-1.0])
    assert (
        collected(RULES, partial).pending.admitted
        and not collected(rules, partial).pending.admitted
    )
    solved, failed = collected(rules, group_of([0.5, 0.25], [-1.0])).batch(1).traces
    assert (solved.rewards_L.sum(), failed.rewards_L.sum()) == (1.0, 0.0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b"]),
            st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=3), min_size=2),
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from(["rloo", "gae"]),
)
def test_returns_are_scaled_within_their_environment(
    drawn: list[tuple[str, list[list[float]]]], kind: str
) -> None:
    groups = [group_of(*episodes, env_id=env_id) for env_id, episodes in drawn]
    advantage = make_advantage(kind=kind)
    rewards = batch_rewards(groups, EnvironmentReward(normalisation="environment"), advantage)
    for env_id in {env_id for env_id, _ in drawn}:
        before = np.array([sum(e) for env, episodes in drawn for e in episodes if env == env_id])
        after = [
            sum(e)
            for (env, _), episodes in zip(drawn, rewards, strict=True)
            for e in episodes
            if env == env_id
        ]
        mean = before.mean() if kind == "gae" else 0.0
        scale = before.std() + 1e-6 if before.std() > 1e-6 else 1.0
        assert after == pytest.approx((before - mean) / scale, rel=1e-6, abs=1e-3)


def test_every_return_from_a_turn_on_loses_the_mean() -> None:
    settings = EnvironmentReward(normalisation="environment")
    (rewards,) = batch_rewards(
        [group_of([1.0, 3.0], [0.0, 0.0])], settings, make_advantage(kind="gae")
    )
    assert np.cumsum(rewards[0][::-1])[::-1] == pytest.approx([(4 - 2) / 2, (3 - 2) / 2], rel=1e-5)


def test_equal_returns_leave_the_rewards_of_single_turns_as_small_as_they_were() -> None:
    settings, played = EnvironmentReward(normalisation="environment"), [-0.01] * 9 + [0.09]
    (rewards,) = batch_rewards([group_of(played, played)], settings, make_advantage(kind="gae"))
    assert rewards[0][:-1] == pytest.approx([-0.01] * 9) and sum(rewards[0]) == pytest.approx(0.0)


def test_demonstrations_keep_their_rewards_and_scale_nothing() -> None:
    groups = [group_of([9.0], kind=Kind.DEMO), group_of([1.0], [0.0])]
    settings = EnvironmentReward(normalisation="environment")
    rewards = batch_rewards(groups, settings, make_advantage(kind="reinforce_pp"))
    assert rewards[0] == [[9.0]] and rewards[1] == [
        [pytest.approx(1.0, rel=1e-5)],
        [pytest.approx(-1.0, rel=1e-5)],
    ]


def collected(rules: Rules, *groups: Group) -> Collector:
    collector = Collector(rules, TicketAccounts())
    for sequence, group in enumerate(groups, 1):
        numbered = group.model_copy(
            update={"ticket": group.ticket.model_copy(update={"number": sequence})}
        )
        collector.consume(
            Entry(sequence=sequence, record=numbered), LearnerPosition(version=1, phase=Phase.RL)
        )
    return collector


def test_what_a_run_does_not_use_leaves_the_digest_of_a_batch_as_it_was() -> None:
    """The value is that of an early release: a run's ledger can still be replayed."""
    (trace,) = traces_of(make_episode(0, make_turn(), make_turn(reward=1.0)))
    assert Batch((trace,), 0).digest() == "f61bf92649b4d71d0d4709ab09a1419e"
    stated = replace(trace, states=("a", "b"))
    assert Batch((stated,), 0).digest() != Batch((trace,), 0).digest()


def test_a_trace_has_the_states_of_its_turns_where_the_advantage_asks_for_them() -> None:
    turns = [
        make_turn(reward=reward).model_copy(update={"state": state})
        for state, reward in (("a", 0.0), ("b", 1.0))
    ]
    group = group_of([0.0], [0.0])
    group = group.model_copy(update={"episodes": (make_episode(0, *turns), group.episodes[1])})
    asking = replace(RULES, advantage=make_advantage(state_weight=1.0))
    assert [trace.states for trace in collected(asking, group).batch(1).traces] == [
        ("a", "b"),
        ("",),
    ]
    assert [trace.states for trace in collected(RULES, group).batch(1).traces] == [(), ()]


@pytest.mark.parametrize("kind", ["grpo", "gae", "vtrace", "reinforce_pp", "return"])
def test_a_curriculum_asks_whether_returns_differ_whatever_the_estimator_trains(kind: str) -> None:
    rules = replace(RULES, advantage=make_advantage(kind=kind))
    assert rules.differs(group_of([1.0], [0.0]))
    assert not rules.differs(group_of([1.0], [1.0]))
    assert not rules.differs(group_of([0.1, 0.2, 0.3], [0.3, 0.2, 0.1])), (
        "equal but for their last bits"
    )
    costly = replace(rules, reward=EnvironmentReward(overlong=(1, 1000, 1.0)))
    assert not costly.differs(group_of([1.0], [0.0, 1.0])), "both solve it, one in more turns"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["--reward.normalisation=environment"], "grpo does not depend on the scale"),
        (
            ["--advantage.kind=return", "--reward.normalisation=environment"],
            "would push an episode away without end, and reward.normalisation may",
        ),
        (["--reward.overlong=[20,10,1]"], "a larger one at which it is full"),
        (
            ["--advantage.kind=maxrl", "--reward.overlong=[1,2,0.1]"],
            "divides by the mean return, and reward.overlong may make a return negative",
        ),
        (
            ["--advantage.kind=maxrl", "--reference.kl=0.01", "--reference.estimator=k1_reward"],
            "reference.estimator k1_reward may make a return negative",
        ),
        (
            ["--advantage.kind=return", "--reward.overlong=[1,2,0.1]"],
            "and reward.overlong may make a return negative",
        ),
        (
            ["--advantage.kind=return", "--reference.kl=0.1", "--reference.estimator=k1_reward"],
            "without end, and reference.estimator k1_reward may make a return negative",
        ),
        (["--loss.shuffle=true"], "minibatches is 1, so there is no order"),
        (["--loss.kl_max=0.1"], "a batch makes a single update"),
        (
            ["--advantage.critic_warmup_steps=3"],
            r"no such key of advantage\.kind grpo: it belongs to gae, vtrace",
        ),
        (
            ["--advantage.credit=turn", "--advantage.state_weight=1"],
            "the returns of whole episodes",
        ),
    ],
)
def test_what_contradicts_itself_or_does_nothing_is_refused(keys: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig.load([], keys)
