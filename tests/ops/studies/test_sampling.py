"""Rules for sampling groups: their chances against all orders of a small group, and their costs on known groups."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horizonrl.common.errors import ConfigError
from horizonrl.ops.studies.sampling import (
    PlayedGroup,
    all_equal,
    as_played,
    costs,
    read_groups,
    run,
    screen,
    smaller,
    stop,
)


def group(returns: Sequence[float], turns: Sequence[int] | None = None) -> PlayedGroup:
    return PlayedGroup(tuple(returns), tuple(turns or [3] * len(returns)))


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=7), st.data())
def test_the_chance_of_equal_returns_is_that_over_all_subsets(
    returns: list[float], data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, len(returns)))
    subsets = list(itertools.combinations(returns, count))
    expected = sum(len(set(subset)) == 1 for subset in subsets) / len(subsets)
    assert all_equal(returns, count) == pytest.approx(expected)


def test_a_screen_of_half_saves_half_of_a_uniform_group() -> None:
    assert screen(2)(group([0, 0, 0, 0])).steps == 6
    # Of the six pairs of one success and three failures, three differ.
    found = screen(2)(group([1, 0, 0, 0]))
    assert (found.informative, found.steps, found.episodes) == pytest.approx((0.5, 9, 2))


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.integers(1, 9)), min_size=3, max_size=7),
    st.data(),
)
def test_the_steps_of_a_screen_are_those_over_all_subsets(
    played: list[tuple[float, int]], data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, len(played) - 1))
    every = sum(turns for _, turns in played)
    spent = [
        every if len({value for value, _ in first}) > 1 else sum(turns for _, turns in first)
        for first in itertools.combinations(played, count)
    ]
    found = screen(count)(group([value for value, _ in played], [turns for _, turns in played]))
    assert found.steps == pytest.approx(sum(spent) / len(spent))


def test_groups_of_several_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="the groups have 2, 4 episodes"):
        costs([group([1, 0]), group([1, 0, 0, 0])])


def test_a_smaller_group_is_cheaper_and_less_often_informative() -> None:
    found = smaller(2)(group([1, 0, 0, 0]))
    assert (found.informative, found.steps, found.episodes) == pytest.approx((0.5, 6, 1))


def test_a_group_is_stopped_in_the_turn_that_decides() -> None:
    late = group([1, 1, 0, 0], turns=[2, 3, 6, 5])
    assert stop(2)(late).steps == 2 + 3 + 3 + 3
    assert stop(2)(late).informative == 0, "its failures take longer, so it is lost"
    assert stop(3)(late) == as_played(late)


def test_the_groups_as_played_are_the_measure() -> None:
    found = {each.rule: each for each in costs([group([1, 0, 0, 0]), group([0, 0, 0, 0])])}
    assert found.keys() == {
        f"{rule}-{count}" for rule in ("screen", "smaller", "stop") for count in (2, 3)
    }
    two = found["screen-2"]
    assert two.lost == pytest.approx(0.5)
    assert two.spread == pytest.approx(1.0), "there is one informative group only"
    assert two.steps_per_group == pytest.approx((9 + 6) / 0.5 / 24)


def test_a_rule_that_trains_no_group_has_no_cost_of_one() -> None:
    found = {each.rule: each for each in costs([group([1, 1, 0, 0], turns=[2, 3, 6, 5])])}
    assert (found["stop-2"].steps_per_group, found["stop-2"].lost) == (None, 1)


def test_groups_without_any_difference_are_refused() -> None:
    with pytest.raises(ConfigError, match="none of the 1 groups"):
        costs([group([1, 1])])


def test_a_run_is_read_from_its_episodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="has no episodes"):
        list(read_groups(tmp_path))
    (tmp_path / "episodes").mkdir()
    records = [
        {"ticket": ticket, "return": value, "error": error, "turns": [{}] * turns}
        for ticket, value, error, turns in [
            ("train-0", 1.0, None, 2),
            ("train-0", 0.0, None, 4),
            ("train-0", 0.0, None, 4),
            ("demo-0", 1.0, None, 2),
            ("train-1", 1.0, "timeout", 2),
            ("train-1", 0.0, None, 2),
        ]
    ]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "episodes" / "step-000001.jsonl").write_text(lines)
    assert list(read_groups(tmp_path)) == [group([1, 0, 0], [2, 4, 4])], (
        "broken groups and demonstrations are left out"
    )
    (tmp_path / "config.toml").write_text("run.seed = 7\n")
    assert run([tmp_path], tmp_path / "found.json") == 0
    assert "screen-2" in capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["groups"], found["seeds"], found["rules"]["stop-2"]["lost"]) == (1, "7", 0)
