"""Whatever the moment of a crash, the newest checkpoint is a complete one."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horizonrl.common.errors import CheckpointError
from horizonrl.learner.records import checkpoint as checkpoint_module
from horizonrl.learner.records.checkpoint import STATE_FILE, CheckpointStore, opened


def files(content: str) -> Callable[[Path], None]:
    def save(directory: Path) -> None:
        (directory / "inner").mkdir()
        (directory / "weights").write_text(content)
        (directory / "inner" / "optimizer").write_text(content * 2)

    return save


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path, keep=2)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_new_run_has_no_checkpoint(store: CheckpointStore) -> None:
    assert store.newest() is None and store.all() == []


def test_the_newest_checkpoint_gives_back_files_and_state(
    store: CheckpointStore, tmp_path: Path
) -> None:
    path = store.write(7, files("a"), {"cursor": 41})
    newest = store.newest()
    assert newest is not None and newest == opened(path)
    assert (newest.step, newest.path, newest.state) == (7, tmp_path / "step-000007", {"cursor": 41})
    assert (path / "inner" / "optimizer").read_text() == "aa"


@given(
    keep=st.integers(1, 4),
    steps=st.lists(st.integers(0, 2_000_000), min_size=1, max_size=6, unique=True).map(sorted),
)
def test_the_newest_few_are_kept_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, keep: int, steps: list[int]
) -> None:
    root = tmp_path_factory.mktemp("checkpoints")
    store = CheckpointStore(root, keep=keep)
    for step in steps:
        store.write(step, files("a"), {"step": step})
    assert [checkpoint.step for checkpoint in store.all()] == steps[::-1][:keep]
    assert len(names(root)) == min(keep, len(steps))


def test_what_a_killed_learner_had_written_makes_room_before_the_next_is_written(
    tmp_path: Path,
) -> None:
    for name in (".incoming-step-000013", ".outgoing-step-000004"):
        (tmp_path / name).mkdir()
    store = CheckpointStore(tmp_path, keep=1)
    with store.filling(15):
        assert names(tmp_path) == [".incoming-step-000015"]


def test_a_save_that_raises_leaves_the_earlier_one(store: CheckpointStore, tmp_path: Path) -> None:
    store.write(1, files("a"), {})

    def broken(directory: Path) -> None:
        (directory / "weights").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        store.write(2, broken, {})
    assert [checkpoint.step for checkpoint in store.all()] == [1]
    store.write(3, files("c"), {})
    assert names(tmp_path) == ["step-000001", "step-000003"], "the leftover of step 2 is gone"


def test_a_state_that_is_not_json_is_refused(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match="plain values"):
        store.write(1, files("a"), {"path": Path()})
    assert store.newest() is None


@pytest.mark.parametrize("damage", ["state", "missing", "short", "no_state"])
def test_a_damaged_checkpoint_is_passed_over(store: CheckpointStore, damage: str) -> None:
    store.write(1, files("a"), {})
    path = store.write(2, files("b"), {})
    match damage:
        case "state":
            (path / STATE_FILE).write_text((path / STATE_FILE).read_text()[:-20])
        case "missing":
            (path / "inner" / "optimizer").unlink()
        case "short":
            (path / "weights").write_text("")
        case "no_state":
            (path / STATE_FILE).unlink()
    newest = store.newest()
    assert newest is not None and newest.step == 1
    with pytest.raises(CheckpointError, match="choose another"):
        opened(path)


def test_the_only_good_checkpoint_outlives_damaged_newer_ones(
    store: CheckpointStore, tmp_path: Path
) -> None:
    store.write(1, files("a"), {})
    for step in (2, 3):
        (store.write(step, files("b"), {}) / STATE_FILE).unlink()
        newest = store.newest()
        assert newest is not None and newest.step == 1
    store.write(4, files("d"), {})
    assert [checkpoint.step for checkpoint in store.all()] == [4, 1]


def test_a_step_is_never_written_over(store: CheckpointStore) -> None:
    store.write(1, files("a"), {})
    with pytest.raises(CheckpointError, match="exists already"):
        store.write(1, files("b"), {})


def test_a_damaged_directory_gives_way_to_the_same_step(store: CheckpointStore) -> None:
    (store.write(1, files("a"), {}) / STATE_FILE).unlink()
    store.write(1, files("b"), {})
    newest = store.newest()
    assert newest is not None and (newest.path / "weights").read_text() == "b"


def test_a_store_that_keeps_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep at least 1"):
        CheckpointStore(tmp_path, keep=0)


def test_the_state_is_written_after_all_files_are_durable(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []

    def spy(path: Path) -> None:
        synced.append(path.name)
        if path.name in ("weights", "optimizer"):
            assert not list(path.parents[1].glob(f"**/{STATE_FILE}"))

    monkeypatch.setattr(checkpoint_module, "sync", spy)
    path = store.write(1, files("a"), {})
    assert set(synced[:2]) == {"weights", "optimizer"} and synced[2] == STATE_FILE
    assert json.loads((path / STATE_FILE).read_text())["files"] == {
        "weights": 1,
        "inner/optimizer": 2,
    }


CRASH = """
import os, signal, sys
from pathlib import Path
from horizonrl.learner.records.checkpoint import CheckpointStore

calls, fatal = 0, int(sys.argv[2])

def count(event, arguments):
    global calls
    if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir") and sys.argv[1] in str(arguments[0]):
        calls += 1
        if calls == fatal:
            os.kill(os.getpid(), signal.SIGKILL)

def save(directory):
    (directory / "inner").mkdir()
    for name in ("weights", "inner/optimizer"):
        (directory / name).write_text("x" * 100)

store = CheckpointStore(Path(sys.argv[1]), keep=1)
sys.addaudithook(count)
for step in range(2, 5):
    store.write(step, save, {"step": step})
print(calls)
"""


def crash(root: Path, operation: int) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", CRASH, str(root), str(operation)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.process
def test_a_kill_at_any_file_operation_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    CheckpointStore(tmp_path / "whole", keep=1).write(1, files("a"), {"step": 1})
    operations = int(crash(tmp_path / "whole", operation=-1).stdout)
    assert operations > 40
    for operation in range(1, operations + 1, 3):
        root = tmp_path / str(operation)
        store = CheckpointStore(root, keep=1)
        store.write(1, files("a"), {"step": 1})
        assert crash(root, operation).returncode == -signal.SIGKILL
        newest = store.newest()
        assert newest is not None and newest.state == {"step": newest.step}
        store.write(newest.step + 1, files("b"), {"step": newest.step + 1})
        assert names(root) == [f"step-{newest.step + 1:06d}"], (
            f"leftovers of a kill at operation {operation} remain"
        )


@pytest.mark.parametrize(
    "error", [OSError(28, os.strerror(28)), RuntimeError("unexpected pos 576 vs 534")], ids=type
)
def test_a_full_disk_says_so_and_gets_its_room_back(
    store: CheckpointStore, tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(directory: Path) -> None:
        (directory / "weights").write_text("half")
        raise error

    store.write(1, files("a"), {})
    if isinstance(error, RuntimeError):  # torch's word for it: only the room that is left tells
        with pytest.raises(RuntimeError, match="unexpected pos"):
            store.write(2, full, {})
        monkeypatch.setattr(checkpoint_module, "FULL_BYTES", 1 << 62)
    with pytest.raises(
        CheckpointError, match=rf"the disk of {tmp_path} is full, .* resume from step 1"
    ):
        store.write(2, full, {})
    assert names(tmp_path) == ["step-000001"]
