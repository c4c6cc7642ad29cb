import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from horizonrl.common.locks import open_locked, take_lock

HOLDER = """
import sys
from horizonrl.common.locks import take_lock

file = open(sys.argv[1], "a")
assert take_lock(file, shared=sys.argv[2] == "shared")
print("held", flush=True)
sys.stdin.readline()
"""


@contextmanager
def holder(path: Path, how: str) -> Iterator[subprocess.Popen[str]]:
    """Run a process that holds a lock, until the body kills it or ends."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_lock_keeps_others_out_until_its_holder_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with holder(path, "exclusive") as process, path.open() as file:
        for shared in (False, True):
            assert not take_lock(file, shared=shared)
            assert open_locked(path, shared=shared) is None
        process.kill()
        assert take_lock(file, wait=True)


def test_a_shared_lock_lets_other_shared_ones_in_and_no_exclusive_one(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with holder(path, "shared") as process, path.open() as file:
        assert take_lock(file, shared=True)
        assert not take_lock(file)
        process.kill()
        assert take_lock(file, wait=True)


def test_a_lock_lasts_as_long_as_a_process_that_inherited_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("w") as ours:
        assert take_lock(ours)
        heir = subprocess.Popen(["sleep", "60"], pass_fds=[ours.fileno()])
    try:
        assert open_locked(path) is None
    finally:
        heir.kill()
        heir.wait()
    lock = open_locked(path)
    assert lock is not None
    os.close(lock)


@pytest.mark.parametrize("made_again", [False, True])
def test_what_was_removed_between_its_opening_and_its_lock_counts_as_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_again: bool
) -> None:
    path, descriptors, real = tmp_path / "lock", list[int](), os.open
    path.touch()

    def open_removed(*arguments: object) -> int:
        descriptors.append(real(*arguments))  # type: ignore[arg-type]
        path.rename(tmp_path / "removed")
        if made_again:
            path.write_text("")  # not `touch`, which calls os.open
        return descriptors[-1]

    monkeypatch.setattr(os, "open", open_removed)
    assert open_locked(path) is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptors[0])


def test_a_missing_file_is_gone_and_a_forbidden_one_is_an_error(tmp_path: Path) -> None:
    assert open_locked(tmp_path / "absent") is None
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(OSError, match="symbolic links"):
        open_locked(tmp_path / "link", os.O_RDONLY | os.O_NOFOLLOW)
