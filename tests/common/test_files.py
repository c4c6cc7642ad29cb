import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from horizonrl.common.files import INCOMING, atomic_write, atomic_write_text, remove_unfinished

WRITER = """
import sys
from pathlib import Path
from horizonrl.common.files import atomic_write

with atomic_write(Path(sys.argv[1])) as incoming:
    incoming.write_text("half")
    print("writing", flush=True)
    sys.stdin.readline()
"""


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("rivals", [False, True])
@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_whole_and_nothing_else_stays(
    tmp_path: Path, durable: bool, rivals: bool
) -> None:
    path = tmp_path / "file"
    for text in ("one", "zwölf"):
        atomic_write_text(path, text, durable=durable, rivals=rivals)
        assert path.read_text(encoding="utf-8") == text
        assert names(tmp_path) == ["file"]


def test_a_writer_that_is_killed_leaves_the_old_file_and_the_next_one_writes_over_its_rest(
    tmp_path: Path,
) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    for _ in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdin=-1, stdout=-1, text=True
        ) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "writing\n"
            writer.kill()
        assert path.read_text() == "old"
        assert names(tmp_path) == [f".file{INCOMING}", "file"]
    atomic_write_text(path, "new")
    assert (path.read_text(), names(tmp_path)) == ("new", ["file"])


def test_a_disk_that_is_full_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            atomic_write_text(path, "x" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert (path.read_text(), names(tmp_path)) == ("old", ["file"])


def test_a_directory_appears_whole_and_one_that_a_killed_writer_left_is_begun_again(
    tmp_path: Path,
) -> None:
    left = tmp_path / f".model{INCOMING}"
    for _ in range(2):
        left.mkdir()
        (left / "half").touch()
        with pytest.raises(FileNotFoundError), atomic_write(tmp_path / "model"):
            (tmp_path / "absent").unlink()
        assert names(tmp_path) == []
    with atomic_write(tmp_path / "model") as incoming:
        incoming.mkdir()
        (incoming / "weights").touch()
    assert names(tmp_path) == ["model"]


def test_a_hard_link_that_a_killed_writer_left_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "frame").write_text("frame")
    os.link(tmp_path / "frame", tmp_path / f".file{INCOMING}")
    atomic_write_text(tmp_path / "file", "new")
    assert (tmp_path / "frame").read_text() == "frame"


def test_a_durable_write_syncs_the_bytes_before_the_name_and_the_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced, real = tmp_path / "file", list[tuple[str, bool]](), os.fsync

    def note(descriptor: int) -> None:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((name, path.exists()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    atomic_write_text(path, "not durable")
    path.unlink()
    assert synced == []
    atomic_write_text(path, "durable", durable=True)
    assert synced == [(f".file{INCOMING}", False), (tmp_path.name, True)]


def test_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    for name in (f".file{INCOMING}", f".file.0123{INCOMING}", "file", ".hidden"):
        (tmp_path / name).touch()
    (tmp_path / f".model{INCOMING}").mkdir()
    remove_unfinished(tmp_path)
    assert names(tmp_path) == [".hidden", "file"]
