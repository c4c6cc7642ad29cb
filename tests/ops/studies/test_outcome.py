"""The outcome of a finished run, and how variants are compared: at the end, at equal cost, at equal success."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from horizonrl.common.errors import ConfigError
from horizonrl.ops.studies.comparison import Comparison, ReportedRun, compare, to_json
from horizonrl.ops.studies.outcome import RunOutcome, read_outcome
from horizonrl.ops.studies.played import Played
from horizonrl.ops.studies.report import ReportOptions, results_to_markdown
from horizonrl.ops.studies.study import read_study
from tests.ops.studies.test_run import STUDY, place, study_of

__all__ = ["place"]


def journal(place: Path, name: str, rates: Sequence[float], **fields: Any) -> Path:
    """Write a run's journal, after two steps of imitation."""
    run_dir = place / name
    run_dir.mkdir()
    line: dict[str, Any] = {"episodes": 20, "error_share": 0.0, "truncated_share": 0.5, "ess": 0.5}
    line |= {
        "staleness_mean": 1.0,
        "staleness_max": 2,
        "environment_steps": 10,
        "generated_tokens": 50,
        "processed_tokens": 80,
        "step_s": 2.0,
        "wait_s": 1.0,
    } | fields
    lines = [{"phase": "imitation", "step": step, "environment_steps": 999} for step in (1, 2)]
    lines += [
        line | {"phase": "rl", "step": 3 + step, "success_rate": rate}
        for step, rate in enumerate(rates)
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    return run_dir


def evaluate(run_dir: Path, *points: tuple[int, int, int], split: str = "validation") -> None:
    lines = [
        {"step": step, "successes": successes, "episodes": episodes, "split": split}
        for step, successes, episodes in points
    ]
    (run_dir / "evals.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))


def read(run_dir: Path, variant: str = "low", seed: int = 0) -> RunOutcome:
    outcome = read_outcome(run_dir, variant, seed, wall_s=60.0)
    assert outcome is not None
    return outcome


def test_training_success_is_that_of_the_last_fifth_weighted_by_valid_episodes(place: Path) -> None:
    run_dir = journal(place, "a", [0.0] * 8 + [0.5, 1.0])
    text = (run_dir / "metrics.jsonl").read_text().splitlines()
    last = json.loads(text[-1]) | {"episodes": 40, "error_share": 0.75}
    (run_dir / "metrics.jsonl").write_text("\n".join([*text[:-1], json.dumps(last)]) + "\n")
    outcome = read(run_dir)
    assert (outcome.final.successes, outcome.final.episodes) == (10 + 10, 20 + 10)
    assert (outcome.start.successes, outcome.start.episodes) == (0, 20)
    assert outcome.split == "train"
    assert outcome.curve.steps.tolist() == list(range(1, 11))
    assert outcome.environment_steps == 100
    assert outcome.generated_tokens == 500


def test_evaluations_are_preferred_and_the_start_is_the_one_before_rl(place: Path) -> None:
    run_dir = journal(place, "a", [0.0] * 10)
    # Rounds end late, and again.
    evaluate(run_dir, (0, 1, 64), (2, 8, 64), (12, 32, 64), (7, 16, 64), (7, 20, 64))
    outcome = read(run_dir)
    assert (outcome.start.successes, outcome.final.successes) == (8, 32)
    assert outcome.split == "validation"
    assert outcome.curve.steps.tolist() == [0, 5, 10]
    assert outcome.curve.successes.tolist() == [8, 20, 32]
    assert outcome.curve.environment_steps.tolist() == [0, 50, 100]


def test_a_run_without_rl_has_no_outcome(place: Path) -> None:
    assert read_outcome(journal(place, "a", []), "low", 0, 1.0) is None


def test_a_trailing_window_smooths_the_curve(place: Path) -> None:
    outcome = read(journal(place, "a", [0.0] * 10 + [1.0] * 10))
    assert (outcome.curve.successes / outcome.curve.episodes)[8:13].tolist() == [
        0.0,
        0.0,
        0.5,
        1.0,
        1.0,
    ]


def test_variants_are_compared_by_seed_and_at_the_cost_that_all_reached(place: Path) -> None:
    study = read_study(place / "study.toml")
    outcomes = []
    for variant, cost, gain in (("low", 10, 2), ("high", 20, 18)):
        for seed in (0, 1):
            run_dir = journal(place, f"{variant}-{seed}", [0.0] * 10, environment_steps=cost)
            evaluate(run_dir, (2, 16, 64), (12, 16 + gain, 64))
            outcomes.append(read(run_dir, variant, seed))
    comparison = compare(study, outcomes)
    low, high = comparison.rows
    end, at_steps, at_tokens, *_ = comparison.contrasts
    assert [each.axis for each in comparison.contrasts] == [
        "end",
        "environment_steps",
        "generated_tokens",
        "processed_tokens",
        "seconds",
    ]
    assert (end.variant, end.against, end.primary, end.seeds) == ("high", "low", True, (0, 1))
    assert end.difference.mean == pytest.approx(16 / 64)
    assert end.difference.low > 0
    assert (at_steps.budget, at_tokens.budget) == (100, 500)
    # Half of its own way, at twice the cost of a step.
    assert at_steps.difference.mean == pytest.approx((9 - 2) / 64)
    # Low's 18 of 64 come after 2 of high's 18 more, which take 200 environment steps.
    assert at_steps.end_cost is not None
    assert at_steps.end_cost.ratio == pytest.approx(2 / 18 * 2, abs=0.01)
    assert high.improvement.mean == pytest.approx(18 / 64)
    assert low.improvement.low <= 0
    assert comparison.budgets == {
        "environment_steps": 100,
        "generated_tokens": 500,
        "processed_tokens": 800,
        "seconds": 30,
    }

    evaluate(place / "high-1", (2, 16, 64), (12, 34, 64), split="test")
    with pytest.raises(ConfigError, match="evaluated on test tasks, others on validation tasks"):
        compare(study, [*outcomes[:-1], read(place / "high-1", "high", 1)])

    report = markdown(comparison, outcomes)
    assert "|variant|start on validation, %|end on validation, %|" in report
    assert "|`high`|25.0|" in report
    assert "|+28.1 (" in report
    assert "|`high`−`low` (primary)|100 environment steps|+10.9 (" in report


def markdown(comparison: Comparison, outcomes: Sequence[RunOutcome]) -> str:
    runs = [ReportedRun(outcome, "commit", "machine") for outcome in outcomes]
    facts = {"command": "c", "seeds": "0, 1", "evaluation": "e", "commit": "c", "machine": "m"}
    return "\n".join(results_to_markdown(facts | to_json(comparison, runs), ReportOptions()))


def pair_of_arms(
    place: Path, ours: Sequence[int], theirs: Sequence[int], **fields: Any
) -> list[RunOutcome]:
    """Two arms of three seeds each: 20 RL steps, and these successes of 64 before them and after 10 and 20."""
    outcomes = []
    for variant, successes in (("high", ours), ("low", theirs)):
        for seed in range(3):
            run_dir = journal(place, f"{variant}-{seed}", [0.5] * 20, **fields)
            evaluate(run_dir, *((2 + 10 * number, k, 64) for number, k in enumerate(successes)))
            outcomes.append(read(run_dir, variant, seed))
    return outcomes


def test_a_run_that_gave_up_ends_no_comparison_and_counts_with_its_last_success(
    place: Path,
) -> None:
    study = read_study(place / "study.toml")
    outcomes = pair_of_arms(place, (16, 32, 48), (16, 24, 32))
    gone = journal(place, "gone", [0.5, 0.2])
    evaluate(gone, (2, 16, 64))
    # One `low` run collapses in its third step: 16 of 64 is what it had before that.
    collapsed = read_outcome(gone, "low", 2, 60.0, gave_up=True, at_end=0.0)
    assert collapsed is not None
    assert (collapsed.start.successes, collapsed.final.successes, collapsed.collapsed) == (
        16,
        0,
        True,
    )
    comparison = compare(study, [*outcomes[:5], collapsed])
    assert comparison.budgets["environment_steps"] == 200
    low = comparison.rows[0]
    assert (low.collapsed, low.gave_up) == (1, 1)
    assert comparison.contrasts[1].difference.mean == pytest.approx(48 / 64 - (0.5 + 0.5 + 0) / 3)
    solved = read_outcome(gone, "low", 2, 60.0, gave_up=True, at_end=0.99)
    assert solved is not None and solved.collapsed is False
    fell = journal(place, "fell", [0.5] * 20)
    evaluate(fell, (2, 60, 64), (12, 45, 64), (22, 45, 64))
    half = read_outcome(fell, "low", 2, 60.0, gave_up=True, at_end=0.7)
    assert half is not None and half.collapsed is True, "it had fallen before it gave up"
    dipped = journal(place, "dipped", [0.5] * 20)
    evaluate(dipped, (2, 60, 64), (12, 45, 64))
    once = read_outcome(dipped, "low", 2, 60.0, gave_up=True, at_end=0.5)
    assert once is not None and once.collapsed is False, (
        "a success in training is no second evaluation"
    )
    evaluate(dipped, (2, 60, 64), (22, 29, 64))
    for at_end, collapses in ((0.9, False), (0.1, True)):  # its last version was evaluated at 45 %
        seen = read_outcome(dipped, "low", 2, 60.0, gave_up=True, at_end=at_end)
        assert seen is not None and seen.collapsed is collapses


def test_two_evaluations_cannot_show_a_collapse(place: Path) -> None:
    run_dir = journal(place, "a", [0.5] * 10)
    evaluate(run_dir, (2, 40, 64), (12, 0, 64))
    assert read(run_dir).collapsed is None
    evaluate(run_dir, (2, 40, 64), (7, 0, 64), (12, 0, 64))
    assert read(run_dir).collapsed is True


def test_collapses_are_compared_only_where_every_run_could_show_one(place: Path) -> None:
    study = read_study(place / "study.toml")
    outcomes = pair_of_arms(place, (48, 16, 16), (16, 32, 48))
    assert compare(study, outcomes).contrasts[0].collapse_p == pytest.approx(0.1)
    unseen = [*outcomes[:-1], replace(outcomes[-1], collapsed=None)]
    assert compare(study, unseen).contrasts[0].collapse_p is None


def test_p_of_all_but_the_primary_contrast_are_corrected_together(place: Path) -> None:
    more = STUDY.replace("[overrides]", 'contrasts = [["mid", "low"], ["top", "low"]]\n[overrides]')
    more += "\n[variants.mid]\nrl.lr = 2e-4\n[variants.top]\nrl.lr = 3e-4\n"
    study = study_of(place, more)
    outcomes = []
    for variant, gain in (("low", 0), ("high", 4), ("mid", 4), ("top", 4)):
        for seed in range(2):
            run_dir = journal(place, f"{variant}-{seed}", [0.5] * 10)
            evaluate(run_dir, (2, 16, 64), (12, 16 + gain * (1 + seed), 64))
            outcomes.append(read(run_dir, variant, seed))
    high, mid, top = (each for each in compare(study, outcomes).contrasts if each.axis == "end")
    assert high.tested is not None and high.p == high.tested.p
    assert mid.p == top.p == pytest.approx(min(1.0, 2 * high.tested.p))


def test_training_episodes_are_counted_by_horizon(place: Path) -> None:
    run_dir = journal(place, "a", [0.5, 0.5])
    (run_dir / "episodes").mkdir()

    def episode(
        horizon: int, success: bool, stop: str, *texts: str, ticket: str = "train-1"
    ) -> dict[str, Any]:
        turns = [{"text": text} for text in texts]
        return {
            "ticket": ticket,
            "horizon": horizon,
            "success": success,
            "stop": stop,
            "turns": turns,
        }

    for step, records in {
        3: [
            episode(9, True, "terminated", "a", "b", "a"),
            episode(9, False, "horizon", "a", "b", "a", "a"),
            episode(9, False, "env_error", "a"),
            episode(9, True, "terminated", "a", ticket="demo-1"),
        ],
        4: [episode(4, False, "terminated", "a", "b")],
    }.items():
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (run_dir / "episodes" / f"step-{step:06d}.jsonl").write_text(lines)
    outcome = read(run_dir)
    assert outcome.played == (Played(4, 1, 0, 0, 0, 2, 0, 0), Played(9, 2, 1, 1, 3, 4, 2, 0))
    study = read_study(place / "study.toml")
    comparison = compare(study, [outcome, replace(outcome, seed=1)])
    report = markdown(comparison, [outcome, replace(outcome, seed=1)])
    assert "|`low`|9|4|50.0|50.0|0.0|3.0, 4.0|50.0|" in report
    assert "|`low`|4|2|0.0|0.0|0.0|-, 2.0|0.0|" in report
