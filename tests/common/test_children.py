"""A killed process leaves no child behind, whenever it is killed and however it started the child."""

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.processes import MARK, left_behind, marked

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        sys.platform != "linux", reason="the kernel's parent-death signal is Linux's"
    ),
]

WORK = """
import multiprocessing, os, time
if "SLOW" in os.environ:
    time.sleep(60)  # as vLLM takes seconds to import

def work(depth):
    if depth:
        multiprocessing.get_context(os.environ["METHOD"]).Process(target=work, args=(depth - 1,)).start()
    os.write(1, b"working\\n")  # at once: two write
    time.sleep(60)
"""
PARENT = """
import asyncio, multiprocessing, os, signal, subprocess, sys, time
from pathlib import Path
from horizonrl.common.children import children_bound
from horizonrl.common.processes import Child

async def program():
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, print)
    child = Child(["sleep", "60"], Path(os.devnull), 10)
    await child.start()
    print("working", flush=True)
    await child.wait()

if __name__ == "__main__":  # a spawned child imports this file before it asks
    import work
    method, slow = sys.argv[1:]
    print("starting", flush=True)
    if method == "program":
        asyncio.run(program())
    os.environ.update({"METHOD": method} | ({"SLOW": "1"} if slow == "slow" else {}))
    with children_bound():
        multiprocessing.get_context(method).Process(target=work.work, args=(1,)).start()
    assert multiprocessing.get_context(method).Process.__module__ == "multiprocessing.context"
    time.sleep(60)
"""


@pytest.mark.parametrize("await_work", [True, False], ids=["working", "starting"])
@pytest.mark.parametrize("method", ["program", "fork", "spawn"])
def test_a_child_ends_with_a_parent_that_is_killed(
    tmp_path: Path, method: str, await_work: bool
) -> None:
    (tmp_path / "work.py").write_text(WORK)
    (tmp_path / "parent.py").write_text(PARENT)
    mark = uuid.uuid4().hex
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "parent.py"), method, "quick" if await_work else "slow"],
        env=os.environ | {MARK: mark},
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as parent:
        try:
            assert parent.stdout is not None
            works = 1 if method == "program" else 2
            for line in ["starting", *["working"] * works * await_work]:
                assert parent.stdout.readline().decode() == f"{line}\n"
            while len(marked(mark)) < 2:
                assert parent.poll() is None
        finally:
            parent.kill()
    assert not left_behind(mark, within_s=10)


def test_a_child_whose_parent_has_died_before_it_could_ask_ends_at_once() -> None:
    program = "import os; from horizonrl.common.children import bind; bind(os.getppid() + 1); print('goes on')"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=False, timeout=20
    )
    assert (done.returncode, done.stdout) == (-15, b"")


def test_a_signal_handler_of_the_parent_does_not_swallow_its_end(tmp_path: Path) -> None:
    """Between fork and exec the child has its parent's handlers, and the parent may die there."""
    program = f"""
import os, signal, subprocess
from horizonrl.common import children
signal.signal(signal.SIGTERM, lambda *_: None)
real = children.os.getpid
children.os.getpid = lambda: real() + 1  # another parent than the one that forks
preexec = children.bound()
children.os.getpid = real
print(subprocess.run(["touch", {str(tmp_path / "executed")!r}], preexec_fn=preexec).returncode)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=20
    )
    assert done.stdout == "-15\n"
    assert not (tmp_path / "executed").exists()
