"""Our side of the rollout rows: the actor's engine and rollout, on TextCraft, without a broker.

A program of its own: an engine is forked from a process of one thread, and one at a time. It answers one line of JSON,
`{"episodes": N}`, with the seconds, and with every request that was made.
"""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from horizonrl.actors.chat.template import ChatTemplate
from horizonrl.actors.engines.registry import factory
from horizonrl.actors.policy import Generation, InferenceSettings, Policy
from horizonrl.actors.rollout.rollout import Rollout, play
from horizonrl.common.types import Kind, Sampling, Task, Ticket
from horizonrl.envs import registry

OPTIONS = {"format": "plain", "style": "compact", "distractors": 2}
HORIZON_TURNS = 6
TURN_TOKENS = 24
STEP_TIMEOUT_S = 30.0


class Recorded:
    """A policy that notes each request: what was asked with which ids, and how many tokens came back."""

    def __init__(self, policy: Policy) -> None:
        self.max_context_tokens = policy.max_context_tokens
        self.requests: dict[int, list[tuple[list[int], int]]] = {}
        """By the task that asked: an episode is one task of asyncio."""
        self._policy = policy

    async def generate(self, ids: Sequence[int], **options: Any) -> Generation:
        generation = await self._policy.generate(ids, **options)
        requests = self.requests.setdefault(id(asyncio.current_task()), [])
        requests.append((list(ids), len(generation.ids)))
        return generation


async def main(model_dir: str, max_context_tokens: int, slots: int, kv_cache_mib: int) -> None:
    """Start the engine, then play what stdin asks for until it ends."""
    policy = await factory("vllm")(
        InferenceSettings(
            Path(model_dir), max_context_tokens, slots=slots, kv_cache_mib=kv_cache_mib
        )
    )
    chat, tasks = ChatTemplate.load(Path(model_dir)), registry.tasks("textcraft", OPTIONS)
    print(json.dumps({"ready": True}), flush=True)
    number = 0
    while line := await asyncio.to_thread(sys.stdin.readline):
        episodes: int = json.loads(line)["episodes"]
        recorded: Any = Recorded(policy)
        rollout = Rollout(recorded, chat, None, STEP_TIMEOUT_S)
        tickets = [
            Ticket(
                number=number + index,
                kind=Kind.TRAIN,
                task=Task(env_id="textcraft", task_id=tasks[(number + index) % len(tasks)].task_id),
                group_size=1,
                horizon_turns=HORIZON_TURNS,
                sampling=Sampling(max_turn_tokens=TURN_TOKENS),
            )
            for index in range(episodes)
        ]
        number += episodes
        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            played = [
                group.create_task(
                    play(lambda: registry.make("textcraft", OPTIONS), rollout, ticket, 0)
                )
                for ticket in tickets
            ]
        seconds = time.perf_counter() - started
        tokens = sum(task.result().generated_tokens for task in played)
        requests = list(recorded.requests.values())
        print(json.dumps({"seconds": seconds, "tokens": tokens, "requests": requests}), flush=True)
    await policy.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
