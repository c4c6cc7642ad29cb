"""A policy without a model and environments that misbehave, for the rollout and the actor's loop."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from horizonrl.actors.chat.template import ChatTemplate
from horizonrl.actors.policy import ChangedWords, Generation
from horizonrl.common.types import PolicyVersion, VersionSpan
from horizonrl.envs.api import Observation, Step, TaskSpec
from horizonrl.ops.models.tiny_model import make_tokenizer


def make_chat() -> ChatTemplate:
    return ChatTemplate(make_tokenizer())


@dataclass
class SayingPolicy:
    """Says `text`, and remembers what it was asked."""

    chat: ChatTemplate
    text: str = "go on"
    max_context_tokens: int = 512
    engine: str = "saying"
    takes_words: bool = False
    version: PolicyVersion = field(default_factory=PolicyVersion)
    asked: list[tuple[int, ...]] = field(default_factory=list)
    seeds: list[int | None] = field(default_factory=list)
    fail: Callable[[], None] = lambda: None

    async def generate(
        self,
        ids: Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        stop_ids: Sequence[int],
        seed: int | None,
    ) -> Generation:
        self.asked.append(tuple(ids))
        self.seeds.append(seed)
        await asyncio.sleep(0)
        self.fail()
        output = self.chat.encode_turn(self.text)[:max_tokens]
        span = VersionSpan(
            version=self.version.version, lineage=self.version.lineage, tokens=len(output)
        )
        return Generation(output, (-0.25,) * len(output), (span,))

    async def apply(
        self, weights: Path, version: PolicyVersion, words: ChangedWords | None = None
    ) -> None:
        self.version = version

    async def close(self) -> None: ...


class Echo:
    """Answers with the agent's words; over after `last` turns; rewards the last one."""

    env_id: ClassVar[str] = "echo"
    version: ClassVar[str] = "1"

    def __init__(self, last: int = 3) -> None:
        self.last = last
        self.turns = 0
        self.closed = 0

    @classmethod
    def tasks(cls) -> Sequence[TaskSpec]:
        return (TaskSpec("say", "train", "all"),)

    async def reset(self, task_id: str) -> Observation:
        self.turns = 0
        return Observation("say something")

    async def step(self, text: str) -> Step:
        self.turns += 1
        over = self.turns == self.last
        return Step(f"you said {text}", reward=float(over), terminated=over, success=over)

    def expert(self) -> "EchoExpert":
        return EchoExpert()

    async def close(self) -> None:
        self.closed += 1


class EchoExpert:
    def act(self, observation: str) -> str:
        return "yes"


class Hanging(Echo):
    async def step(self, text: str) -> Step:
        await asyncio.Event().wait()
        raise AssertionError("never")


class Breaking(Echo):
    async def step(self, text: str) -> Step:
        raise RuntimeError("the kitchen is on fire")
