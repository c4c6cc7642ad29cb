"""A policy behind an OpenAI-compatible endpoint, for evaluations: chat completions instead of ids.

Place in the flow: the rollout speaks in ids, an endpoint in messages. Here an id is the place of a message in its
conversation, and a generation has as many ids as the endpoint says it generated. None of it can be trained on: nobody
knows which tokens were sampled, nor how likely they were (docs/evaluation.md).
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Self

import stamina
from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector
from pydantic import BaseModel, Field, SecretStr, ValidationError

from horizonrl.actors.policy import Generation
from horizonrl.common.errors import ContextFull, EngineDead, PolicyFailure, WeightsRejected
from horizonrl.common.types import MAX_LONG_TEXT, MAX_TOKENS, PolicyVersion, VersionSpan

COUNTED = 0
"""An id that only counts a token; the places of messages begin at 1."""
PASSING = (408, 409, 425, 429, 500, 502, 503, 504, 529)
REFUSED = (401, 403, 404)
"""No key, no right, no such model: true of every request."""
LONGEST_WAIT_S = 60.0
"""An endpoint that asks to come back later than this is not waited for: its episode breaks."""
ATTEMPTS = 6
REACH_S = 30.0
"""Longest time in which an endpoint must say anything at all before an evaluation begins."""
SEEDS = (1 << 31) - 1
"""Some endpoints take 32 bits; a prime keeps all bits of ours in play."""


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    url: str
    """Up to and with the version, as OpenAI's clients take it: `http://127.0.0.1:8000/v1`."""
    model: str
    key: SecretStr | None = None
    timeout_s: float = 300.0
    """Of one request."""
    first_wait_s: float = 0.5
    """Before the second try; each further wait is twice as long."""


class _Message(BaseModel):
    content: str = Field(max_length=MAX_LONG_TEXT)


class _Choice(BaseModel):
    message: _Message


class _Usage(BaseModel):
    completion_tokens: int = Field(default=0, ge=0, le=MAX_TOKENS)


class Completion(BaseModel):
    """What we read of a reply; anything else in it is left alone."""

    choices: list[_Choice] = Field(min_length=1)
    usage: _Usage | None = None

    @property
    def tokens(self) -> int:
        """Generated, thoughts included; 1 where the endpoint does not say."""
        return max(1, self.usage.completion_tokens) if self.usage else 1


class _Passing(PolicyFailure):
    """May be over at the next try."""

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.wait_s = wait_s


def _again(error: Exception) -> bool | float:
    """Say whether to try again, or in how many seconds."""
    if not isinstance(error, _Passing):
        return False
    return True if error.wait_s is None else error.wait_s <= LONGEST_WAIT_S and max(error.wait_s, 0.01)


class Endpoint:
    """The endpoint and its connections; one for all conversations."""

    def __init__(self, settings: EndpointSettings) -> None:
        self._settings = settings
        self._limit_key = "max_tokens"
        self._repeat = stamina.AsyncRetryingCaller(
            attempts=ATTEMPTS, timeout=None, wait_initial=settings.first_wait_s, wait_max=30.0
        ).on(_again)

    @property
    def description(self) -> str:
        return f"{self._settings.model} at {self._settings.url}"

    async def __aenter__(self) -> Self:
        key = self._settings.key
        self._http = ClientSession(
            connector=TCPConnector(limit=0),
            timeout=ClientTimeout(total=self._settings.timeout_s),
            headers={"Authorization": f"Bearer {key.get_secret_value()}"} if key else {},
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def reach(self) -> None:
        """Raise EngineDead unless somebody answers there and takes the key; what is answered does not matter.

        Before the first episode nothing passes: a wrong address would only be found by many retries of many episodes.
        """
        address = f"{self._settings.url.rstrip('/')}/models"
        try:
            async with self._http.get(address, allow_redirects=False, timeout=ClientTimeout(total=REACH_S)) as answer:
                text = await answer.text(errors="replace")
        except (ClientError, TimeoutError, OSError, ValueError) as error:
            raise EngineDead(
                f"no answer from {address} ({type(error).__name__}: {error}): is the server up, and is --endpoint its "
                "address up to and with the version, such as http://127.0.0.1:8000/v1?"
            ) from None
        if answer.status in (401, 403):
            raise self._refusal(answer.status, None, text)

    async def complete(self, messages: Sequence[dict[str, str]], max_tokens: int, **sampling: Any) -> Completion:
        """Return the endpoint's answer to a conversation. What may pass is tried again, up to ATTEMPTS times.

        Raises PolicyFailure, ContextFull when the conversation is too long, EngineDead when every request is refused.
        """

        async def ask() -> Completion:  # without arguments: what is retried is logged with them
            body = {"model": self._settings.model, "messages": messages, self._limit_key: max_tokens, **sampling}
            return await self._post({name: value for name, value in body.items() if value is not None})

        return await self._repeat(ask)

    async def _post(self, body: dict[str, Any]) -> Completion:
        address = f"{self._settings.url.rstrip('/')}/chat/completions"
        try:
            async with self._http.post(address, json=body, allow_redirects=False) as answer:
                text = await answer.text(errors="replace")
        except (ClientError, TimeoutError, OSError) as error:
            raise _Passing(f"no answer from {address}: {type(error).__name__}: {error}") from None
        if answer.status == 200:
            return self._read(text)
        if answer.status == 400 and "max_completion_tokens" in text and "max_tokens" in body:
            self._limit_key = "max_completion_tokens"
            raise _Passing(f"{self.description} wants max_completion_tokens", wait_s=0.0)
        raise self._refusal(answer.status, answer.headers.get("Retry-After"), text)

    def _read(self, text: str) -> Completion:
        try:
            return Completion.model_validate_json(text)
        except ValidationError as error:
            wrong = error.errors()[0]
            place = ".".join(map(str, wrong["loc"])) or "the whole"
            raise PolicyFailure(
                f"{self.description} answered what is no chat completion ({place}: {wrong['msg']}): {self._said(text)}"
            ) from None

    def _refusal(self, status: int, retry_after: str | None, text: str) -> PolicyFailure:
        told = f"{self.description} answered {status}: {self._said(text)}"
        if status in REFUSED:
            return EngineDead(f"{told}. Check the key's environment variable, --endpoint and --model-name")
        if status in PASSING:
            return _Passing(told, _seconds(retry_after))
        if status == 400 and ("context_length" in text or "maximum context length" in text):
            return ContextFull(told)
        return PolicyFailure(told)

    def _said(self, text: str) -> str:
        """Return the begin of a reply, without the key: some endpoints repeat it."""
        key = self._settings.key.get_secret_value() if self._settings.key else None
        return (text.replace(key, "***") if key else text)[:300]


@dataclass
class Conversation:
    """One episode's Policy and Chat on an endpoint: ids are places in `messages`, from 1."""

    endpoint: Endpoint
    max_context_tokens: int = MAX_TOKENS
    """The endpoint itself says when its context is full."""
    version: PolicyVersion = field(default_factory=PolicyVersion)
    stop_ids: tuple[int, ...] = ()
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine = self.endpoint.description

    def open(self, system: str | None, observation: str) -> tuple[int, ...]:
        return (*(() if system is None else self._append("system", system)), *self._append("user", observation))

    def delta(self, last_output_ids: Sequence[int], observation: str) -> tuple[int, ...]:
        return self._append("user", observation)

    def decode(self, output_ids: Sequence[int]) -> str:
        return "".join(message["content"] for message in self._at(output_ids))

    def encode_turn(self, text: str) -> tuple[int, ...]:
        return self._append("assistant", text)

    async def generate(
        self, ids: Sequence[int], *, max_tokens: int, temperature: float, stop_ids: Sequence[int], seed: int | None
    ) -> Generation:
        """Return the endpoint's next message. Nothing is known of its tokens but their number: every logprob is 0."""
        completion = await self.endpoint.complete(
            self._at(ids), max_tokens, temperature=temperature, seed=None if seed is None else seed % SEEDS
        )
        said = self._append("assistant", completion.choices[0].message.content)
        output = said + (COUNTED,) * (completion.tokens - 1)
        span = VersionSpan(version=self.version.version, lineage=self.version.lineage, tokens=len(output))
        return Generation(ids=output, logprobs=(0.0,) * len(output), spans=(span,))

    async def apply(self, weights: Path, policy: PolicyVersion) -> None:
        """Refuse: an endpoint's weights are its own."""
        raise WeightsRejected(f"{self.engine} takes no weights: {policy} is not applied")

    async def close(self) -> None: ...

    def _append(self, role: str, content: str) -> tuple[int, ...]:
        self.messages.append({"role": role, "content": content})
        return (len(self.messages),)

    def _at(self, ids: Sequence[int]) -> list[dict[str, str]]:
        return [self.messages[place - 1] for place in ids if place != COUNTED]


def _seconds(retry_after: str | None) -> float | None:
    """Return how long `Retry-After` asks to wait: it is a number of seconds or a date."""
    if retry_after is None:
        return None
    with suppress(ValueError):
        return float(retry_after)
    with suppress(ValueError):
        return parsedate_to_datetime(retry_after).timestamp() - time.time()
    return None
