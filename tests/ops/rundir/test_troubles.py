"""What broke is told from the logs as the parts write them."""

import re
from pathlib import Path

import pytest

from horizonrl.common.config.schema import RunConfig
from horizonrl.ops.rundir.logfiles import shorten
from horizonrl.ops.rundir.troubles import DETAILS, TROUBLES, TroubleReader, collect
from tests.ops.runs import write_log

ROOT = Path(__file__).parents[3]
LOGGED = re.compile(r'(?:log\.(?:warning|error)|end_process)\(\s*"([a-z_]+)"')
NAMED = re.compile(r'"((?:loop|stop|close)_[a-z]+)"')
"""Events that `common/service.py` hands to the function that writes them."""


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return RunConfig.load([], [f"--run.root={tmp_path}"])


def test_every_warning_and_error_of_the_program_has_its_sentence() -> None:
    sources = [
        path
        for package in ("actors", "broker", "common", "envs", "learner")
        for path in (ROOT / package).rglob("*.py")
    ]
    texts = [
        path.read_text(encoding="utf-8")
        for path in (
            *sources,
            *(
                file
                for file in (ROOT / "ops").rglob("*.py")
                if ROOT / "ops/bench" not in file.parents
            ),
        )
    ]
    logged = {event for text in texts for event in LOGGED.findall(text)}
    logged |= set(NAMED.findall((ROOT / "common/service.py").read_text(encoding="utf-8")))
    # That one is of a wait, which the learner's progress describes better.
    assert logged - {"groups_awaited"} == set(TROUBLES)


def test_a_trouble_is_told_once_a_part_with_its_count_its_last_time_and_what_was_said(
    config: RunConfig,
) -> None:
    reader = TroubleReader(config.run_dir / "logs")
    write_log(config, "actor-0", "group_broken", 100.0, error="first")
    write_log(config, "actor-0", "weights_applied", 101.0)
    write_log(config, "actor-0", "Triton is installed, but ...", 101.0)
    write_log(config, "actor-0", "group_broken", 102.0, error="second")
    write_log(config, "learner", "batch_starved", 101.0, hint="other tasks", success_rate=1.0)
    broken, starved = collect(reader.events())
    assert (broken.part, broken.count, broken.last, broken.detail) == (
        "actor-0",
        2,
        102.0,
        "second",
    )
    assert (starved.event, starved.detail, starved.log_file.name) == (
        "batch_starved",
        "other tasks",
        "learner.log",
    )
    write_log(config, "actor-0", "group_broken", 110.0, error="third")
    assert [trouble.count for trouble in collect(reader.events(), [broken, starved])] == [3, 1]


def test_a_part_that_ended_is_looked_for_in_its_own_log(config: RunConfig) -> None:
    write_log(config, "learner", "service_opened", 1.0)
    write_log(config, "console", "part_ended", 2.0, part="learner", code=-9)
    (trouble,) = collect(TroubleReader(config.run_dir / "logs").events())
    assert (str(trouble), trouble.log_file.name) == (
        "learner: ended and was started again",
        "learner.log",
    )


def test_a_log_that_began_anew_is_read_from_there_and_its_writer_goes_on(config: RunConfig) -> None:
    reader = TroubleReader(config.run_dir / "logs")
    write_log(
        config,
        "learner",
        "batch_starved",
        1.0,
        hint="a long text that makes the log longer than it may be",
    )
    log = config.run_dir / "logs" / "learner.log"
    size = log.stat().st_size
    with log.open("ab") as writer:  # as `train` opens it for a part
        assert len(collect(reader.events())) == 1
        shorten(log, size)
        assert log.stat().st_size == size
        shorten(log, size - 1)
        assert log.stat().st_size == 0
        assert log.with_name("learner.log.1").stat().st_size == size
        writer.write(b'{"event": "role_failed", "timestamp": "2026-01-01T00:00:00Z"}\n')
    assert [trouble.event for trouble in collect(reader.events())] == ["role_failed"]
    shorten(log, 0)
    assert sorted(path.name for path in log.parent.iterdir()) == ["learner.log", "learner.log.1"]


def test_what_an_earlier_session_met_is_not_told(config: RunConfig) -> None:
    for when in (1.0, 3.0):
        write_log(config, "actor-0", "lease_lost", when)
    write_log(config, "console", "train_started", 2.0)
    (trouble,) = collect(TroubleReader(config.run_dir / "logs").events())
    assert (trouble.count, trouble.last) == (1, 3.0)


def test_a_line_that_is_half_written_or_no_json_is_left_alone(config: RunConfig) -> None:
    reader = TroubleReader(config.run_dir / "logs")
    write_log(config, "learner", "role_failed", 1.0, reason="it broke")
    log = config.run_dir / "logs/learner.log"
    whole = log.read_bytes()
    log.write_bytes(b'{"event": 5}\n{not json}\n' + whole[:-20])
    assert collect(reader.events()) == []
    log.write_bytes(b'{"event": 5}\n{not json}\n' + whole)
    assert [trouble.detail for trouble in collect(reader.events())] == ["it broke"]
    assert "reason" in DETAILS
