"""The live NATS connection under a transport: it reconnects for ever, remembers refusals, and repeats requests.

A NATS server does not answer a request that it refuses: the refusal arrives beside it, and the request times out. The
link keeps the refusal, interrupts whoever waits and raises it from every attempt from then on: a role that is refused
something ends, and says why.

A server may also do nothing at all, for ever: one whose disk was full for a moment answers no publish until it is
started again. So a request that is repeated for long is told of, whatever the cause.
"""

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import nats.errors
import nats.js.errors
import stamina
from nats.aio.client import Client

from horizonrl.broker.api import TransportCounters
from horizonrl.common.errors import BrokerDenied, BrokerUnreachable
from horizonrl.common.logs import get_logger

log = get_logger()
T = TypeVar("T")

CALL_DEADLINE_S = 600.0
"""How long a request is repeated before its caller hears that the broker is unreachable: a restart, an upgrade or a
failed node is waited out, a broker that is gone ends the role with an error."""
TELL_AFTER_S = 10.0
"""A request that is repeated so long is told of, and again each time that the wait has doubled."""
CLOSE_S = 2.0
STREAM_IS_FULL = (10077, 10047, 10023)
"""JetStream's err_code for a stream, the account's storage and the server's storage that hold no more."""
PASSING = (
    TimeoutError,
    nats.errors.NoRespondersError,
    nats.errors.OutboundBufferLimitError,
    nats.errors.ConnectionReconnectingError,
    nats.errors.StaleConnectionError,
    nats.js.errors.NoStreamResponseError,
    nats.js.errors.ServiceUnavailableError,
    nats.js.errors.ServerError,
)
"""What passes by itself: the server is restarting, electing, or full."""


_repeat = stamina.AsyncRetryingCaller(attempts=None, timeout=None, wait_initial=0.05, wait_max=2.0, wait_jitter=0.2).on(
    PASSING
)


@dataclass(eq=False)
class Stall:
    """A request that has not been done at the first attempt."""

    what: str
    cause: Exception
    since: float = field(default_factory=time.monotonic)
    told_s: float = 0.0
    """How long it had lasted when it was last told of."""

    @property
    def lasts_s(self) -> float:
        return time.monotonic() - self.since

    def tell(self, url: str) -> None:
        """Warn once the wait is long, and when it has doubled since."""
        lasts_s = self.lasts_s
        if lasts_s >= max(TELL_AFTER_S, 2 * self.told_s):
            self.told_s = lasts_s
            told = {"what": self.what, "error": repr(self.cause), "for_s": round(lasts_s, 1), "url": url}
            if is_full(self.cause):
                log.warning("stream_full", **told)
            else:
                log.warning("broker_stalled", **told)


def is_full(error: Exception) -> bool:
    """Say whether the server refuses a message because stream, account or server hold no more."""
    return isinstance(error, nats.js.errors.APIError) and error.err_code in STREAM_IS_FULL


class Link:
    def __init__(self, url: str, *, encrypted: bool = False) -> None:
        self.url = url
        self.encrypted = encrypted
        """Refuse a server that does not offer TLS: somebody may stand between."""
        self.client = Client()
        self.counters = TransportCounters()
        self._up = asyncio.Event()
        self._waiting: set[asyncio.Timeout] = set()
        """The requests in flight."""
        self._stalls: set[Stall] = set()
        self._opened = False
        """There has been a connection: whatever fails now, it is tried again."""
        self._refusal: str | None = None

    async def ask(
        self,
        request: Callable[[], Awaitable[T]],
        deadline_s: float | None = CALL_DEADLINE_S,
        *,
        what: str = "a request",
    ) -> T:
        """Make a request again and again until the server has answered it; it must be safe to repeat.

        `what` names it to people. Raises BrokerUnreachable after `deadline_s`, BrokerDenied when the server refuses it;
        None waits for ever.
        """
        try:
            async with asyncio.timeout(deadline_s):
                return await self._answered(what, request)
        except TimeoutError:
            self.raise_refusal()
            raise BrokerUnreachable(f"{self.url} has not answered for {deadline_s} s ({what})") from None
        except nats.errors.ConnectionClosedError:
            self.raise_refusal()
            raise BrokerUnreachable(f"the connection to {self.url} is closed") from None

    async def _answered(self, what: str, request: Callable[[], Awaitable[T]]) -> T:
        stall: Stall | None = None

        async def attempt() -> T:
            nonlocal stall
            try:
                async with self.while_connected():
                    return await request()
            except PASSING as error:
                stall = stall or Stall(what, error)
                stall.cause = error
                stall.tell(self.url)
                self._stalls.add(stall)
                raise

        try:
            answer = await _repeat(attempt)
            if stall is not None and stall.told_s:
                log.info("broker_recovered", what=what, after_s=round(stall.lasts_s, 1), url=self.url)
            return answer
        finally:
            self._stalls -= {stall}

    @property
    def stalled_s(self) -> float:
        """How long the request that waits longest has been repeated."""
        return max((stall.lasts_s for stall in self._stalls), default=0.0)

    @contextlib.asynccontextmanager
    async def while_connected(self) -> AsyncIterator[None]:
        """Wait for the connection, then run the body; raise TimeoutError in it when the connection is lost.

        No answer comes over a connection that is lost, so that whoever waits for one should ask again on the next.
        A cancellation that the client swallowed in the body is raised after it: nats-py waits with `wait_for`, which in
        Python 3.11 lets an answer that comes at the same moment win.
        """
        await self._up.wait()
        self.raise_refusal()
        task = asyncio.current_task()
        cancelled_before = task.cancelling() if task else 0
        async with asyncio.timeout(None) as patience:
            self._waiting.add(patience)
            try:
                yield
            finally:
                self._waiting.discard(patience)
        if task and task.cancelling() > cancelled_before:
            raise asyncio.CancelledError

    def raise_refusal(self) -> None:
        """Raise BrokerDenied if the server has ever refused something: this role cannot do its work any more."""
        if self._refusal is not None:
            raise BrokerDenied(self._refusal)

    def opened(self) -> None:
        """Take up the first connection. Raises BrokerDenied when it should be encrypted and is not."""
        self._check_encryption()
        self.raise_refusal()
        self._opened = True
        self._up.set()

    def _check_encryption(self) -> None:
        if self.encrypted and not self.client._server_info.get("tls_required"):
            self._refuse(f"{self.url} offers no TLS although broker.ca_file is set: check the address, or unset it")

    async def close(self) -> None:
        """Close the connection; whoever waits for it learns that it will not come back."""
        # The client writes what is pending to a socket that may be gone, and asserts that it was ever connected.
        # After a failed TLS handshake it waits for a farewell that does not come.
        with contextlib.suppress(OSError, AssertionError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self.client.close()
        self._up.set()

    async def on_reconnected(self) -> None:
        self.counters.reconnects += 1
        self._check_encryption()
        self._up.set()
        log.info("broker_reconnected", url=self.url, reconnects=self.counters.reconnects)

    async def on_disconnected(self) -> None:
        if not self.client.is_closed and self._refusal is None:
            self._up.clear()
            self._interrupt()
            log.warning("broker_disconnected", url=self.url)

    async def on_closed(self) -> None:
        if isinstance(self.client.last_error, nats.errors.AuthorizationError):  # revoked while connected
            await self.on_error(self.client.last_error)
        self._up.set()

    async def on_error(self, error: Exception) -> None:
        """Tell a refusal from the noise of a lost connection; one that stands before any connection is raised here."""
        text = str(error).removeprefix("nats: ").strip("'")
        if "permissions violation" in text.lower():
            self._refuse(f"{self.url} refuses: {text}; give this user the permission (broker/PROTOCOL.md)")
        elif "authorization violation" in text.lower():
            self._refuse(f"{self.url} refuses the credentials: check broker.nkey_seed, or broker.user and the password")
        elif isinstance(error, ssl.SSLCertVerificationError):
            self._refuse(
                f"{self.url} has a certificate that is not trusted ({error.verify_message}): "
                "broker.ca_file must hold the authority that signed it, and broker.url a name that stands in it"
            )
        else:
            log.debug("broker_error", url=self.url, error=repr(error))
            return
        if not self._opened:
            self.raise_refusal()

    def _refuse(self, refusal: str) -> None:
        """Remember a refusal and end every wait: a server does not answer what it refuses."""
        self.counters.denied += 1
        self._refusal = refusal
        log.error("broker_denied", url=self.url, refusal=refusal)
        self._up.set()
        self._interrupt()

    def _interrupt(self) -> None:
        """Raise TimeoutError in the requests in flight."""
        waiting, self._waiting = self._waiting, set()
        for patience in waiting:
            patience.reschedule(asyncio.get_running_loop().time())
