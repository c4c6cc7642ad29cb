"""A gateway on a policy that remembers what it was asked, and programs that are coroutines of the test."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from openai import AsyncOpenAI

from horizonrl.actors.chat.messages import ToolCall, Tools
from horizonrl.actors.chat.template import ChatTemplate
from horizonrl.actors.chat.tool_calls import Parsed, divided
from horizonrl.actors.engines.scripted import ScriptedPolicy
from horizonrl.actors.gateway.server import Gateway
from horizonrl.actors.gateway.session import Session
from horizonrl.actors.policy import Generation
from horizonrl.common.types import Episode, Kind, Sampling, Task, Ticket
from horizonrl.envs.api import Endpoint, Outcome, TaskSpec
from tests.templates import tool_tokenizer

CHAT = ChatTemplate(tool_tokenizer())
HELLO: Any = [{"role": "user", "content": "hello"}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "go",
        "description": "Go somewhere.",
        "parameters": {
            "type": "object",
            "properties": {"to": {"type": "string"}},
            "required": ["to"],
        },
    },
}


class JsonCalls:
    """Reads calls in the manner of Hermes."""

    name = "json"

    def parse(self, text: str, tools: Tools) -> Parsed:
        reasoning, text = divided(text)
        found = re.findall(r"<tool_call>\n(.*?)\n</tool_call>", text, re.DOTALL) if tools else []
        try:
            calls = [json.loads(call) for call in found]
            made = tuple(ToolCall(call["name"], json.dumps(call["arguments"])) for call in calls)
        except (ValueError, KeyError, TypeError):
            return Parsed(text, reasoning)
        return Parsed(re.split(r"\n?<tool_call>", text)[0] if made else text, reasoning, made)


@dataclass
class Asked:
    ids: tuple[int, ...]
    generation: Generation


class Remembering(ScriptedPolicy):
    """A scripted policy that remembers each request that it answered."""

    def __init__(self, answer: Callable[[str], str] | None = None, **options: Any) -> None:
        script = None
        if answer is not None:
            say = answer

            def script(ids: Sequence[int]) -> tuple[int, ...]:
                return CHAT.encode_turn(say(CHAT.decode(ids)))

        super().__init__(script, **{"max_context_tokens": 4096} | options)
        self.answered: list[Asked] = []

    async def generate(self, ids: Sequence[int], **options: Any) -> Generation:  # type: ignore[override]
        generation = await super().generate(ids, **options)
        self.answered.append(Asked(tuple(ids), generation))
        return generation


@dataclass
class Played:
    """A Program whose run is a coroutine of the test."""

    run: Callable[[Endpoint], Awaitable[object]]
    reward: float = 1.0
    env_id: ClassVar[str] = "played"
    version: str = "1"
    finished: list[bool] = field(default_factory=list)

    @classmethod
    def tasks(cls) -> Sequence[TaskSpec]:
        return (TaskSpec("one", "train", "all"),)

    async def drive(self, task_id: str, endpoint: Endpoint) -> None:
        await self.run(endpoint)

    async def grade(self, finished: bool) -> Outcome:
        self.finished.append(finished)
        return Outcome(self.reward, self.reward >= 1.0)

    async def close(self) -> None: ...


def ticket(
    horizon_turns: int = 8,
    max_turn_tokens: int = 256,
    announce: bool = False,
    seed: int | None = None,
) -> Ticket:
    return Ticket(
        number=0,
        kind=Kind.TRAIN,
        task=Task(env_id="program", task_id="one"),
        group_size=1,
        horizon_turns=horizon_turns,
        announce_horizon=announce,
        sampling=Sampling(max_turn_tokens=max_turn_tokens, seed=seed),
    )


@asynccontextmanager
async def gateway_of(policy: Any, parser: Any = None, **options: Any) -> AsyncIterator[Gateway]:
    async with Gateway(policy, CHAT, parser or JsonCalls(), **options).open() as gateway:
        yield gateway


@asynccontextmanager
async def session_of(
    policy: Any, order: Ticket | None = None, **options: Any
) -> AsyncIterator[tuple[Gateway, Session]]:
    async with (
        gateway_of(policy, **options) as gateway,
        gateway.session(order or ticket(), 0) as session,
    ):
        yield gateway, session


@asynccontextmanager
async def client_of(
    gateway: Gateway, session: Session, **options: Any
) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=gateway.base_url, api_key=session.key, **{"max_retries": 0} | options
    ) as client:
        yield client


@asynccontextmanager
async def client(
    policy: Any, order: Ticket | None = None, **options: Any
) -> AsyncIterator[tuple[AsyncOpenAI, Session]]:
    async with (
        session_of(policy, order) as (gateway, session),
        client_of(gateway, session, **options) as openai,
    ):
        yield openai, session


def run(scenario: Any) -> None:
    asyncio.run(scenario())


def sequences(episode: Episode) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return (ids read, ids sampled) of each turn, from the record alone."""
    prompts = [episode.prompt_ids, *(branch.prompt_ids for branch in episode.branches)]
    found = []
    for turn in episode.turns:
        found.append((prompts[turn.branch], turn.output_ids))
        prompts[turn.branch] = prompts[turn.branch] + turn.output_ids + turn.observation_ids
    return found


def assert_trained_is_sampled(episode: Episode, policy: Remembering, stops: bool = False) -> None:
    """Each call of the policy is one turn of the record: the ids it read are those before it, and nothing is edited.

    With `stops`, a stop string may have ended a turn before the policy did.
    """
    sampled = sorted((asked.ids, asked.generation.ids) for asked in policy.answered)
    trained = sorted(sequences(episode))
    if stops:
        cuts = zip(sampled, trained, strict=True)
        sampled = [(read, output[: len(kept)]) for (read, output), (_, kept) in cuts]
    assert trained == sampled
