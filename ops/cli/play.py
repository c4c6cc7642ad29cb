"""`horizonrl envs play`: a person, or a pipe, is the agent of one episode."""

import asyncio
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from horizonrl.common.errors import ConfigError
from horizonrl.envs import contract, registry
from horizonrl.envs.api import Environment, Step
from horizonrl.envs.text_limits import readable
from horizonrl.ops.cli.environments import choose
from horizonrl.ops.terminal.console import plain_console

END = "."
"""The line that ends a reply of several lines."""

Say = Callable[[str], None]


def play_environment(
    env_ids: Sequence[str], task_id: str | None, overrides: Sequence[str], *, multiline: bool
) -> int:
    """Play one task with replies from stdin; return 0 if it was solved, else 1."""
    env_id, options = choose("play", env_ids, overrides)
    if registry.demonstrations_only(env_id, options):
        raise ConfigError(
            f"environment {env_id!r} only replays recorded episodes, so nobody can play it"
        )
    registry.require_steps(env_id)
    task_id = registry.tasks(env_id, options)[0].task_id if task_id is None else task_id
    console = plain_console()
    say = lambda text: console.print(text, highlight=False, soft_wrap=True)  # noqa: E731
    with asyncio.Runner() as runner:
        try:
            return runner.run(
                _play(env_id, options, task_id, _replies(sys.stdin, multiline=multiline), say)
            )
        except KeyboardInterrupt:
            # The environment is closed. The thread that waits for a line would hold up a usual end until there is one.
            sys.stdout.flush()
            os._exit(130)


async def _play(
    env_id: str, options: Mapping[str, Any], task_id: str, replies: Iterator[str], say: Say
) -> int:
    environment = registry.make(env_id, options)
    try:
        # Before the banner: there may be no such task.
        first = await contract.reset(environment, task_id)
        say(
            f"{env_id} {environment.version}, task {task_id}. Ctrl-D ends the episode.\n\n{first.text}"
        )
        return await _episode(environment, replies, say)
    finally:
        await environment.close()


async def _episode(environment: Environment, replies: Iterator[str], say: Say) -> int:
    total, turns = 0.0, 0
    # In a thread: connections to a server's environment must be served while a person thinks.
    while (reply := await asyncio.to_thread(next, replies, None)) is not None:
        step = await contract.step(environment, readable(reply))
        total, turns = total + step.reward, turns + 1
        say(f"{step.observation}\n[turn {turns}, reward {step.reward:g}, return {total:g}]")
        if step.terminated or step.truncated:
            say(f"The episode is over: {_outcome(step)}, return {total:g} in {turns} turns.")
            return 0 if step.success else 1
    say(f"Left after {turns} turns, return {total:g}.")
    return 1


def _outcome(step: Step) -> str:
    if step.success:
        return "solved"
    return "the environment's own limit" if step.truncated else "not solved"


def _replies(lines: TextIO, *, multiline: bool) -> Iterator[str]:
    """Yield a reply per line, or per block that ends with a line of END; a person is shown a prompt for each."""
    asks = lines.isatty()
    block: list[str] = []
    while True:
        if asks and not block:
            print("> ", end="", flush=True)
        line = lines.readline()
        if not line:
            break
        block.append(line.rstrip("\n"))
        if not multiline:
            yield block.pop()
        elif block[-1] == END:
            yield "\n".join(block[:-1])
            block = []
    if block:
        yield "\n".join(block)
