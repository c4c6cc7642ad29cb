"""Programs with an engine of their own, each in a fork of one process that has imported vLLM, as an actor does.

The import takes more than twice as long as all the rest of an engine's start.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from horizonrl.actors.engines.vllm import import_vllm
from horizonrl.actors.policy import InferenceSettings


class Apart:
    """The process that forks."""

    def __init__(self, asked: IO[str], answered: IO[str]) -> None:
        self._asked = asked
        self._answered = answered

    def run(self, program: str, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run a program's text with the words as its arguments, as `python -c` would."""
        # pytest's own folder has too long a name for sockets.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            job = {"program": program, "words": words, "folder": folder}
            print(json.dumps(job), file=self._asked, flush=True)
            code = json.loads(self._answered.readline())
            outputs = [Path(folder, name).read_text() for name in ("out", "err")]
        return subprocess.CompletedProcess(words, code, *outputs)


@contextmanager
def forking() -> Iterator[Apart]:
    command = [sys.executable, "-m", __name__]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdin and process.stdout
        yield Apart(process.stdin, process.stdout)
        process.stdin.close()


def main() -> None:
    import_vllm(InferenceSettings(Path(), 256, renewed=False))
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            become(**job)
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def become(program: str, words: list[str], folder: str) -> None:
    """Run a program in this process."""
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    for number, name in enumerate(("in", "out", "err")):
        os.dup2(os.open(Path(folder, name), os.O_RDWR | os.O_CREAT), number)
    sys.argv[1:] = words
    exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
