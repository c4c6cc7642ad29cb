"""Programs that a row starts and talks to: one line of JSON each way."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from horizonrl.common.children import bound
from horizonrl.common.errors import RunFailed

LINE_BYTES = 1 << 26
"""The longest answer: every request of 64 episodes."""
ANSWER_S = 600.0
END_S = 20.0


class Program:
    def __init__(self, module: str, process: asyncio.subprocess.Process) -> None:
        self.pid = process.pid
        self._module, self._process = module, process

    async def ask(self, question: Any) -> Any:
        """Send a line and return the answer. Raises RunFailed."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        return await self.answer()

    async def answer(self) -> Any:
        assert self._process.stdout is not None
        async with asyncio.timeout(ANSWER_S):
            while line := await self._process.stdout.readline():
                if line.startswith(b"{"):  # libraries print here too
                    return json.loads(line)
        raise RunFailed(
            f"{self._module} ended: run `{sys.executable} -m {self._module}` to see why"
        )


@asynccontextmanager
async def program(module: str, *arguments: str) -> AsyncIterator[Program]:
    """Start a module as a program, wait until it is ready, and end it after the body."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        limit=LINE_BYTES,
        preexec_fn=bound(),
    )
    try:
        started = Program(module, process)
        await started.answer()
        yield started
    finally:
        # The end of its input ends it, and lets it end its engine.
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(END_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
