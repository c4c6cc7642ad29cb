"""Every text is a legal reply, in every environment and every format, and is answered quickly.

A reply that raises would break its own episode and drop out of the baseline (docs/invariants.md, "Broken is not zero").
A reply that takes long would block every other episode of its event loop.
"""

import asyncio
import inspect
import time
from collections.abc import Iterator
from typing import Any, get_args

import pytest

from horizonrl.common.errors import MissingDependency
from horizonrl.envs import registry
from horizonrl.envs.api import Environment, make_expert
from horizonrl.envs.formats import Command, WrittenFormat, read_action
from horizonrl.envs.odd_texts import odd_texts
from horizonrl.envs.text_limits import MAX_REPLY_CHARS, readable
from tests.envs.hubs.guess import GUESS

SLOW_S = 2.0
"""A linear parser takes some milliseconds; a quadratic one takes minutes for a megabyte."""
PIECES = (
    "\n", " ", "`", "```sql\n", "```python\n", "```\n", "<search>", "<answer>x", "</search>", "Action:", "Thought:",
    "search[", "click[x", "] [", "type [1] [", "{", "[", '{"a":', '"', "\\", "(", "get 1 x, ", "a using ", "guess: ",
    "9", "-", "\ud800", "\0", "\N{COMBINING ACUTE ACCENT}", "İ", "go to ", "x WITH Action Input: {", "Action:\n",
)  # fmt: skip
"""Pieces that make a careless parser slow when a reply repeats them a hundred thousand times."""
COMMANDS = (
    Command("craft", "craft {item} using {ingredients}", "one"),
    Command("wait", "wait", "other"),
)
ELSEWHERE = ("served", "openenv", "mcp", "transcripts", "miniwob", "program")
"""Played by a server or a program, from a file, or in a browser (an action costs it 70 ms: `envs check` tries it)."""
OPTIONS: dict[str, dict[str, Any]] = {
    "delayed": {"env": "parity", "seconds": 0.0},
    "gymnasium": {"id": GUESS},
}


def hostile_texts(chars: int) -> Iterator[str]:
    """Yield texts of about `chars` characters that take a careless parser quadratic time or worse."""
    for piece in PIECES:
        yield piece * (chars // len(piece))
        yield "Action: " + piece * (chars // len(piece))


def subjects() -> Iterator[tuple[str, str | None]]:
    for env_id in registry.names():
        if env_id not in ELSEWHERE and not env_id.startswith("agentgym-"):
            chosen = "format" in inspect.signature(registry.load(env_id)).parameters
            for action_format in get_args(WrittenFormat) if chosen else (None,):
                yield env_id, action_format


async def answer(environment: Environment, task_id: str, text: str) -> None:
    began = time.thread_time()
    step = await environment.step(readable(text))
    assert time.thread_time() - began < SLOW_S, text[:40]
    step.observation.encode()
    assert step.reward == step.reward
    if step.terminated or step.truncated:
        await environment.reset(task_id)


@pytest.mark.parametrize(("env_id", "action_format"), list(subjects()))
def test_no_reply_breaks_an_episode_or_holds_its_event_loop(
    env_id: str, action_format: str | None
) -> None:
    async def play() -> None:
        options = dict(OPTIONS.get(env_id, {}))
        options |= {} if action_format is None else {"format": action_format}
        environment = registry.make(env_id, options)
        task_id = registry.tasks(env_id, options)[0].task_id
        first = await environment.reset(task_id)
        sensible = (
            make_expert(environment).act(first.text)
            if registry.has_expert(env_id, options)
            else first.text
        )
        for text in odd_texts(sensible):
            await answer(environment, task_id, text)
        for text in hostile_texts(MAX_REPLY_CHARS):
            await answer(environment, task_id, text)
        await environment.close()

    try:
        asyncio.run(play())
    except MissingDependency as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize("action_format", get_args(WrittenFormat))
def test_every_parser_reads_a_hostile_megabyte_in_linear_time(action_format: WrittenFormat) -> None:
    for text in hostile_texts(1_000_000):
        began = time.thread_time()
        read_action(text, action_format, COMMANDS)
        assert time.thread_time() - began < SLOW_S, text[:40]
