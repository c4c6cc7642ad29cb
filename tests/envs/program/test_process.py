"""A program's process: its limits, what it sees of ours, and that nothing of it is left, whoever is killed."""

import asyncio
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from horizonrl.common.errors import EnvironmentFailure, EnvironmentTimeout
from horizonrl.envs.program.process import Ended, Limits, clean_environment, run_program

LIMITS = Limits(30.0, 1 << 30)
STAY = "import time; time.sleep(600)"
# A program whose child left its process group, and whose grandchild lost its parent.
ESCAPE = f"""
import os, subprocess, sys, time
away = [sys.executable, "-c", {STAY!r}]
children = [subprocess.Popen(away), subprocess.Popen(away, start_new_session=True)]
if os.fork() == 0:
    os.setsid()
    print(subprocess.Popen(away).pid, flush=True)
    os._exit(0)
os.wait()
print(*(child.pid for child in children), os.getpid(), flush=True)
"""


def program(directory: Path, code: str, limits: Limits = LIMITS) -> Ended:
    argv = [sys.executable, "-c", code]
    (directory / "out").unlink(missing_ok=True)
    return asyncio.run(
        run_program(argv, directory, clean_environment(directory), directory / "out", limits)
    )


def left(pids: list[int]) -> list[int]:
    """Return the processes that are still there, once those that were killed had time to go."""
    deadline = time.monotonic() + 20.0
    while (alive := [pid for pid in pids if _runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return alive


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def printed(file: Path, count: int) -> list[int]:
    """Wait until a program has printed that many numbers, and return them."""
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline:
        if file.is_file() and len(numbers := file.read_text().split()) >= count:
            return [int(number) for number in numbers]
        time.sleep(0.02)
    raise AssertionError(f"{file} has not got {count} numbers")


def test_a_program_sees_nothing_of_our_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HORIZONRL_BROKER__NATS__PASSWORD", "secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    ended = program(tmp_path, "import json, os; print(json.dumps([dict(os.environ), os.getcwd()]))")
    seen, directory = json.loads(ended.last_words())
    assert (ended.code, directory) == (0, str(tmp_path))
    assert set(seen) - {"LC_CTYPE"} == {"PATH", "HOME", "TMPDIR", "LANG"}
    assert "secret" not in json.dumps(seen)


def test_a_program_has_no_files_of_ours_open(tmp_path: Path) -> None:
    with (tmp_path / "ours").open("w"):
        ended = program(tmp_path, "import os; print(len(os.listdir('/proc/self/fd')))")
    assert ended.last_words() == "4", "stdin, stdout, stderr, and the directory that is listed"


def test_the_exit_code_and_the_last_words_are_told(tmp_path: Path) -> None:
    ended = program(tmp_path, "import sys; print('é' * 9000); sys.exit('the kitchen is on fire')")
    assert (ended.code, ended.last_words().endswith("the kitchen is on fire")) == (1, True)
    killed = program(tmp_path, "import os; os.kill(os.getpid(), 9)")
    assert killed.code == 128 + signal.SIGKILL


def test_a_command_that_is_not_there_says_so(tmp_path: Path) -> None:
    ended = asyncio.run(
        run_program(["no-such-program"], tmp_path, {"PATH": "/bin"}, tmp_path / "out", LIMITS)
    )
    assert ended.code == 127
    assert "no-such-program" in ended.last_words()


def test_memory_is_limited(tmp_path: Path) -> None:
    ended = program(tmp_path, "bytearray(2 << 30)")
    assert ended.code == 1
    assert "MemoryError" in ended.last_words()


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_addresses_that_are_only_reserved_are_not_memory(tmp_path: Path) -> None:
    script = (
        "const server = require('http').createServer((_, answer) => answer.end('served')).listen(0, '127.0.0.1',"
        "async () => { const url = 'http://127.0.0.1:' + server.address().port;"
        "console.log(await (await fetch(url)).text()); server.close(); });"
    )
    ended = asyncio.run(
        run_program(
            ["node", "-e", script], tmp_path, clean_environment(tmp_path), tmp_path / "out", LIMITS
        )
    )
    assert (ended.code, ended.last_words()) == (0, "served")
    mapped = "import mmap; mmap.mmap(-1, 64 << 30, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 0); print('mapped')"
    assert program(tmp_path, mapped).last_words() == "mapped"


def test_what_a_program_leaves_is_ended_in_time_that_grows_with_their_number_only(
    tmp_path: Path,
) -> None:
    children = (
        "import os, time\nfor _ in range(800):\n    if os.fork() == 0:\n        time.sleep(600)\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert program(tmp_path, f"{children}print(os.getpid())").code == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3.0


# Each process starts the next one and ends: no list of processes holds the one that is alive. It ends by itself.
CHAIN = """
#include <stdio.h>
#include <unistd.h>
int main(void) {
    for (int links = 0; links < 100000; links++) {
        SETSID
        if (fork() != 0) _exit(0);
    }
    FILE *end = fopen("end", "w");
    fclose(end);
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("setsid", ["", "setsid();"], ids=["one group", "a session each"])
def test_a_chain_of_processes_that_end_at_once_is_caught(tmp_path: Path, setsid: str) -> None:
    (tmp_path / "chain.c").write_text(CHAIN.replace("SETSID", setsid))
    subprocess.run(["cc", "-o", "chain", "chain.c"], cwd=tmp_path, check=True)
    started = time.monotonic()
    program(
        tmp_path,
        "import subprocess, time; subprocess.Popen('./chain', start_new_session=True); time.sleep(0.3)",
    )
    assert time.monotonic() - started < 20.0
    time.sleep(0.5)
    assert not [each for each in psutil.process_iter(["name"]) if each.info["name"] == "chain"]
    assert not (tmp_path / "end").exists(), "it was not waited for"


def test_a_program_that_kills_its_keeper_takes_all_with_it(tmp_path: Path) -> None:
    unmarked = f"""
import os, signal, subprocess, sys, time
stray = subprocess.Popen([sys.executable, "-c", {STAY!r}], env={{}}, start_new_session=True, cwd="/")
print(stray.pid, flush=True)
os.kill(os.getppid(), signal.SIGKILL)
time.sleep(600)
"""
    with pytest.raises(EnvironmentFailure, match="killed by signal 9"):
        program(tmp_path, unmarked)
    (stray,) = printed(tmp_path / "out", 1)
    assert left([stray]) == []


def test_a_program_that_takes_too_long_ends_with_all_that_it_started(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentTimeout, match="longer than 3 s"):
        program(tmp_path, ESCAPE + STAY, Limits(3.0, 1 << 30))
    assert left(printed(tmp_path / "out", 4)) == []


def test_what_a_program_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    assert program(tmp_path, ESCAPE).code == 0
    assert left(printed(tmp_path / "out", 4)) == []


def test_a_cancelled_run_leaves_nothing(tmp_path: Path) -> None:
    async def scenario() -> list[int]:
        argv = [sys.executable, "-c", ESCAPE + STAY]
        running = asyncio.create_task(
            run_program(argv, tmp_path, clean_environment(tmp_path), tmp_path / "out", LIMITS)
        )
        pids = await asyncio.to_thread(printed, tmp_path / "out", 4)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return pids

    assert left(asyncio.run(scenario())) == []


ACTOR = """
import asyncio, sys
from pathlib import Path
from horizonrl.envs.program.process import Limits, clean_environment, run_program
place = Path(sys.argv[1])
asyncio.run(run_program([sys.executable, "-c", sys.argv[2]], place, clean_environment(place), place / "out",
    Limits(600.0, 1 << 30)))
"""


@pytest.mark.process
@pytest.mark.parametrize("victim", ["actor", "keeper", "program"])
def test_whoever_is_killed_nothing_is_left(tmp_path: Path, victim: str) -> None:
    actor = subprocess.Popen([sys.executable, "-c", ACTOR, str(tmp_path), ESCAPE + STAY])
    try:
        pids = printed(tmp_path / "out", 4)
        keeper = psutil.Process(pids[-1]).ppid()
        os.kill({"actor": actor.pid, "keeper": keeper, "program": pids[-1]}[victim], signal.SIGKILL)
        assert left([*pids, keeper]) == []
    finally:
        actor.kill()
        actor.wait()
        for pid in pids:
            if _runs(pid):
                os.kill(pid, signal.SIGKILL)
