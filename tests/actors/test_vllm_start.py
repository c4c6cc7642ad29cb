"""An engine's process ends with the actor that starts it, whenever that actor is killed: none is left behind."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import MARK, left_behind, marked

MOMENTS = 20
STARTING = """
import asyncio, multiprocessing.process, sys, threading
from pathlib import Path
from horizonrl.actors.engines.vllm import VllmPolicy
from horizonrl.actors.policy import InferenceSettings

if sys.argv[2] == "spawn":  # the engine is forked from a process of one thread only
    threading.Thread(target=threading.Event().wait, daemon=True).start()

start = multiprocessing.process.BaseProcess.start

def told(process):
    print("engine", flush=True)
    start(process)

multiprocessing.process.BaseProcess.start = told

async def main():
    settings = InferenceSettings(Path(sys.argv[1]), max_context_tokens=128, slots=2, kv_cache_mib=16)
    await VllmPolicy.start(settings)
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def start(model: Path, method: str, mark: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-c", STARTING, str(model), method],
        env=os.environ
        | {MARK: mark, "SPT_NOENV": "1"},  # else the engine's new name overwrites the mark
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def await_line(process: "subprocess.Popen[bytes]", line: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline().decode() == f"{line}\n"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_no_engine_outlives_an_actor_that_is_killed_while_it_starts(
    tiny_models: tuple[Path, Path], method: str
) -> None:
    with start(tiny_models[0], method, "first") as process:
        await_line(process, "engine")
        began = time.monotonic()
        await_line(process, "ready")
        start_s = time.monotonic() - began
        process.kill()
    outlived = {}
    for number in range(MOMENTS):
        at_s, mark = start_s * number / MOMENTS, f"{method}-{number}"
        with start(tiny_models[0], method, mark) as process:
            await_line(process, "engine")
            time.sleep(at_s)
            alive = len(marked(mark))
            process.kill()
        left = left_behind(mark, within_s=10)
        print(
            f"{method}: killed {at_s:.1f} of {start_s:.1f} s after the engine's start; {alive} lived, {len(left)} left"
        )
        if left:
            outlived[round(at_s, 1)] = left
    assert not outlived
