"""The training episodes of each horizon: what a run directory keeps, added up."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horizonrl.ops.studies.played import Played, add_up, read_played

PLAYED = st.builds(
    lambda horizon, solved, unsolved, repeated: Played(
        horizon,
        solved + unsolved,
        solved,
        unsolved,
        2 * solved,
        3 * unsolved,
        min(repeated, 2 * unsolved),
        unsolved,
    ),
    st.sampled_from((4, 9, 18)),
    *[st.integers(0, 50)] * 3,
)


def episode(ticket: str, horizon: int, stop: str, success: bool | None, texts: str) -> str:
    turns = [{"text": text} for text in texts]
    return json.dumps(
        {"ticket": ticket, "horizon": horizon, "stop": stop, "success": success, "turns": turns}
    )


def test_broken_and_demonstrated_episodes_are_left_out_and_repetitions_counted(
    tmp_path: Path,
) -> None:
    (tmp_path / "episodes").mkdir()
    lines = {
        "step-000001": [
            episode("demo-00000000", 4, "terminated", True, "ab"),
            episode("train-00000000", 4, "terminated", True, "ab"),
            episode("train-00000000", 4, "horizon", False, "abab"),
            episode("train-00000000", 4, "env_error", None, "abab"),
            episode("train-00000001", 4, "terminated", False, "aaa"),
            episode("train-00000001", 4, "context", False, ""),
        ],
        "step-000002": [
            episode("train-00000002", 9, "env_truncated", False, "abcdefa"),
            episode("train-00000002", 9, "context", False, "aba"),
        ],
        "eval-000002": [episode("eval-00000000", 18, "terminated", True, "a")],
    }
    for name, records in lines.items():
        (tmp_path / "episodes" / f"{name}.jsonl").write_text(
            "".join(f"{record}\n" for record in records)
        )
    assert read_played(tmp_path) == (
        Played(
            4,
            episodes=3,
            solved=1,
            truncated=1,
            turns_solved=2,
            turns_unsolved=7,
            repeated=4,
            by_context=0,
        ),
        Played(
            9,
            episodes=2,
            solved=0,
            truncated=2,
            turns_solved=0,
            turns_unsolved=10,
            repeated=2,
            by_context=1,
        ),
    )


@given(st.lists(PLAYED, max_size=12), st.integers(0, 12))
def test_parts_may_be_added_up_in_any_grouping(parts: Sequence[Played], cut: int) -> None:
    whole = add_up(parts)
    assert add_up([*add_up(parts[:cut]), *add_up(parts[cut:])]) == whole
    assert [each.horizon for each in whole] == sorted({part.horizon for part in parts})
    assert sum(each.episodes for each in whole) == sum(part.episodes for part in parts)


def test_what_an_older_release_did_not_count_is_not_a_sum_of_the_rest() -> None:
    counted, not_counted = Played(4, 1, 0, 1, 0, 4, 0, 1), Played(4, 1, 1, 0, 4, 0, 0)
    (whole,) = add_up([counted, not_counted])
    assert whole == Played(4, 2, 1, 1, 4, 4, 0, None) and whole.shares()["context_share"] is None


@given(PLAYED)
def test_shares_multiply_back_to_the_counts(each: Played) -> None:
    shares, unsolved = each.shares(), each.episodes - each.solved
    for name, part, whole in (
        ("solved_share", each.solved, each.episodes),
        ("truncated_share", each.truncated, each.episodes),
        ("context_share", each.by_context or 0, each.episodes),
        ("turns_per_solved", each.turns_solved, each.solved),
        ("turns_per_unsolved", each.turns_unsolved, unsolved),
        ("repeated_share", each.repeated, each.turns_unsolved),
    ):
        value = shares.pop(name)
        assert (value is None) == (whole == 0)
        assert value is None or value * whole == pytest.approx(part)
    assert not shares
    assert asdict(each).keys().isdisjoint(each.shares())
