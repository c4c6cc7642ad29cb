"""What a tracker gets of a run, read back from what the real packages wrote."""

import asyncio
import importlib.util
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import MissingDependency, RunFailed
from horizonrl.common.metrics import Metrics
from horizonrl.common.types import Phase, PolicyVersion
from horizonrl.learner.intake.collector import PendingBatch
from horizonrl.learner.records.checkpoint import CheckpointStore
from horizonrl.learner.records.journal import Journal
from horizonrl.learner.records.report import metrics_line
from horizonrl.ops.cli.main import main
from horizonrl.ops.observe import trackers
from horizonrl.ops.observe.tracking import _only_tracker, tracked
from horizonrl.ops.rundir.directory import write_config
from tests.learner.records.test_journal import STATS, TIMES
from tests.ops.report.runs import evaluation
from tests.records import make_group

needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None,
    reason="tensorboard is not installed: horizonrl[tensorboard]",
)
needs_wandb = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None, reason="wandb is not installed: horizonrl[wandb]"
)
needs_trackio = pytest.mark.skipif(
    importlib.util.find_spec("trackio") is None,
    reason="trackio is not installed: horizonrl[trackio]",
)


@pytest.fixture(autouse=True)
def _files_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers sort the event files of one second and process by a number, as text: 10 would come before 9."""
    if importlib.util.find_spec("tensorboard") is not None:
        from tensorboard.summary.writer import event_file_writer

        monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))


class Learner:
    """Writes what a learner writes, without learning."""

    def __init__(self, config: RunConfig) -> None:
        self.directory = config.run_dir
        write_config(config)
        self._journal = Journal(config.run_dir)
        self._checkpoints = CheckpointStore(config.run_dir / "checkpoints", keep=2)

    def step(self, number: int, reward: float, lineage: int = 0, phase: Phase = Phase.RL) -> None:
        group = make_group(number, rewards=(reward, 0.0))
        ticket = group.ticket.model_copy(update={"kind": phase.kind})
        group = group.model_copy(update={"ticket": ticket})
        draft = PendingBatch(admitted=[(number, group)], consumed=[group])
        policy, times = (
            PolicyVersion(version=number, lineage=lineage),
            replace(TIMES, ended_at=1e9 + 60 * number),
        )
        self._journal.write_metrics(metrics_line(phase, policy, draft, STATS, times))

    def evaluate(self, version: int, successes: int, settled_step: int) -> None:
        self._journal.write_evaluation(evaluation(version, successes, settled_step))

    def checkpoint(self, step: int) -> None:
        self._checkpoints.write(step, lambda place: None, {})

    def resume(self, step: int) -> None:
        self._journal.rewind(step)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return RunConfig.load(
        [], [f"--run.root={tmp_path}", "--rl.steps=8", "--tracker.kind=tensorboard"]
    )


def follow(learner: Learner, *overrides: str) -> None:
    assert main(["track", str(learner.directory), *overrides]) == 0


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Return every tag's points as TensorBoard itself shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    shown.Reload()
    return {
        tag: [(event.step, round(event.value, 4)) for event in shown.Scalars(tag)]
        for tag in shown.Tags()["scalars"]
    }


def play(learner: Learner, *overrides: str) -> None:
    """Be killed after step 6 of 8 with a checkpoint at 4; be tracked at every turn."""
    for step in range(1, 5):
        learner.step(step, reward=1.0)
    learner.evaluate(0, 16, settled_step=2)
    learner.checkpoint(4)
    learner.step(5, reward=0.0)
    learner.evaluate(3, 63, settled_step=6)
    learner.step(6, reward=0.0)
    follow(learner, *overrides)
    learner.resume(4)
    follow(learner, *overrides)
    for step in range(5, 9):
        learner.step(step, reward=2.0, lineage=1)
    learner.evaluate(3, 32, settled_step=6)
    learner.checkpoint(8)
    follow(learner, *overrides)
    learner.evaluate(8, 64, settled_step=9)
    follow(learner, *overrides)
    follow(learner, *overrides)


@needs_tensorboard
def test_a_resumed_learner_continues_the_same_run_and_no_step_is_there_twice_or_was_rolled_back(
    config: RunConfig,
) -> None:
    learner = Learner(config)
    play(learner)
    shown = scalars(learner.directory / "tracker" / "tensorboard")
    assert shown["train/reward_mean"] == [(step, 0.5 if step <= 4 else 1.0) for step in range(1, 9)]
    assert shown["train/lineage"] == [(step, float(step > 4)) for step in range(1, 9)]
    assert [step for step, _ in shown["horizon/textcraft"]] == list(range(1, 9))
    assert shown["eval/success_rate"] == [(0, 0.25), (3, 0.5), (8, 1.0)], (
        "at the version that was judged"
    )
    assert shown["eval/low"][0][1] < 0.25 < shown["eval/high"][0][1]
    assert "train/staleness_mean" in shown and "env/textcraft/success_rate" in shown
    assert "train/reference_kl" not in shown, "what was not measured is no point"


@needs_tensorboard
def test_points_have_the_time_of_the_run_and_imitation_is_tracked_apart_from_rl(
    config: RunConfig,
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    learner = Learner(config)
    for step in range(1, 9):
        learner.step(step, reward=1.0, phase=Phase.IMITATION if step <= 3 else Phase.RL)
    for version, successes in ((0, 0), (3, 16), (6, 32), (8, 48)):
        learner.evaluate(version, successes, settled_step=version)
    learner.checkpoint(8)
    follow(learner)
    directory = learner.directory / "tracker" / "tensorboard"
    shown = scalars(directory)
    assert [step for step, _ in shown["imitation/loss"]] == [1, 2, 3]
    assert [step for step, _ in shown["train/loss"]] == [4, 5, 6, 7, 8]
    for name in ("env/textcraft/success_rate", "horizon/textcraft"):
        assert [step for step, _ in shown[f"imitation/{name}"]] == [1, 2, 3]
        assert [step for step, _ in shown[name]] == [4, 5, 6, 7, 8]
    stages = {
        name: shown[f"eval/{name}"] for name in ("before_training", "after_imitation", "after_rl")
    }
    assert stages == {
        "before_training": [(0, 0.0)],
        "after_imitation": [(3, 0.25)],
        "after_rl": [(6, 0.5), (8, 0.75)],
    }
    stored = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    stored.Reload()
    assert [event.wall_time for event in stored.Scalars("train/loss")] == [
        1e9 + 60 * step for step in range(4, 9)
    ]
    assert [event.wall_time for event in stored.Scalars("eval/low")] == [
        1e9 + 60 * step for step in (0, 3, 6, 8)
    ]


@needs_tensorboard
def test_steps_that_no_checkpoint_holds_are_not_tracked_yet(config: RunConfig) -> None:
    learner = Learner(config)
    learner.step(1, reward=1.0)
    follow(learner)
    assert scalars(learner.directory / "tracker" / "tensorboard") == {}


@needs_tensorboard
def test_what_a_killed_tracker_wrote_but_did_not_note_is_not_shown_twice(config: RunConfig) -> None:
    learner = Learner(config)
    for step in range(1, 5):
        learner.step(step, reward=1.0)
    learner.checkpoint(4)
    follow(learner)
    noted = learner.directory / "tracker" / "tensorboard.json"
    noted.write_text(json.dumps({**json.loads(noted.read_text()), "step": 3}))
    follow(learner)
    assert [
        step for step, _ in scalars(learner.directory / "tracker" / "tensorboard")["train/loss"]
    ] == [1, 2, 3, 4]


@needs_tensorboard
def test_a_line_that_comes_after_its_checkpoint_is_tracked_when_it_comes(config: RunConfig) -> None:
    learner = Learner(config)
    learner.step(1, reward=1.0)
    learner.checkpoint(2)
    follow(learner)
    learner.step(2, reward=1.0)
    follow(learner)
    assert [
        step for step, _ in scalars(learner.directory / "tracker" / "tensorboard")["train/loss"]
    ] == [1, 2]


def wandb_rows(directory: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield run id and row of everything that wandb would send."""
    from wandb.proto import wandb_internal_pb2

    for file in sorted(directory.rglob("run-*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        run = ""
        for stored in leveldb_records(file.read_bytes()[7:]):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(stored)
            run = record.run.run_id or run
            if record.history.item:
                items = {
                    item.key or item.nested_key[0]: json.loads(item.value_json)
                    for item in record.history.item
                }
                yield run, items


def leveldb_records(log: bytes) -> Iterator[bytes]:
    """Yield the records of a LevelDB log, which a .wandb file is after its seven bytes of header."""
    at, record = 0, b""
    while at + 7 <= len(log):
        left = 32768 - (at + 7) % 32768
        if left < 7:
            at += left
            continue
        size, kind = int.from_bytes(log[at + 4 : at + 6], "little"), log[at + 6]
        record += log[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


@pytest.mark.slow
@needs_wandb
def test_wandb_offline_holds_one_run_with_every_step_once(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    learner = Learner(config)
    command = [
        sys.executable,
        "-m",
        "horizonrl.ops.cli.main",
        "track",
        str(learner.directory),
        "--tracker.kind=wandb",
    ]
    monkeypatch.setattr(
        f"{__name__}.follow",
        lambda *_: subprocess.run(command, check=True, capture_output=True, timeout=120),
    )
    play(learner)
    rows = list(wandb_rows(learner.directory / "tracker" / "wandb"))
    steps, rewards = defaultdict(list), {}
    for _, row in rows:
        for name in row:
            steps[name].append(row["step"])
        if "train/reward_mean" in row:
            rewards[row["step"]] = row["train/reward_mean"]
    assert len({run for run, _ in rows}) == 1
    assert steps["train/reward_mean"] == list(range(1, 9))
    assert rewards == {step: 0.5 if step <= 4 else 1.0 for step in range(1, 9)}
    assert steps["eval/success_rate"] == [0, 3, 8]
    assert [row["_step"] for _, row in rows] == list(range(11)), (
        "wandb refuses a step that does not grow"
    )
    assert {row["_timestamp"] - 60 * row["step"] for _, row in rows} == {1e9}


@pytest.mark.slow
@needs_trackio
def test_trackio_holds_one_run_with_every_step_once(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = os.environ | {
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "TRACKIO_SPACE_ID": "nobody/nowhere",
    }
    learner = Learner(config)
    command = [
        sys.executable,
        "-m",
        "horizonrl.ops.cli.main",
        "track",
        str(learner.directory),
        "--tracker.kind=trackio",
    ]
    monkeypatch.setattr(
        f"{__name__}.follow",
        lambda *_: subprocess.run(
            command, check=True, capture_output=True, timeout=120, env=environment
        ),
    )
    play(learner)
    database = sqlite3.connect(tmp_path / "trackio" / "horizonrl.db")
    rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step").fetchall()
    database.close()
    assert len({run for run, _, _ in rows}) == 1
    assert [step for _, step, shown in rows if "train/loss" in json.loads(shown)] == list(
        range(1, 9)
    )


def test_a_tracker_that_is_not_installed_is_named_with_its_cure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"pip install 'horizonrl\[wandb\]'"):
        trackers.require("wandb")
    trackers.require(None)


def test_nothing_is_tracked_unless_it_is_asked_for(tmp_path: Path) -> None:
    config = RunConfig.load([], [f"--run.root={tmp_path}"])
    write_config(config)

    async def learn() -> None:
        async with tracked(config, Metrics("learner")):
            pass

    asyncio.run(learn())
    assert [path.name for path in config.run_dir.iterdir()] == ["config.toml"]
    assert main(["track", str(config.run_dir)]) == 2


@needs_tensorboard
def test_the_learner_has_its_tracker_beside_it_and_the_last_step_is_tracked_when_it_ends(
    config: RunConfig,
) -> None:
    learner, metrics = Learner(config), Metrics("learner")

    async def learn() -> None:
        async with tracked(config, metrics):
            for step in range(1, 9):
                learner.step(step, reward=1.0)
            learner.checkpoint(8)
            noted = learner.directory / "tracker" / "tensorboard.json"
            async with asyncio.timeout(60):  # ended at once, it would not yet listen for SIGTERM
                while not noted.exists():
                    await asyncio.sleep(0.05)

    asyncio.run(learn())
    assert metrics.value("tracker_failures_total") == 0
    assert [
        step for step, _ in scalars(learner.directory / "tracker" / "tensorboard")["train/loss"]
    ] == [*range(1, 9)]


@pytest.mark.parametrize("how", ["broken", "killed", "stuck"])
def test_a_tracker_that_fails_is_counted_once_and_changes_nothing_for_the_learner(
    config: RunConfig, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = {
        "broken": "raise SystemExit('no route to the tracker')",
        "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "stuck": "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=1); time.sleep(60)",
    }[how]
    real = asyncio.create_subprocess_exec

    async def start(executable: str, *_: str, **options: Any) -> asyncio.subprocess.Process:
        return await real(executable, "-c", program, **options)

    monkeypatch.setattr("horizonrl.ops.observe.tracking.asyncio.create_subprocess_exec", start)
    monkeypatch.setattr("horizonrl.ops.observe.tracking.END_S", 0.2)
    Learner(config)
    metrics, log_file = Metrics("learner"), config.run_dir / "logs" / "tracker.log"

    async def learn() -> str:
        async with tracked(config, metrics), asyncio.timeout(20):
            while not (
                log_file.stat().st_size
                if how == "stuck"
                else metrics.value("tracker_failures_total")
            ):
                await asyncio.sleep(0.02)
            return "learned"

    (config.run_dir / "logs").mkdir()
    log_file.touch()
    assert asyncio.run(learn()) == "learned"
    assert metrics.value("tracker_failures_total") == 1


def test_an_error_of_the_learner_is_not_changed_by_the_tracker_beside_it(config: RunConfig) -> None:
    Learner(config)

    async def learn() -> None:
        async with tracked(config, Metrics("learner")):
            raise RunFailed("the learner's own")

    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(learn())
    assert str(raised.value.exceptions[0]) == "the learner's own"


def test_a_run_is_tracked_by_one_process_at_a_time(
    config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    learner = Learner(config)
    with _only_tracker(learner.directory / "tracker", wait=False):
        assert main(["track", str(learner.directory)]) == 1
    assert "is already being tracked by the run's learner" in capsys.readouterr().err


@needs_tensorboard
def test_a_tracker_that_is_told_to_end_takes_what_there_is_and_ends_well(config: RunConfig) -> None:
    learner = Learner(config)
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "horizonrl.ops.cli.main",
            "track",
            str(learner.directory),
            "--follow",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while not (learner.directory / "tracker" / "tensorboard.json").exists():
        assert process.poll() is None
    learner.step(1, reward=1.0)
    learner.checkpoint(1)
    process.send_signal(signal.SIGTERM)
    shown, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "1 points of textcraft tracked, in all to step 1" in shown


@needs_tensorboard
def test_a_run_whose_checkpoints_a_study_has_removed_is_tracked_whole(config: RunConfig) -> None:
    learner = Learner(config)
    learner.step(1, reward=1.0)
    (learner.directory / "checkpoints").rmdir()
    follow(learner)
    shown = scalars(learner.directory / "tracker" / "tensorboard")
    assert [step for step, _ in shown["train/reward_mean"]] == [1]
    assert not (learner.directory / "checkpoints").exists()
