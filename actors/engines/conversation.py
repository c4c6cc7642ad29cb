"""A policy behind an endpoint that speaks in messages (chat completions), for evaluations of models anywhere.

Place in the flow: the rollout speaks in ids, such an endpoint in messages. Here an id is the place of a message in its
conversation, and a generation has as many ids as the endpoint says it generated. None of it can be trained on: nobody
knows which tokens were sampled, nor how likely they were (docs/evaluation.md). That is why this is no engine by name:
it keeps what a rollout needs, not the contract of token exactness.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from pydantic import BaseModel, Field, model_validator

from horizonrl.actors.engines.client import SEEDS, Endpoint
from horizonrl.actors.policy import ChangedWords, Generation
from horizonrl.common.arrays import MAX_TOKENS
from horizonrl.common.errors import WeightsRejected
from horizonrl.common.types import MAX_LONG_TEXT, PolicyVersion, VersionSpan

COUNTED = 0
"""An id that only counts a token; the places of messages begin at 1."""


class _Message(BaseModel):
    content: str | None = Field(default=None, max_length=MAX_LONG_TEXT)


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None


class _Usage(BaseModel):
    completion_tokens: int = Field(default=0, ge=0, le=MAX_TOKENS)


class Completion(BaseModel):
    """What is read of a reply; the rest is left alone."""

    choices: list[_Choice] = Field(min_length=1)
    usage: _Usage | None = None

    @property
    def tokens(self) -> int:
        """Generated tokens, thoughts included; 1 if the endpoint does not say."""
        return max(1, self.usage.completion_tokens) if self.usage else 1

    @property
    def text(self) -> str:
        return self.choices[0].message.content or ""

    @model_validator(mode="after")
    def _generated(self) -> Self:
        """Take no content for an empty reply only if one was generated: tokens were spent, on thoughts for example."""
        choice = self.choices[0]
        spent = choice.finish_reason == "length" or (
            self.usage is not None and self.usage.completion_tokens > 0
        )
        if choice.message.content is None and not spent:
            raise ValueError("no content, and no sign that any was generated")
        return self


@dataclass
class Conversation:
    """One episode's Policy and Chat on an endpoint: ids are places in `messages`, from 1."""

    endpoint: Endpoint
    max_context_tokens: int = MAX_TOKENS
    """The endpoint itself says when its context is full."""
    version: PolicyVersion = field(default_factory=PolicyVersion)
    stop_ids: tuple[int, ...] = ()
    takes_words: bool = False
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine = self.endpoint.description

    def open(self, system: str | None, observation: str) -> tuple[int, ...]:
        return (
            *(() if system is None else self._append("system", system)),
            *self._append("user", observation),
        )

    def delta(self, last_output_ids: Sequence[int], observation: str) -> tuple[int, ...]:
        return self._append("user", observation)

    def decode(self, output_ids: Sequence[int]) -> str:
        return "".join(message["content"] for message in self._messages_at(output_ids))

    def encode_turn(self, text: str) -> tuple[int, ...]:
        return self._append("assistant", text)

    async def generate(
        self,
        ids: Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        stop_ids: Sequence[int],
        seed: int | None,
    ) -> Generation:
        """Return the endpoint's next message. Nothing is known of its tokens but their number: every logprob is 0."""
        completion = await self.endpoint.ask(
            "chat/completions",
            Completion,
            messages=self._messages_at(ids),
            max_tokens=max_tokens,
            temperature=temperature,
            seed=None if seed is None else seed % SEEDS,
        )
        message = self._append("assistant", completion.text)
        # Padded to the number of tokens, because metrics and reports count the ids of a turn.
        output = message + (COUNTED,) * (completion.tokens - 1)
        span = VersionSpan(
            version=self.version.version, lineage=self.version.lineage, tokens=len(output)
        )
        return Generation(ids=output, logprobs=(0.0,) * len(output), spans=(span,))

    async def apply(
        self, weights: Path, version: PolicyVersion, words: ChangedWords | None = None
    ) -> None:
        """Reject the weights: an endpoint's are its own."""
        raise WeightsRejected(f"{self.engine} takes no weights: {version} is not applied")

    async def close(self) -> None: ...

    def _append(self, role: str, content: str) -> tuple[int, ...]:
        self.messages.append({"role": role, "content": content})
        return (len(self.messages),)

    def _messages_at(self, ids: Sequence[int]) -> list[dict[str, str]]:
        return [self.messages[index - 1] for index in ids if index != COUNTED]
