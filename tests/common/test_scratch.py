import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from horizonrl.common.scratch import scratch

OWNER = """
import sys
from pathlib import Path
from horizonrl.common.scratch import scratch

with scratch(Path(sys.argv[1])) as place:
    (place / "frame").write_bytes(bytes(1 << 20))
    print(place, flush=True)
    sys.stdin.readline()
"""


def test_a_directory_is_removed_with_its_owner_and_that_of_a_killed_one_by_the_next(
    tmp_path: Path,
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        frame = Path(owner.stdout.readline().strip()) / "frame"
        with scratch(tmp_path) as own:
            assert frame.exists(), "its owner lives"
            (own / "file").touch()
        assert not own.exists()
        owner.kill()
    assert frame.exists()
    with scratch(tmp_path) as own:
        assert list(tmp_path.iterdir()) == [own]
    assert not list(tmp_path.iterdir())


def test_what_somebody_sweeps_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, made = tempfile.mkdtemp, list[str]()

    def swept_once(prefix: str, dir: Path) -> str:
        made.append(real(prefix=prefix, dir=dir))
        if len(made) == 1:
            os.rmdir(made[0])
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", swept_once)
    with scratch(tmp_path) as place:
        assert str(place) == made[1]
