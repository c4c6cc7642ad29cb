"""The one answer to what a run is: over or not, how far, how its tickets ended, what training added."""

from pathlib import Path
from typing import Any

import pytest

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.run_dir import TRAIN_LOCK
from horizonrl.common.state import Outcomes, Progress, WeightsManifest, end_of_run
from horizonrl.common.types import DropReason, Kind, Phase, PolicyVersion
from horizonrl.ops.observe.screen import learning
from horizonrl.ops.rundir.directory import only_train
from horizonrl.ops.rundir.files import Files, Line, TrainingMeans
from horizonrl.ops.rundir.view import RunView
from tests.ops.report.runs import Scale, run_config, write_run
from tests.ops.runs import EVAL, LINE, broker_status

CONFIG = RunConfig.load([], ["--imitation.steps=2", "--rl.steps=6", "--eval.every=3"])


def journal(steps: int, *versions: int) -> Files:
    """Return the journal of a run of two steps of imitation, whose evaluation of version V had V tenths of success."""
    metrics = [
        LINE | {"step": step, "phase": "imitation" if step <= 2 else "rl"}
        for step in range(1, steps + 1)
    ]
    return Files(
        metrics, evals=[EVAL | {"version": each, "success_rate": each / 10} for each in versions]
    )


def progress(step: int, *, finished: bool = False) -> Progress:
    return Progress(step=step, phase=Phase.RL, phase_step=step - 2, finished=finished)


@pytest.mark.parametrize(
    ("files", "reported", "training", "state", "ended"),
    [
        (journal(8, 0, 2, 5, 8), None, None, "finished", True),
        # An evaluation is missing; no `train` was ever here.
        (journal(8, 0, 2, 5), None, None, "stopped", False),
        (journal(8, 0, 2, 5), None, False, "stopped", True),
        (journal(8, 0, 2, 5), None, True, "running", False),
        # The learner's report counts.
        (journal(8, 0, 2, 5, 8), progress(8), True, "running", False),
        (journal(3, 0), progress(8, finished=True), None, "finished", True),
        # It was given more steps.
        (journal(6, 0), progress(6, finished=True), None, "no learner yet", False),
        (Files(), None, None, "stopped", False),
    ],
)
def test_whether_a_run_is_over_has_one_answer(
    files: Files, reported: Progress | None, training: bool | None, state: str, ended: bool
) -> None:
    broker = None if reported is None else broker_status(CONFIG, reported)
    view = RunView("r", CONFIG, files=files, broker=broker, training=training)
    assert (view.state, view.ended, view.finished) == (state, ended, state == "finished")


def test_the_end_of_a_run_is_what_all_of_its_records_say() -> None:
    weights = WeightsManifest(
        policy=PolicyVersion(version=8), weights_bytes=1, digest="0" * 32, finished_step=9
    )
    done = progress(8, finished=True)
    assert end_of_run(8, done) == end_of_run(8, done, weights) == 8
    assert (
        end_of_run(9, done)
        is end_of_run(8, progress(8))
        is end_of_run(8, done, None)
        is end_of_run(8)
        is None
    )
    assert end_of_run(9, weights) == 9


def test_a_train_in_the_directory_is_seen_by_its_lock(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    run_dir = write_run(config, Scale(steps=3))
    assert RunView.read(run_dir, config).training is None
    with only_train(run_dir):
        view = RunView.read(run_dir, config)
        assert (view.state, view.waits()) == ("running", ["the broker does not answer"])
    assert (run_dir / TRAIN_LOCK).exists()
    assert RunView.read(run_dir, config).state == "stopped"


def test_what_training_added_is_told_by_the_turning_points() -> None:
    gains = {
        (0, 0): "0 % before training",
        (2, 0, 2): "0 % before training, 20 % after imitation",
        (3, 0, 2, 3): "0 % before training, 20 % after imitation, 30 % after 1 RL step",
        (8, 0, 2, 5, 8): "0 % before training, 20 % after imitation, 80 % after RL",
    }
    for (steps, *versions), gain in gains.items():
        assert RunView("r", CONFIG, files=journal(steps, *versions)).gain == gain
    unmeasured = journal(8, 0, 2)
    lost = Files(
        unmeasured.metrics, evals=[*unmeasured.evals, EVAL | {"version": 8, "success_rate": None}]
    )
    assert RunView("r", CONFIG, files=lost).gain == gains[2, 0, 2]


def test_returns_other_than_0_and_1_are_told_beside_success() -> None:
    judged = [
        EVAL | {"version": version, "success_rate": rate, "return_mean": earned}
        for version, rate, earned in ((0, 0.0, 0.16), (2, 0.1, 0.1), (8, 0.25, 0.5625))
    ]
    metrics = [
        *journal(2).metrics,
        *(LINE | {"step": 3 + n, "reward_mean": 0.1 * n} for n in range(6)),
    ]
    view = RunView("r", CONFIG, files=Files(metrics, evals=judged))
    assert view.gain == (
        "0 % (return 0.16) before training, 10 % after imitation, 25 % (return 0.56) after RL"
    )
    assert view.files.reward == TrainingMeans(5, pytest.approx(0.2), pytest.approx(0.3))
    shown = dict(learning(view))
    assert shown["eval"].endswith(", return 0.56")
    assert shown["reward"].endswith("0.30 in 5 steps, 0.20 at first")


def test_success_in_training_is_that_of_the_policy_and_weighted_by_episodes() -> None:
    def line(phase: str, rate: float | None, episodes: int = 8) -> Line:
        return LINE | {"phase": phase, "success_rate": rate, "episodes": episodes}

    few, many = line("rl", 1.0, 1), line("rl", 0.0, 3)
    assert Files([line("imitation", 1.0), few, many, line("rl", None, 0)]).success == TrainingMeans(
        3, 0.25, 0.25
    )
    assert Files([*[line("rl", 0.0)] * 5, *[line("rl", 0.5)] * 5]).success == TrainingMeans(
        5, 0.0, 0.5
    )
    assert Files([line("imitation", 1.0)]).success == TrainingMeans(0, None, None)


LEDGER: dict[str, Any] = {
    "step": 1,
    "version": 1,
    "lineage": 0,
    "trained": [[1, "train-00000000"], [4, "demo-00000000"]],
    "dropped": [[2, "train-00000001", "stale"]],
    "voids": [[3, "train-00000002"]],
}


def test_plays_of_the_test_split_are_counted_whoever_played_it() -> None:
    """An evaluation that names no split is of a release that had no other to evaluate on."""
    older = {key: value for key, value in EVAL.items() if key != "split"}
    evals = [older, EVAL, EVAL | {"split": "test"}]
    played = {"split": "test", "version": 4}
    view = RunView("r", files=Files(evals=evals, tests=[played, played]))
    assert view.tests == 4
    assert dict(learning(view))["test split"] == "played 4 times"
    assert "test split" not in dict(learning(RunView("r", files=Files(evals=[EVAL]))))


def test_the_ends_of_tickets_are_counted_by_the_broker_or_else_by_the_files() -> None:
    view = RunView("r", files=Files(ledger=[LEDGER], evals=[EVAL]))
    assert [str(end) for end in view.files.ends()] == [
        "trained into version 1",
        "trained into version 1",
        "dropped: stale",
        "void",
        "evaluation of version 4",
        "evaluation of version 4",
    ]
    assert view.outcomes[Kind.TRAIN] == Outcomes(trained=1, dropped={DropReason.STALE: 1}, void=1)
    assert dict(view.accounts()) == {
        Kind.DEMO: "1 trained + 0 dropped + 0 void",
        Kind.TRAIN: "1 trained + 1 dropped (stale 1) + 1 void",
        Kind.EVAL: "1 evaluated + 0 dropped + 1 void",
    }
    reported = progress(3).model_copy(update={"outcomes": {Kind.TRAIN: Outcomes(trained=7)}})
    broker = broker_status(CONFIG, reported, issued=dict.fromkeys(Kind, 9))
    asked = RunView("r", CONFIG, files=view.files, broker=broker)
    assert dict(asked.accounts()) == {
        Kind.TRAIN: "9 issued = 7 trained + 0 dropped + 0 void + 2 outstanding"
    }


def test_the_time_left_is_that_of_the_last_steps_and_of_the_present_phase() -> None:
    config = RunConfig.load([], ["--imitation.steps=4", "--rl.steps=10"])

    def left(step: int, *lines: Line) -> tuple[float | None, str]:
        view = RunView("r", config, files=Files([*lines[:-1], dict(lines[-1]) | {"step": step}]))
        return view.seconds_left, view.time_left

    imitation = [LINE | {"phase": "imitation", "step_s": 1.0, "wait_s": 1.0}] * 3
    assert left(3, *imitation) == (2.0, "about 2 s of imitation left")
    assert left(4, *imitation) == (None, ""), "RL's pace is not known yet"
    slow, quick = LINE | {"step_s": 900.0}, LINE | {"step_s": 9.0, "wait_s": 1.0}
    assert left(10, *imitation, slow, *[quick] * 5) == (40.0, "about 40 s left")
    assert left(14, *imitation, quick)[1] == ""
