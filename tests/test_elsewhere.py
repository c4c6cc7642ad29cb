"""Tests that read and write files, run again where a user's machine may differ from the one that wrote them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[1]
PARTS = (
    "tests/common/test_files.py",
    "tests/common/test_locks.py",
    "tests/common/test_logs.py",
    "tests/common/test_scratch.py",
    "tests/common/test_types.py",
    "tests/envs/program/test_process.py",
    "tests/learner/records/test_journal.py",
    "tests/ops/rundir",
    "tests/ops/terminal",
)
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""A locale without UTF-8, which Python would replace with one that has it."""


def test_quick_tests_pass_in_ascii_without_a_home_under_a_strict_umask_and_in_another_tmpdir(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "temporary files"
    folder.mkdir()
    environment = {
        name: value for name, value in os.environ.items() if name not in ("HOME", "LANG")
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider", *PARTS],
        cwd=ROOT,
        env=environment | ASCII | {"TMPDIR": str(folder)},
        umask=0o077,
        capture_output=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr).decode(errors="replace")[-4_000:]
    assert b" passed" in done.stdout
