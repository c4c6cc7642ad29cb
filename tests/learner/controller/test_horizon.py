import itertools
import json
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.config.training import FixedHorizon, StagedHorizon
from horizonrl.common.state import HorizonGrowth
from horizonrl.common.types import Group, Kind, Provenance, StopReason, Task
from horizonrl.learner.controller.horizon import (
    AdaptiveRule,
    Histories,
    History,
    HorizonOutcome,
    decide,
    horizon_turns,
    observe,
    scheduled_turns,
    shuffled_turns,
)
from tests.records import make_episode, make_ticket, make_turn

horizons = st.lists(st.integers(1, 100), min_size=1, max_size=5).map(
    lambda turns: tuple(sorted(turns))
)


@pytest.mark.parametrize(
    ("step", "turns"),
    [(0, 10), (99, 10), (100, 20), (101, 20), (199, 20), (200, 30), (299, 30), (100_000, 30)],
)
def test_staged_moves_to_the_next_horizon_after_every_stage(step: int, turns: int) -> None:
    assert horizon_turns(StagedHorizon(), (10, 20, 30), step) == turns


def test_fixed_is_the_last_horizon() -> None:
    assert {horizon_turns(FixedHorizon(), (10, 30), step) for step in range(50)} == {30}


def test_linear_moves_in_single_turns_between_the_first_and_the_last() -> None:
    turns = [
        horizon_turns(StagedHorizon(kind="linear", steps_per_stage=10), (10, 20), step)
        for step in range(12)
    ]
    assert turns == [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 20]
    assert [
        horizon_turns(StagedHorizon(kind="linear", steps_per_stage=100), (10, 110), step)
        for step in range(101)
    ] == list(range(10, 111))


@given(horizons, st.integers(1, 50), st.sampled_from(("fixed", "staged", "linear")))
def test_a_schedule_never_shrinks_and_stays_within_its_horizons(
    turns: tuple[int, ...], per_stage: int, kind: str
) -> None:
    schedule = (
        FixedHorizon() if kind == "fixed" else StagedHorizon(kind=kind, steps_per_stage=per_stage)
    )  # type: ignore[arg-type]
    seen = [horizon_turns(schedule, turns, step) for step in range(per_stage * len(turns) + 2)]
    assert seen == sorted(seen)
    assert turns[0] <= seen[0]
    assert seen[-1] == turns[-1]


@given(horizons, st.integers(1, 9))
def test_reversed_is_staged_from_the_last_to_the_first(
    turns: tuple[int, ...], per_stage: int
) -> None:
    steps = range(per_stage * len(turns))
    staged, reverse = (
        [
            horizon_turns(StagedHorizon(kind=kind, steps_per_stage=per_stage), turns, step)
            for step in steps
        ]
        for kind in ("staged", "reversed")
    )  # type: ignore[arg-type]
    assert reverse == staged[::-1]


@given(horizons, st.integers(1, 9), st.integers(1, 60), st.integers(0, 99))
def test_shuffled_has_the_horizons_of_staged_in_their_shares(
    turns: tuple[int, ...], per_stage: int, rl_steps: int, seed: int
) -> None:
    staged = Counter(
        horizon_turns(StagedHorizon(steps_per_stage=per_stage), turns, step)
        for step in range(rl_steps)
    )
    blocks = 6
    drawn = [
        shuffled_turns(turns, per_stage, rl_steps, number, f"{seed}/a")
        for number in range(rl_steps * blocks)
    ]
    assert Counter(drawn) == {horizon: count * blocks for horizon, count in staged.items()}
    assert drawn == [
        shuffled_turns(turns, per_stage, rl_steps, n, f"{seed}/a") for n in range(rl_steps * blocks)
    ]


def test_a_shuffled_ticket_has_a_horizon_of_its_own_that_follows_from_its_number() -> None:
    settings = [
        "--horizon.kind=shuffled",
        "--horizon.horizons=[2,4,8]",
        "--horizon.steps_per_stage=10",
    ]
    config = RunConfig.load([], [*settings, "--rl.steps=30"])
    turns = [
        scheduled_turns(config, config.run.seed, "textcraft", step, number)
        for number, step in enumerate(range(30))
    ]
    assert set(turns) == {2, 4, 8} and turns != sorted(turns)
    assert turns == [
        scheduled_turns(config, config.run.seed, "textcraft", 0, number) for number in range(30)
    ]


# ---- adaptive

RULE = AdaptiveRule(horizons=(4, 6, 9), window_steps=4, truncated_above=0.2)
SIZE = 4


def played(
    successes: int, cut: int, horizon: int = 4, env: str = "textcraft", kind: Kind = Kind.TRAIN
) -> Group:
    """Return a group of SIZE episodes: the first `successes` solved, the last `cut` ended by the horizon."""
    ticket = make_ticket(kind=kind, group_size=SIZE, horizon_turns=horizon)
    return Group(
        ticket=ticket.model_copy(update={"task": Task(env_id=env, task_id="t")}),
        episodes=tuple(
            make_episode(
                index,
                make_turn(reward=float(index < successes)),
                stop=StopReason.HORIZON if index >= SIZE - cut else StopReason.TERMINATED,
            )
            for index in range(SIZE)
        ),
        provenance=Provenance(actor="test"),
    )


def grown(steps: Sequence[Sequence[Group]], rule: AdaptiveRule = RULE) -> list[tuple[int, int]]:
    """Return the growths as (RL step, to turns)."""
    history, found = History(turns=rule.horizons[0]), []
    for number, groups in enumerate(steps, start=1):
        before, history = history, observe(history, "textcraft", groups, rule, number)
        if history.growth is not None and history.growth != before.growth:
            found.append((history.growth.phase_step, history.growth.to_turns))
    return found


def test_a_horizon_grows_once_a_full_window_cuts_many_episodes_without_gaining() -> None:
    assert grown([[played(2, cut=2)]] * 3) == []
    assert grown([[played(2, cut=2)]] * 4) == [(4, 6)]


def test_a_horizon_stays_where_few_episodes_are_cut() -> None:
    assert grown([[played(3, cut=0), played(3, cut=0), played(3, cut=1)]] * 9) == []


def test_a_horizon_waits_while_success_still_rises_and_grows_when_it_no_longer_does() -> None:
    rising = [[played(successes, cut=2)] * 3 for successes in (0, 0, 1, 1, 2, 2)]
    assert grown(rising) == []
    assert grown([*rising, *[[played(2, cut=2)] * 3] * 2]) == [(8, 6)]


def test_a_rise_within_one_standard_error_is_none() -> None:
    noisy = [HorizonOutcome(4, 0, 4), HorizonOutcome(4, 4, 0)]
    assert (
        decide([noisy, [*noisy, HorizonOutcome(4, 4, 4)]], 4, AdaptiveRule((4, 6), 2, 0.2))
        is not None
    )
    sure = [HorizonOutcome(4, 2, 2)] * 3
    assert decide([sure, [HorizonOutcome(4, 3, 2)] * 3], 4, AdaptiveRule((4, 6), 2, 0.2)) is None


def test_groups_of_the_shorter_horizon_that_are_still_under_way_say_nothing_about_the_longer() -> (
    None
):
    late, new = [played(2, cut=4)], [played(2, cut=4, horizon=6)]
    assert grown([*[late] * 9]) == [(4, 6)]
    assert grown([*[late] * 7, *[late + new] * 4]) == [(4, 6), (11, 9)]


def test_broken_episodes_demonstrations_and_evaluations_are_no_evidence() -> None:
    broken = played(0, cut=4).model_copy(
        update={
            "episodes": tuple(
                make_episode(index, stop=StopReason.ENV_ERROR) for index in range(SIZE)
            )
        }
    )
    assert grown([[broken]] * 9) == []
    histories = Histories({"textcraft": RULE})
    for step in range(1, 10):
        histories.observe(
            [played(0, cut=4, kind=Kind.DEMO), played(0, cut=4, kind=Kind.EVAL)], step
        )
    assert histories.growths() == ()


def test_a_run_that_had_a_longer_horizon_before_goes_on_from_it() -> None:
    assert grown([[played(2, cut=2, horizon=6)]] * 4) == [(4, 9)]


def test_a_growth_says_what_was_measured() -> None:
    history = History(turns=4)
    for step in range(1, 5):
        history = observe(history, "textcraft", [played(1, cut=2), played(2, cut=1)], RULE, step)
    assert history.growth == HorizonGrowth(
        env_id="textcraft",
        phase_step=4,
        from_turns=4,
        to_turns=6,
        reason="38% of 32 episodes cut in 4 steps, success 37.5% then 37.5% (standard error 10.2%)",
    )


def test_each_environment_of_a_mixed_run_has_its_own_horizon() -> None:
    histories = Histories({"textcraft": RULE, "babyai": AdaptiveRule((8, 16), 4, 0.2)})
    for step in range(1, 5):
        histories.observe([played(2, cut=4), played(2, cut=0, horizon=8, env="babyai")], step)
    assert (histories.turns("textcraft"), histories.turns("babyai")) == (6, 8)
    assert [growth.env_id for growth in histories.growths()] == ["textcraft"]


rules = st.builds(
    AdaptiveRule,
    horizons=st.lists(st.integers(1, 30), min_size=1, max_size=4, unique=True).map(tuple),
    window_steps=st.integers(2, 4),
    truncated_above=st.sampled_from((0.0, 0.2, 0.9)),
)
steps_of_outcomes = st.lists(
    st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE), st.integers(0, 2)), max_size=3),
    max_size=25,
)


Run = tuple[AdaptiveRule, list[list[Group]], list[str]]


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Draw a rule, the groups of each step, and the checkpoint before the first step and after each one.

    The tickets follow the horizon; those of some groups are behind it by a growth or two.
    """
    rule, outcomes = draw(rules), draw(steps_of_outcomes)
    histories, turns = Histories({"textcraft": rule}), [rule.horizons[0]]
    steps: list[list[Group]] = []
    checkpoints = [json.dumps(histories.dump())]
    for number, step in enumerate(outcomes, start=1):
        steps.append(
            [
                played(won, cut, horizon=turns[-1 - min(late, len(turns) - 1)])
                for won, cut, late in step
            ]
        )
        histories.observe(steps[-1], number)
        turns.append(histories.turns("textcraft"))
        checkpoints.append(json.dumps(histories.dump()))
    return rule, steps, checkpoints


def turns_of(checkpoint: str) -> int:
    return int(json.loads(checkpoint)["textcraft"]["turns"])


@given(runs())
def test_an_adaptive_horizon_never_shrinks_hurries_or_leaves_its_rungs(run: Run) -> None:
    rule, _, checkpoints = run
    turns = [turns_of(checkpoint) for checkpoint in checkpoints]
    assert turns == sorted(turns)
    growths = [step for step in range(1, len(turns)) if turns[step] > turns[step - 1]]
    assert all(
        later - earlier >= rule.window_steps for earlier, later in itertools.pairwise([0, *growths])
    )
    rungs = sorted(horizon for horizon in rule.horizons if horizon >= turns[0])
    assert [turns[0], *(turns[step] for step in growths)] == rungs[: len(growths) + 1]


@given(runs(), st.data())
def test_a_run_resumed_from_any_checkpoint_decides_the_same_again(
    run: Run, data: st.DataObject
) -> None:
    rule, steps, checkpoints = run
    start = data.draw(st.integers(0, len(steps)))
    histories = Histories.restore({"textcraft": rule}, json.loads(checkpoints[start]))
    for number in range(start + 1, len(steps) + 1):
        histories.observe(steps[number - 1], number)
        assert json.dumps(histories.dump()) == checkpoints[number]
