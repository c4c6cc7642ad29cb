"""Programs through the gateway against native rollouts, with the same requests in turns.

32 programs, each in a process of its own, hold conversations of four calls. Each waits until all are up, because what a
program costs to start is its own matter. Then 32 rollouts hold the same conversations. Both are timed from the first
request that the engine gets to the last one that it answers.
"""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from horizonrl.actors.chat.template import ChatTemplate
from horizonrl.actors.engines.registry import factory
from horizonrl.actors.engines.scripted import ScriptedPolicy
from horizonrl.actors.gateway.server import Gateway
from horizonrl.actors.policy import Generation, InferenceSettings, Policy
from horizonrl.actors.rollout.rollout import Rollout, play
from horizonrl.common.errors import RunFailed
from horizonrl.common.types import Kind, Sampling, Task, Ticket
from horizonrl.envs import registry
from horizonrl.envs.api import Environment, Program
from horizonrl.ops.bench import talker
from horizonrl.ops.bench.case import Case, Request
from horizonrl.ops.bench.talker import CALLS, GO, READY, TALKERS, Talk
from horizonrl.ops.models.models import resolve_model
from horizonrl.ops.models.tiny_model import make_tokenizer

CONTEXT_TOKENS, TURN_TOKENS = 1024, 32
SMALL_TOKEN_S = 0.02
"""Time of a token in the small variant, which has no engine."""
UP_S = 300.0
"""Longest time that the programs may take to start."""
Make = Callable[[], Environment | Program]


class TimedPolicy:
    """A policy that notes when it was asked first, when it answered last, and how many tokens it gave."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.max_context_tokens = policy.max_context_tokens
        self.clear()

    def clear(self) -> None:
        self.began, self.ended, self.tokens = float("inf"), 0.0, 0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / (self.ended - self.began)

    async def generate(self, ids: Sequence[int], **options: Any) -> Generation:
        self.began = min(self.began, time.perf_counter())
        generation = await self._policy.generate(ids, **options)
        self.ended = time.perf_counter()
        self.tokens += len(generation.ids)
        return generation


async def cases(request: Request) -> AsyncIterator[Case]:
    """Yield the one case."""
    policy, chat = await _start_policy(request.small)
    timed: Any = TimedPolicy(policy)
    numbers = count()
    try:
        async with Gateway(timed, chat).open() as gateway:
            rollout = Rollout(timed, chat, None, 30.0, gateway=gateway)

            async def converse(
                way: Callable[[Rollout, int], Awaitable[None]],
            ) -> Mapping[str, float]:
                timed.clear()
                await way(rollout, next(numbers))
                return {"tokens/s": timed.tokens_per_s}

            ways = {"ours": _through_gateway, "native rollouts": _native}
            sides = {name: partial(converse, way) for name, way in ways.items()}
            what = f"{TALKERS} programs through the gateway"
            yield Case(what, sides, warms_up=True, swaps=True)
    finally:
        await policy.close()


async def _start_policy(small: bool) -> tuple[Policy, ChatTemplate]:
    if small:
        return ScriptedPolicy(max_context_tokens=1 << 14, token_s=SMALL_TOKEN_S), ChatTemplate(
            make_tokenizer()
        )
    model_dir = resolve_model("smollm2-135m-instruct")
    policy = await factory("vllm")(InferenceSettings(model_dir, CONTEXT_TOKENS, slots=TALKERS))
    return policy, ChatTemplate.load(model_dir)


async def _native(rollout: Rollout, number: int) -> None:
    await _play_all(Talk, rollout, number)


async def _through_gateway(rollout: Rollout, number: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        go = Path(folder, "go")
        options = {
            "program": f"{talker.__name__}:talk",
            "tasks": f"{talker.__name__}:talks",
            "environment": {READY: folder, GO: str(go)},
        }
        make = partial(registry.make, "program", options)
        playing = asyncio.create_task(_play_all(make, rollout, number))
        try:
            await asyncio.to_thread(_start_when_up, go, playing.done)
            await playing
        finally:
            playing.cancel()


def _start_when_up(go: Path, over: Callable[[], bool]) -> None:
    deadline = time.monotonic() + UP_S
    while (up := len(list(go.parent.iterdir()))) < TALKERS and not over():
        if time.monotonic() > deadline:
            raise RunFailed(f"only {up} of {TALKERS} programs have started within {UP_S:g} s")
        time.sleep(0.01)
    go.touch()


async def _play_all(make: Make, rollout: Rollout, number: int) -> None:
    async with asyncio.TaskGroup() as group:
        episodes = [
            group.create_task(play(make, rollout, _ticket(talker_number, number), 0))
            for talker_number in range(TALKERS)
        ]
    for episode in (task.result() for task in episodes):
        if len(episode.turns) != CALLS:
            raise RunFailed(
                f"an episode has {len(episode.turns)} turns instead of {CALLS}: {episode.error}"
            )


def _ticket(talker_number: int, number: int) -> Ticket:
    return Ticket(
        number=talker_number,
        kind=Kind.TRAIN,
        task=Task(env_id="program", task_id=f"talk-{talker_number}"),
        group_size=1,
        horizon_turns=CALLS,
        sampling=Sampling(max_turn_tokens=TURN_TOKENS, seed=number * TALKERS + talker_number),
    )
