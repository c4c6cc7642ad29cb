"""The HTTP side of an OpenAI-compatible endpoint: one address, its key, and what is tried again.

Knows nothing of policies: `conversation.py` speaks over it.
"""

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Self, TypeVar

import stamina
from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector
from pydantic import BaseModel, SecretStr, ValidationError

from horizonrl.common.errors import ContextFull, EngineDead, PolicyFailure

PASSING = (408, 409, 425, 429, 500, 502, 503, 504, 529)
"""Statuses that may be over at the next try."""
REFUSED = (401, 403, 404)
"""Statuses of a missing key, a missing right or an unknown model: every request would be answered so."""
LONGEST_WAIT_S = 60.0
"""An endpoint that asks to come back later than this is not waited for: its episode breaks."""
ATTEMPTS = 6
REACH_S = 30.0
"""Longest time in which an endpoint must answer anything at all before an evaluation begins."""
SEEDS = (1 << 31) - 1
"""Some endpoints take 32 bits; a prime keeps all bits of ours in play."""

Reply = TypeVar("Reply", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    url: str
    """Up to and including the version, as OpenAI's clients take it: `http://127.0.0.1:8000/v1`."""
    model: str
    """The model as the endpoint calls it."""
    key: SecretStr | None = None
    timeout_s: float = 300.0
    """Longest time of one request."""
    first_wait_s: float = 0.5
    """Wait before the second try; each further one is twice as long."""


class _Passing(PolicyFailure):
    """A failure that may be over at the next try."""

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.wait_s = wait_s


def _again(error: Exception) -> bool | float:
    """Return whether to try again, or after how many seconds."""
    if not isinstance(error, _Passing):
        return False
    # At least 0.01 s: a date in `Retry-After` may be in the past, and stamina waits for any number that it is given.
    return (
        True if error.wait_s is None else error.wait_s <= LONGEST_WAIT_S and max(error.wait_s, 0.01)
    )


class Endpoint:
    """The endpoint and its connections, shared by all its users."""

    def __init__(self, settings: EndpointSettings) -> None:
        self._settings = settings
        # Endpoints disagree on the name of this key. The first refusal settles it for all episodes (see `_post`).
        self._limit_key = "max_tokens"
        # `timeout=None`: stamina's default of 45 s in all would give up before a `Retry-After` of a minute.
        self._repeat = stamina.AsyncRetryingCaller(
            attempts=ATTEMPTS, timeout=None, wait_initial=settings.first_wait_s, wait_max=30.0
        ).on(_again)

    @property
    def description(self) -> str:
        return f"{self._settings.model} at {self._settings.url}"

    async def __aenter__(self) -> Self:
        key = self._settings.key
        self._http = ClientSession(
            # Slots bound the requests; aiohttp's default of 100 connections would queue those beyond it unseen.
            connector=TCPConnector(limit=0),
            timeout=ClientTimeout(total=self._settings.timeout_s),
            headers={"Authorization": f"Bearer {key.get_secret_value()}"} if key else {},
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def reach(self) -> None:
        """Raise EngineDead unless a server answers and accepts the key; what it answers does not matter.

        Without retries: else a wrong address would only be found by many retries of many episodes.
        """
        address = f"{self._settings.url.rstrip('/')}/models"
        try:
            async with self._http.get(
                address, allow_redirects=False, timeout=ClientTimeout(total=REACH_S)
            ) as answer:
                text = await answer.text(errors="replace")
        except (ClientError, TimeoutError, OSError, ValueError) as error:
            raise EngineDead(
                f"no answer from {address} ({type(error).__name__}: {error}): is the server up, and is this its "
                "address up to and including the version, such as http://127.0.0.1:8000/v1?"
            ) from None
        # Not 404: a server may answer completions without a list of models.
        if answer.status in (401, 403):
            raise self._refusal(answer.status, None, text)

    async def ask(self, route: str, reply: type[Reply], **body: Any) -> Reply:
        """Return the endpoint's answer to a request. What may pass is tried again, up to ATTEMPTS times.

        A value of None is left out. Raises PolicyFailure, ContextFull when the prompt is too long, EngineDead when
        every request is refused.
        """

        async def attempt() -> Reply:  # without arguments: what is retried is logged with them
            limit = {self._limit_key: body["max_tokens"]}
            request = {
                "model": self._settings.model,
                **{k: v for k, v in body.items() if k != "max_tokens"},
                **limit,
            }
            return await self._post(
                route, reply, {name: value for name, value in request.items() if value is not None}
            )

        return await self._repeat(attempt)

    async def _post(self, route: str, reply: type[Reply], body: Mapping[str, Any]) -> Reply:
        address = f"{self._settings.url.rstrip('/')}/{route}"
        try:
            # aiohttp follows a redirected POST with a GET (301 to 303), whose error would hide the wrong address.
            async with self._http.post(address, json=body, allow_redirects=False) as answer:
                text = await answer.text(errors="replace")
        except (ClientError, TimeoutError, OSError) as error:
            raise _Passing(f"no answer from {address}: {type(error).__name__}: {error}") from None
        if answer.status == 200:
            return self._read(reply, text)
        if answer.status == 400 and "max_completion_tokens" in text and "max_tokens" in body:
            self._limit_key = "max_completion_tokens"
            raise _Passing(f"{self.description} wants max_completion_tokens", wait_s=0.0)
        raise self._refusal(answer.status, answer.headers.get("Retry-After"), text)

    def _read(self, reply: type[Reply], text: str) -> Reply:
        try:
            return reply.model_validate_json(text)
        except ValidationError as error:
            wrong = error.errors()[0]
            key = ".".join(map(str, wrong["loc"])) or "the whole"
            raise PolicyFailure(
                f"{self.description} answered with something else than a completion ({key}: {wrong['msg']}): "
                f"{self._quote(text)}"
            ) from None

    def _refusal(self, status: int, retry_after: str | None, text: str) -> PolicyFailure:
        sentence = f"{self.description} answered {status}: {self._quote(text)}"
        if status in REFUSED:
            return EngineDead(
                f"{sentence}. Check the key's environment variable, the URL and the model's name"
            )
        if status in PASSING:
            return _Passing(sentence, _seconds(retry_after))
        # By words, since servers share no error code. Missed, a full context would count as a failure of the endpoint.
        if status == 400 and ("context_length" in text or "maximum context length" in text):
            return ContextFull(sentence)
        return PolicyFailure(sentence)

    def _quote(self, text: str) -> str:
        """Return the beginning of a reply without the key, which some endpoints repeat."""
        key = self._settings.key.get_secret_value() if self._settings.key else None
        return (text.replace(key, "***") if key else text)[:300]


def _seconds(retry_after: str | None) -> float | None:
    """Return how long `Retry-After` asks to wait: it is a number of seconds or a date."""
    if retry_after is None:
        return None
    with suppress(ValueError):
        return float(retry_after)
    with suppress(ValueError):
        return parsedate_to_datetime(retry_after).timestamp() - time.time()
    return None
