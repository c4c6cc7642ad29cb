"""Studies: what a file may say, which runs are run again, and what the report makes of their journals.

In place of `train` stands a child process of a few lines that reads the same recipe and writes the same journal.
"""

import json
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horizonrl.common.errors import ConfigError
from horizonrl.ops.bench.learning.comparison import compare, to_markdown
from horizonrl.ops.bench.learning.outcome import RunOutcome, collapses, read_outcome
from horizonrl.ops.bench.learning.run import StudyRequest, run
from horizonrl.ops.bench.learning.study import STUDIES, Study, plan, read_study, select
from horizonrl.ops.cli.main import main

BASE = """
[rl]
steps = 10
"""
STUDY = """
name = "rates"
recipe = "base.toml"
seeds = [0, 1]
primary = ["high", "low"]

[overrides]
"rl.groups_per_step" = 2

[variants]
low = { "rl.lr" = 1e-5 }

[variants.high]
rl.lr = 1e-4
envs = [{ id = "parity" }]
"""
CHILD = """
import json, os, signal, sys, time, tomllib
from pathlib import Path

config = tomllib.loads(Path(sys.argv[1]).read_text())
place = Path(config["run"]["root"]) / config["run"]["name"]
with (place.parent / "started").open("a") as started:
    started.write(config["run"]["name"] + "\\n")
if config["rl"]["lr"] > 1:
    print("the loss exploded")
    sys.exit(3)
(place / "checkpoints").mkdir(exist_ok=True)
(place / "episodes").mkdir(exist_ok=True)
journal = place / "metrics.jsonl"
done = len(journal.read_text().splitlines()) if journal.exists() else 0
with journal.open("a") as lines:
    for step in range(done, config["rl"]["steps"]):
        rate = min(1.0, 1e4 * config["rl"]["lr"] * (step + 1) / 10)
        line = dict(phase="rl", step=step + 1, episodes=16, error_share=0.0, success_rate=rate, truncated_share=0.25)
        line |= dict(ess=0.5, staleness_mean=1.0, staleness_max=2, environment_steps=32, generated_tokens=100)
        lines.write(json.dumps(line) + "\\n")
        lines.flush()
        if step == 3 and (number := os.environ.get("INTERRUPT")):
            signal.signal(signal.SIGINT, lambda *_: (place / "in-order").touch() or sys.exit(130))
            os.kill(os.getppid(), int(number))
            time.sleep(60)
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "base.toml").write_text(BASE)
    (tmp_path / "study.toml").write_text(STUDY)
    (tmp_path / "child.py").write_text(CHILD)
    return tmp_path


def study_of(place: Path, text: str) -> Study:
    (place / "study.toml").write_text(text)
    return read_study(place / "study.toml")


def carry_out(place: Path, **options: Any) -> int:
    def command(recipe: Path) -> Sequence[str]:
        return [sys.executable, str(place / "child.py"), str(recipe)]

    return run(StudyRequest(place / "study.toml", place / "out", **options), command)


def started(place: Path) -> list[str]:
    path = place / "out" / "started"
    return path.read_text().split() if path.exists() else []


def test_overrides_are_quoted_keys_or_tables_and_a_variants_own_win(place: Path) -> None:
    study = study_of(place, STUDY.replace('"rl.groups_per_step" = 2', '"rl.groups_per_step" = 2\nrl.lr = 1.0'))
    assert [variant.name for variant in study.variants] == ["low", "high"]
    configs = {each.name: each.config for each in plan(study, place / "out")}
    assert (configs["low-seed1"].rl.lr, configs["low-seed1"].rl.groups_per_step) == (1e-5, 2)
    assert configs["high-seed0"].rl.lr == 1e-4
    assert configs["high-seed0"].envs[0].id == "parity"
    assert configs["high-seed1"].run.seed == 1
    assert configs["high-seed1"].run_dir == (place / "out" / "high-seed1").resolve()


def test_seeds_come_first_so_that_a_part_of_a_study_is_balanced(place: Path) -> None:
    names = [each.name for each in plan(read_study(place / "study.toml"), place / "out")]
    assert names == ["low-seed0", "high-seed0", "low-seed1", "high-seed1"]


GRID = """
name = "grid"
recipe = "base.toml"
seeds = [0]
contrasts = [["b", "a"], ["*", "2"]]
[grid.letter]
a = { "rl.lr" = 1e-5 }
b = { "rl.lr" = 1e-4 }
[grid.number]
1 = { "rl.groups_per_step" = 1 }
2 = { "rl.groups_per_step" = 2 }
"""


def test_a_grid_is_the_product_of_its_axes(place: Path) -> None:
    study = study_of(place, GRID)
    assert [variant.name for variant in study.variants] == ["a-1", "a-2", "b-1", "b-2"]
    assert study.axes == ["letter", "number"]
    assert dict(study.variants[2].overrides) == {"rl.lr": 1e-4, "rl.groups_per_step": 1}
    assert [variant.name for variant in select(study, [], ["b-*"])[1]] == ["b-1", "b-2"]
    assert [variant.name for variant in select(study, [], ["2", "b-1"])[1]] == ["a-2", "b-1", "b-2"]
    compared = [(pair.variant, pair.against) for pair in study.pairs]
    assert compared == [("b-1", "a-1"), ("b-2", "a-2"), ("a-1", "a-2"), ("b-1", "b-2")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            STUDY.replace('primary = ["high", ', 'base = ["high", '),
            "base: no such key; known keys: contrasts, grid, name",
        ),
        (
            STUDY.replace('["high", "low"]', '["high", "lwo"]'),
            "no two variants differ in 'high' and 'lwo' alone; there are low, high",
        ),
        (STUDY.replace("[0, 1]", "[]"), "seeds: List should have at least 1 item"),
        (STUDY.replace("[0, 1]", "[0, 0]"), "seeds names one twice: [0, 0]"),
        (STUDY.replace("[variants.high]", "[variants.low]"), "is not TOML"),
        (STUDY.replace("[variants.high]", '[variants."high lr"]'), "variants.high lr"),
        (STUDY.replace("base.toml", "gone"), "no recipe 'gone': neither a file nor in ops/recipes"),
        (STUDY.replace("[variants.high]", "[grid.rate.high]"), "give either [variants] or [grid]"),
        (STUDY.replace("rl.lr = 1e-4", "run.seed = 4"), "run.seed cannot be overridden"),
        (GRID.replace('"rl.groups_per_step" = 2', '"rl.lr" = 2e-4'), "two axes of [grid] set rl.lr"),
        (GRID.replace("b = {", "a-1 = {").replace("2 = {", "1-1 = {"), "a-1-1 would name two variants"),
    ],
)
def test_a_wrong_study_is_one_clear_message(place: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        study_of(place, text)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (STUDY.replace("rl.lr = 1e-4", "rl.learning_rate = 1e-4"), "variant high: rl.learning_rate: no such key"),
        (STUDY.replace("rl.lr = 1e-4\nenvs", "rl.lr = 1e-5\n#"), "variants low and high resolve to the same config"),
        (STUDY.replace("rl.lr = 1e-4", "rl.steps = 0\nimitation.steps = 3"), "variant high: rl.steps is 0"),
    ],
)
def test_every_config_is_checked_before_the_first_run(place: Path, text: str, message: str) -> None:
    (place / "study.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        carry_out(place)
    assert not (place / "out").exists()


@pytest.mark.parametrize(
    ("selection", "message"), [({"seeds": [2]}, "names \\[2\\]"), ({"only": ["mid"]}, "mid matches no variant")]
)
def test_asking_for_what_the_study_lacks_is_refused(place: Path, selection: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        carry_out(place, **selection)


def test_the_committed_studies_can_be_read(place: Path) -> None:
    (place / "pocket.toml").write_text(BASE)
    sizes = {}
    for path in STUDIES.glob("*.toml"):
        study = study_of(place, path.read_text())
        assert study.name == path.stem
        sizes[study.name] = len(study.variants)
    assert (sizes.pop("horizon-claim"), sizes.pop("curriculum")) == (28, 2)
    assert sizes == {"estimators": 9, "losses": 6, "staleness": 20, "horizons": 5, "context": 6, "smollm2": 1}


def test_a_study_is_run_once_and_reported(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert carry_out(place) == 0
    assert started(place) == ["low-seed0", "high-seed0", "low-seed1", "high-seed1"]
    shown = capsys.readouterr().out.splitlines()
    assert re.match(r"\[1/4\] low-seed0: finished in 0\.\d min; 3 to go, about \d min", shown[0])
    assert shown[3].endswith("; 0 to go")

    out = place / "out"
    assert sorted(path.name for path in (out / "low-seed0").iterdir()) == [
        "ending.json",
        "episodes",
        "logs",
        "metrics.jsonl",
        "recipe.toml",
    ]
    results = json.loads((out / "results.json").read_text())
    low, high = results["variants"]
    assert (low["final"]["mean"], high["final"]["mean"]) == (pytest.approx(0.095), pytest.approx(0.95))
    assert results["runs"][0]["environment_steps"] == 320
    assert "| high − low (primary) | the end | 2 |" in (out / "report.md").read_text()
    for axis in ("steps", "environment-steps", "generated-tokens"):
        assert (out / f"success-{axis}.svg").read_text().startswith("<?xml")

    assert carry_out(place) == 0
    assert len(started(place)) == 4
    assert "had finished" in capsys.readouterr().out


PHASES = (
    STUDY
    + """
[phases.small]
seeds = [7]
only = ["high"]
overrides = { "rl.steps" = 2 }
"""
)


def test_a_phase_has_seeds_variants_and_overrides_of_its_own(place: Path) -> None:
    (place / "study.toml").write_text(PHASES)
    assert carry_out(place, phase="small") == 0
    assert started(place) == ["high-seed7"]
    results = json.loads((place / "out" / "results.json").read_text())
    assert results["runs"][0]["environment_steps"] == 64 and "--phase small" in results["command"]
    with pytest.raises(ConfigError, match="has no phase 'screen'; its phases: small"):
        carry_out(place, phase="screen")


def test_a_run_without_anything_left_to_learn_is_a_result_and_a_collapse(place: Path) -> None:
    child = (place / "child.py").read_text()
    (place / "child.py").write_text(child + '\nprint("error: hardly any group can be trained on (...)")\nsys.exit(2)\n')
    assert carry_out(place, seeds=[0], only=["low"]) == 0
    assert json.loads((place / "out" / "results.json").read_text())["variants"][0]["collapsed"] == 1
    assert carry_out(place, seeds=[0], only=["low"]) == 0
    assert started(place) == ["low-seed0"]


def test_a_collapse_is_a_fall_from_the_best_that_lasts() -> None:
    assert collapses(np.array([0.3, 0.5, 0.34, 0.35, 0.5]))
    assert not collapses(np.array([0.3, 0.5, 0.34, 0.36, 0.34, 0.5]))
    assert not collapses(np.array([0.5, 0.0])) and not collapses(np.array([0.4]))


def test_a_part_of_a_study_can_be_run_and_the_rest_later(place: Path) -> None:
    assert carry_out(place, seeds=[1], only=["high"]) == 0
    assert started(place) == ["high-seed1"]
    assert carry_out(place) == 0
    assert sorted(started(place)) == ["high-seed0", "high-seed1", "low-seed0", "low-seed1"]


def test_a_failed_run_is_recorded_and_the_study_goes_on(place: Path) -> None:
    (place / "study.toml").write_text(STUDY.replace('"rl.lr" = 1e-5', '"rl.lr" = 2.0'))
    assert carry_out(place) == 1
    assert len(started(place)) == 4
    report = (place / "out" / "report.md").read_text()
    assert "2 of 4 finished" in report
    assert "the loss exploded" in report
    assert carry_out(place) == 1
    assert started(place)[4:] == ["low-seed0", "low-seed1"]
    assert carry_out(place, report_only=True) == 1
    assert len(started(place)) == 6


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Make SIGINT interrupt: a shell that starts the tests in the background has them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_study_ends_its_child_in_order_and_goes_on_later(
    place: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setenv("INTERRUPT", str(int(number)))
    assert carry_out(place) == 130
    assert (place / "out" / "low-seed0" / "in-order").exists()
    assert (place / "out" / "low-seed0" / "checkpoints").exists()
    assert started(place) == ["low-seed0"]
    assert carry_out(place, report_only=True) == 0

    monkeypatch.delenv("INTERRUPT")
    assert carry_out(place) == 0
    assert started(place)[:3] == ["low-seed0", "low-seed0", "high-seed0"]
    assert len((place / "out" / "low-seed0" / "metrics.jsonl").read_text().splitlines()) == 10


def test_a_directory_of_another_study_is_refused(place: Path) -> None:
    assert carry_out(place) == 0
    (place / "study.toml").write_text(STUDY.replace("1e-5", "2e-5"))
    with pytest.raises(ConfigError, match=r"low-seed0 was begun with another rl.lr \(1e-05, now 2e-05\)"):
        carry_out(place)


def test_the_command_line_reaches_the_study(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "learning", str(place / "study.toml"), "--directory", str(place / "out")]
    assert main([*command, "--report-only", "--seeds", "0,1", "--only", "low"]) == 0
    assert "no run has finished" in capsys.readouterr().out
    assert main([*command, "--seeds", "7"]) == 2
    assert main([*command, "--rl.lr", "1e-3", "--envs.0.id", "x"]) == 2


def journal(place: Path, name: str, rates: Sequence[float], **fields: Any) -> Path:
    """Write a run's journal, after two steps of imitation."""
    run_dir = place / name
    run_dir.mkdir()
    line: dict[str, Any] = {"episodes": 20, "error_share": 0.0, "truncated_share": 0.5, "ess": 0.5}
    line |= {"staleness_mean": 1.0, "staleness_max": 2, "environment_steps": 10, "generated_tokens": 50} | fields
    lines = [{"phase": "imitation", "step": step, "environment_steps": 999} for step in (1, 2)]
    lines += [line | {"phase": "rl", "step": 3 + step, "success_rate": rate} for step, rate in enumerate(rates)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    return run_dir


def evaluate(run_dir: Path, *points: tuple[int, int, int]) -> None:
    lines = [{"step": step, "successes": successes, "episodes": episodes} for step, successes, episodes in points]
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
    assert outcome.measured == "training episodes"
    assert outcome.curve.steps.tolist() == list(range(1, 11))
    assert outcome.environment_steps == 100
    assert outcome.generated_tokens == 500


def test_evaluations_are_preferred_and_the_start_is_the_one_before_rl(place: Path) -> None:
    run_dir = journal(place, "a", [0.0] * 10)
    evaluate(run_dir, (0, 1, 64), (2, 8, 64), (12, 32, 64), (7, 16, 64), (7, 20, 64))  # rounds end late, and again
    outcome = read(run_dir)
    assert (outcome.start.successes, outcome.final.successes) == (8, 32)
    assert outcome.measured == "evaluations"
    assert outcome.curve.steps.tolist() == [0, 5, 10]
    assert outcome.curve.successes.tolist() == [8, 20, 32]
    assert outcome.curve.environment_steps.tolist() == [0, 50, 100]


def test_a_run_without_rl_has_no_outcome(place: Path) -> None:
    assert read_outcome(journal(place, "a", []), "low", 0, 1.0) is None


def test_a_trailing_window_smooths_the_curve(place: Path) -> None:
    outcome = read(journal(place, "a", [0.0] * 10 + [1.0] * 10))
    assert (outcome.curve.successes / outcome.curve.episodes)[8:13].tolist() == [0.0, 0.0, 0.5, 1.0, 1.0]


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
    end, at_steps, at_tokens = comparison.contrasts
    assert [each.axis for each in comparison.contrasts] == ["end", "environment_steps", "generated_tokens"]
    assert (end.variant, end.against, end.primary, end.seeds) == ("high", "low", True, (0, 1))
    assert end.difference.mean == pytest.approx(16 / 64)
    assert end.difference.excludes_zero
    assert (at_steps.budget, at_tokens.budget) == (100, 500)
    assert at_steps.difference.mean == pytest.approx((9 - 2) / 64)  # half of its own way, at twice the cost of a step
    # Low's 18 of 64 come after 2 of high's 18 more, which take 200 environment steps.
    assert at_steps.cost is not None and at_steps.cost.ratio == pytest.approx(2 / 18 * 2, abs=0.003)
    assert high.improvement.mean == pytest.approx(18 / 64)
    assert not low.improvement.excludes_zero
    assert comparison.budgets == {"environment_steps": 100, "generated_tokens": 500}
    assert high.at_equal_cost["environment_steps"].mean == pytest.approx((16 + 9) / 64)  # half of its own way
    assert high.at_equal_cost["generated_tokens"].mean == pytest.approx(34 / 64)

    report = to_markdown(study, comparison, {"seeds": "0, 1"}, {"high-seed2": "no memory left"})
    assert "| high | 2 | 25.0 % [" in report
    assert "+28.1 [" in report
    assert "success at 100 environment steps" in report
    assert "| high − low (primary) | 100 environment steps | 2 | +10.9 [" in report
    assert "no memory left" in report


def pair_of_arms(place: Path, ours: Sequence[int], theirs: Sequence[int], **fields: Any) -> list[RunOutcome]:
    """Two arms of three seeds each: 20 RL steps, and these successes of 64 before them and after 10 and 20."""
    outcomes = []
    for variant, successes in (("high", ours), ("low", theirs)):
        for seed in range(3):
            run_dir = journal(place, f"{variant}-{seed}", [0.5] * 20, **fields)
            evaluate(run_dir, *((2 + 10 * number, k, 64) for number, k in enumerate(successes)))
            outcomes.append(read(run_dir, variant, seed))
    return outcomes


def test_the_cost_of_equal_success_is_never_where_it_is_not_reached(place: Path) -> None:
    study = read_study(place / "study.toml")
    fast = compare(study, pair_of_arms(place, (16, 32, 48), (16, 24, 32))).contrasts[1]
    assert fast.cost is not None and fast.cost.ratio == pytest.approx(0.5, abs=0.003)
    assert fast.cost.low is not None and fast.cost.high is not None and fast.cost.low < 0.5 < fast.cost.high
    (place / "slow").mkdir()
    slow = compare(study, pair_of_arms(place / "slow", (16, 20, 20), (16, 24, 48))).contrasts[1]
    assert slow.cost is not None and (slow.cost.ratio, slow.cost.high) == (None, None)


def test_a_run_that_gave_up_ends_no_comparison_and_counts_with_its_last_success(place: Path) -> None:
    study = read_study(place / "study.toml")
    outcomes = pair_of_arms(place, (16, 32, 48), (16, 24, 32))
    gone = journal(place, "gone", [0.5, 0.2])
    evaluate(gone, (2, 16, 64))
    # One `low` run collapses in its third step: 16 of 64 is what it had before that.
    collapsed = read_outcome(gone, "low", 2, 60.0, gave_up=True, at_end=0.0)
    assert collapsed is not None
    assert (collapsed.start.successes, collapsed.final.successes, collapsed.collapsed) == (16, 0, True)
    comparison = compare(study, [*outcomes[:5], collapsed])
    assert comparison.budgets["environment_steps"] == 200
    low = comparison.rows[0]
    assert (low.collapsed, low.gave_up) == (1, 1)
    assert low.at_equal_cost["environment_steps"].mean == pytest.approx((0.5 + 0.5 + 0) / 3)
    solved = read_outcome(gone, "low", 2, 60.0, gave_up=True, at_end=0.99)
    assert solved is not None and solved.collapsed is False


def test_two_evaluations_cannot_show_a_collapse(place: Path) -> None:
    run_dir = journal(place, "a", [0.5] * 10)
    evaluate(run_dir, (2, 40, 64), (12, 0, 64))
    assert read(run_dir).collapsed is None
    evaluate(run_dir, (2, 40, 64), (7, 0, 64), (12, 0, 64))
    assert read(run_dir).collapsed is True


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


PHASED = (
    STUDY
    + """
[phases.screen]
seeds = [7]
only = ["low"]
"""
)


def test_the_selection_narrows_a_phase(place: Path) -> None:
    (place / "study.toml").write_text(PHASED)
    assert carry_out(place, phase="screen") == 0
    assert (place / "out" / "started").read_text().split() == ["low-seed7"]
    with pytest.raises(ConfigError, match="--only high matches no variant of phase screen: low"):
        carry_out(place, phase="screen", only=["high"])
