"""One environment of one AgentGym server, over HTTP.

Calls that are safe to repeat are retried: creating and resetting an environment, and reading. A step is retried only if
the server says that it answers a repeated key with the first answer (ours does). Otherwise a failed step breaks the
episode, because it may or may not have been taken.
"""

import asyncio
import json
import secrets
from collections.abc import Mapping
from functools import partial
from typing import Any

import stamina
from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector

from horizonrl.common.errors import EnvironmentFailure, EnvironmentTimeout
from horizonrl.common.logs import get_logger
from horizonrl.envs.agentgym.dialects import Dialect, Verdict
from horizonrl.envs.agentgym.handles import Handle, Handles, make_handles

log = get_logger()

KEY_HEADER = "Idempotency-Key"
REPEATABLE_HEADER = "Idempotent-Steps"
"""Sent by a server that answers a step with a known key without taking it again."""
KEEPALIVE_S = 3.0
"""Shorter than the 5 s after which uvicorn closes an idle connection, because a request on a closed one is lost."""
CLOSE_S = 10.0
BUSY = (429, 502, 503, 504)


class _Passing(EnvironmentFailure):
    """A failure that may be gone on the next attempt: no connection or no capacity."""


_repeat = stamina.AsyncRetryingCaller(attempts=5, timeout=None, wait_initial=0.1, wait_max=2.0).on(
    _Passing
)


class _Pool:
    """The HTTP connections of one event loop. They stay open while at least one `Wire` holds them."""

    _open: dict[asyncio.AbstractEventLoop, "_Pool"] = {}  # noqa: RUF012 - shared on purpose

    def __init__(self) -> None:
        # No limit of connections: aiohttp's default of 100 would hold up the steps of further episodes.
        self.http = ClientSession(connector=TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S))
        self._holders = 0

    @classmethod
    def hold(cls) -> "_Pool":
        loop = asyncio.get_running_loop()
        if loop not in cls._open:
            cls._open[loop] = cls()
        pool = cls._open[loop]
        pool._holders += 1
        return pool

    async def release(self) -> None:
        self._holders -= 1
        if not self._holders:
            del self._open[asyncio.get_running_loop()]
            await self.http.close()


class Wire:
    """Begins episodes and takes steps. After a failed or cancelled call, the server's environment is given up."""

    def __init__(self, dialect: Dialect, url: str, timeout_s: float) -> None:
        base = url.rstrip("/")
        self._base = base if base.endswith(dialect.prefix) else base + dialect.prefix
        self._dialect = dialect
        self._timeout = ClientTimeout(total=timeout_s)
        self._timeout_s = timeout_s
        self._pool: _Pool | None = None
        self._handle: Handle | None = None
        self._first = ""
        """The episode's first text, as the server sent it."""
        self._sound = False
        """Whether the last call was answered, so that the state of the server's environment is known."""

    @property
    def _handles(self) -> Handles:
        return make_handles(self._base)

    async def begin(self, task: int | str) -> str:
        """Begin a task and return its first observation."""
        self._first = await _repeat(self._begin, task)
        return self._first

    async def step(self, action: str) -> Verdict:
        """Take one step. Raises EnvironmentFailure if the server's environment may belong to another client by now."""
        # Until the answer is here: a cancelled step may or may not have been taken.
        self._sound = False
        handle = self._require_handle()
        body = {self._dialect.key: handle.number, self._dialect.action: action}
        # One key for all attempts: our server answers a repeat with the first answer.
        step = partial(self._post, "step", body, {KEY_HEADER: secrets.token_hex(8)})
        repeatable = self._handles.repeatable
        try:
            answer = await step()
        except _Passing:
            if not repeatable:
                raise
            answer = await _repeat(step)
        verdict = self._dialect.verdict(answer)
        if self._dialect.shares and not self._handles.repeatable:
            # SQLGym's server may have given this environment to another process too, with another question.
            await self._check_unshared()
        self._sound = True
        return verdict

    async def vocabulary(self) -> list[str]:
        """Return the words that Wordle's server accepts as guesses."""
        words = await _repeat(self._get, "filtered_vocab")
        return [str(word) for word in words] if isinstance(words, list) else []

    async def close(self) -> None:
        """Release the server's environment; keep it for the next episode if the server has no /close."""
        try:
            if self._handle is not None:
                await self._give_up()
        finally:
            pool, self._pool = self._pool, None
            if pool is not None:
                await pool.release()

    async def _begin(self, task: int | str) -> str:
        """Begin a task in the environment held, else in an idle one, else in a new one."""
        if self._handle is not None and (self._handle.void or not self._sound):
            await self._give_up()
        self._handle = self._handle or self._handles.take_idle()
        if self._handle is not None:
            try:
                return await self._reset(task)
            except (EnvironmentTimeout, _Passing):
                raise
            except EnvironmentFailure:
                # The server may have restarted, or closed an environment that was idle.
                await self._give_up()
        self._handle = await self._create()
        return await self._reset(task)

    async def _create(self) -> Handle:
        """Return a new environment. If the server has no more, wait for one that another episode releases."""
        handles = self._handles
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        while True:
            if not handles.full:
                created = await self._post("create", self._dialect.create_request())
                number = self._dialect.handle(created)
                if handle := handles.hold(number, self._dialect.shares):
                    return handle
            if idle := handles.take_idle():
                return idle
            try:
                async with asyncio.timeout_at(deadline):
                    await handles.wait_for_change()
            except TimeoutError:
                raise EnvironmentFailure(
                    f"every environment of {self._base} is in use here, and none was free for {self._timeout_s:g} s: "
                    "run fewer episodes at a time, or start more servers"
                ) from None

    async def _reset(self, task: int | str) -> str:
        self._sound = False
        dialect = self._dialect
        try:
            answer = await self._post(
                "reset",
                {dialect.key: self._require_handle().number, dialect.task: task, **dialect.fields},
            )
            dialect.check_begun(answer)
            text = dialect.first_text(
                answer if dialect.first_in_reset else await self._get("observation")
            )
        except _Passing:
            self._sound = True  # the server did not accept the call, and a reset does not depend on the old state
            raise
        self._sound = True
        return text

    async def _check_unshared(self) -> None:
        """Raise EnvironmentFailure unless the server's environment still has the task that was begun in it."""
        if await _repeat(self._get, "observation") != self._first:
            raise EnvironmentFailure(
                f"{self._base} gave this episode's environment to another client too, so the answer may be for the "
                "other client: run fewer episodes at a time, or give each actor its own server"
            )

    async def _give_up(self) -> None:
        handle, self._handle = self._handle, None
        if handle is None or handle.void:
            return
        if self._dialect.closes:
            self._handles.drop(handle)
            try:
                async with asyncio.timeout(min(CLOSE_S, self._timeout_s)):
                    await self._post("close", {self._dialect.key: handle.number})
            except (
                EnvironmentFailure,
                TimeoutError,
            ) as error:  # the episode is over, so this only costs the server
                log.warning("served_environment_not_closed", url=self._base, reason=str(error))
        # Without /close a server keeps an environment for ever, so the next episode uses it if its state is known.
        elif self._sound or self._dialect.shares:
            self._handles.keep_idle(handle)
        else:
            self._handles.drop(handle)

    def _require_handle(self) -> Handle:
        if self._handle is None or self._handle.void:
            raise EnvironmentFailure(
                f"a connection to {self._base} broke since the episode began: if the server has restarted, the "
                "environment with that number belongs to another episode"
            )
        return self._handle

    async def _post(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> Any:
        return await self._request("POST", path, json=body, headers=headers)

    async def _get(self, path: str) -> Any:
        return await self._request(
            "GET", path, params={self._dialect.key: self._require_handle().number}
        )

    async def _request(self, method: str, path: str, **options: Any) -> Any:
        """Return the JSON of an answer. Servers report errors as a status, as {"error": ...} or as `false`."""
        if self._pool is None:
            self._pool = _Pool.hold()
        url = f"{self._base}/{path}"
        if not self._handles.repeatable:
            # A busy server takes longer to read a request than it keeps an idle connection, which it then closes with
            # the request in it. To us that is a restart, which ends every episode: take a new connection per request.
            options["headers"] = {"Connection": "close", **(options.get("headers") or {})}
        try:
            async with self._pool.http.request(
                method, url, timeout=self._timeout, **options
            ) as response:
                status, raw = response.status, await response.read()
        except TimeoutError:
            raise EnvironmentTimeout(f"{url} gave no answer within {self._timeout_s:g} s") from None
        except (ClientError, OSError) as error:
            # AgentGym's servers count from 0 after a restart: a number held here may belong to another episode now.
            if not self._handles.repeatable:
                self._handles.void_all()
            raise _Passing(f"{url} cannot be reached ({error!r}): is the server running?") from None
        # Of every answer anew, since another server may have taken over the address. A proxy that is busy is no server.
        if REPEATABLE_HEADER in response.headers or status not in BUSY:
            self._handles.repeatable = REPEATABLE_HEADER in response.headers
        if status != 200:
            kind = _Passing if status in BUSY else EnvironmentFailure
            raise kind(f"{url} answered {status}: {raw[:200].decode(errors='replace')}")
        try:
            answer = json.loads(raw)
        except ValueError:
            raise EnvironmentFailure(
                f"{url} did not answer JSON: {raw[:200].decode(errors='replace')}"
            ) from None
        if answer is False or (isinstance(answer, dict) and "error" in answer):
            raise EnvironmentFailure(f"{url} answered {str(answer)[:200]}")
        return answer
