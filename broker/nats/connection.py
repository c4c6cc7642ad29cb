"""The live NATS connection under a transport: it reconnects for ever, remembers refusals, and repeats requests.

A NATS server does not answer a request that it refuses. The refusal arrives separately, and the request times out. So
the connection keeps the refusal, interrupts everyone who waits, and raises it from every later attempt: a role that is
refused something ends, and says why.

A server may also stop answering for ever: after its disk was full for a moment, it answers no publish until it is
restarted. So a request that is repeated for long is logged, whatever the cause.

The servers of a cluster are one broker. A server that is cut off from the others keeps its clients and can do nothing
for them, so a connection over which a request has failed for long moves to another server.
"""

import asyncio
import contextlib
import random
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import nats.errors
import nats.js.errors
import stamina
from nats.aio.client import Server
from nats.js import JetStreamContext

from horizonrl.broker.api import TransportCounters
from horizonrl.broker.nats.client import AbortingClient
from horizonrl.common.errors import BrokerDenied, BrokerUnreachable
from horizonrl.common.logs import get_logger

log = get_logger()
T = TypeVar("T")

CALL_DEADLINE_S = 600.0
"""How long a request is repeated before the broker counts as unreachable. That outlasts a restart, an upgrade or a
failed node; a broker that is gone ends the role with an error."""
TELL_AFTER_S = 10.0
"""A request that is repeated for this long is logged, and again each time that the wait has doubled."""
FAIL_OVER_S = 8.0
"""A connection that has not answered a request for this long moves to another server of its cluster. An election takes
about 5 s, during which no server could answer."""
CLOSE_S = 2.0
RECONNECT_WAIT_S = 0.2
"""Wait before the second attempt to connect again. It doubles with each further one."""
RECONNECT_MOST_S = 2.0
STREAM_IS_FULL = (10077, 10047, 10023)
"""JetStream's err_codes for a full stream, a full account and a full server."""
STILL_STORING = 10158
"""JetStream's err_code for a message whose first copy is not stored yet: a cluster is still agreeing on it."""
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
"""Errors that pass by themselves: the server is restarting, electing a leader, or full."""

WAIT_INITIAL_S = 0.05
"""Wait before a request is repeated for the first time."""


def passes(error: Exception) -> bool:
    """Return whether a request that failed with this error should be repeated."""
    return isinstance(error, PASSING) or (
        isinstance(error, nats.js.errors.APIError) and error.err_code == STILL_STORING
    )


# Without limits of its own: stamina's default gives up after 45 s, but the deadline belongs to each call (`ask`).
_repeat = stamina.AsyncRetryingCaller(
    attempts=None, timeout=None, wait_initial=WAIT_INITIAL_S, wait_max=2.0, wait_jitter=0.2
).on(passes)


# Compared by identity, so that a set can hold it while its fields change.
@dataclass(eq=False)
class Stall:
    """A request whose first attempt failed."""

    what: str
    cause: Exception
    since: float = field(default_factory=time.monotonic)
    told_s: float = 0.0
    """How long it had lasted when it was last logged."""

    @property
    def lasts_s(self) -> float:
        return time.monotonic() - self.since

    def tell(self, url: str) -> None:
        """Warn once the wait is long, and when it has doubled since."""
        lasts_s = self.lasts_s
        if lasts_s >= max(TELL_AFTER_S, 2 * self.told_s):
            self.told_s = lasts_s
            fields = {
                "what": self.what,
                "error": repr(self.cause),
                "for_s": round(lasts_s, 1),
                "url": url,
            }
            if is_full(self.cause):
                log.warning("stream_full", **fields)
            else:
                log.warning("broker_stalled", **fields)


def is_full(error: Exception) -> bool:
    """Return whether the server refuses a message because the stream, the account or the server is full."""
    return isinstance(error, nats.js.errors.APIError) and error.err_code in STREAM_IS_FULL


class Connection:
    def __init__(self, url: str, *, encrypted: bool = False, domain: str | None = None) -> None:
        self.url = url
        self.domain = domain
        """JetStream domain of the run's streams; None for that of the server."""
        self.mirrored: str | None = None
        """The stream that is read from a mirror in the server's own domain."""
        self.encrypted = encrypted
        """Refuse a server that does not offer TLS: somebody may be in between."""
        self.client = AbortingClient()
        self.counters = TransportCounters()
        # Set while there is something to say: a connection, a refusal, or the end. The last two raise at once.
        self._up = asyncio.Event()
        self._waiting: set[asyncio.Timeout] = set()
        """The requests in flight."""
        self._stalls: set[Stall] = set()
        self._wait_s = RECONNECT_WAIT_S
        self._opened = False
        """Whether there has ever been a connection. From then on, whatever fails is tried again."""
        self._refusal: str | None = None
        self._since = 0.0
        """When the present connection was opened, by the clock of `time.monotonic`."""
        self._left = ""
        """Host and port of the server that the connection left last."""

    def jetstream(self, stream: str = "") -> JetStreamContext:
        """Return the API that answers for a stream: that of the run's domain, or of the mirror next to the client."""
        there = self.domain is not None and stream != self.mirrored
        return self.client.jetstream(domain=self.domain) if there else self.client.jetstream()

    def api(self, stream: str) -> str:
        """Return the subject under which the API answers for a stream."""
        prefix: str = self.jetstream(stream)._prefix
        return prefix

    async def ask(
        self,
        request: Callable[[], Awaitable[T]],
        deadline_s: float | None = CALL_DEADLINE_S,
        *,
        what: str = "a request",
    ) -> T:
        """Repeat a request until the server answers it; the request must be safe to repeat.

        `what` names it in the log. Raises BrokerUnreachable after `deadline_s` (None waits for ever), and BrokerDenied
        if the server refuses it.
        """
        try:
            async with asyncio.timeout(deadline_s):
                return await self._repeat_until_answered(what, request)
        except TimeoutError:
            # The server does not answer what it refuses, so a refusal first shows as a timeout.
            self.raise_refusal()
            raise BrokerUnreachable(
                f"{self.url} has not answered for {deadline_s} s ({what})"
            ) from None
        except nats.errors.ConnectionClosedError:
            self.raise_refusal()
            raise BrokerUnreachable(f"the connection to {self.url} is closed") from None

    async def _repeat_until_answered(self, what: str, request: Callable[[], Awaitable[T]]) -> T:
        stall: Stall | None = None

        async def attempt() -> T:
            nonlocal stall
            try:
                async with self.while_connected():
                    return await request()
            except Exception as error:
                if not passes(error):
                    raise
                # The clock starts with the first failure: a single slow answer is no stall.
                stall = stall or Stall(what, error)
                stall.cause = error
                stall.tell(self.url)
                self._stalls.add(stall)
                await self._fail_over(stall)
                raise

        try:
            try:
                answer = await attempt()
            except Exception as error:
                if not passes(error):
                    raise
                # stamina's loop costs as much as the rest of a request, so that only failures enter it.
                await asyncio.sleep(WAIT_INITIAL_S)
                answer = await _repeat(attempt)
            if stall is not None and stall.told_s:
                log.info(
                    "broker_recovered", what=what, after_s=round(stall.lasts_s, 1), url=self.url
                )
            return answer
        finally:
            # Also when the caller is cancelled: nobody waits for this request any more.
            self._stalls -= {stall}

    @property
    def server_name(self) -> str:
        return str(self.client._server_info.get("server_name", ""))

    @property
    def clustered(self) -> bool:
        """Whether the server belongs to a cluster, according to itself."""
        return bool(self.client._server_info.get("cluster"))

    async def _fail_over(self, stall: Stall) -> None:
        """Move to another server if this one has had time enough to answer."""
        # Also with one url: it may be that of a service, behind which all servers are.
        if not self.clustered or is_full(stall.cause) or not self.client.is_connected:
            return
        if min(stall.lasts_s, time.monotonic() - self._since) > FAIL_OVER_S:
            log.warning("broker_left", url=self._address, what=stall.what, error=repr(stall.cause))
            self._left = self._address
            await self.client.force_reconnect()

    @property
    def _address(self) -> str:
        url = self.client.connected_url
        return url.netloc if url else ""

    def next_server(self, servers: list[Server], _: dict[str, object]) -> tuple[Server, float]:
        """Choose the server to connect to next: at the first attempt, any but the one that was left."""
        others = [server for server in servers if server.uri.netloc != self._left]
        self._left = ""
        return random.choice(others or servers), RECONNECT_WAIT_S

    @property
    def stalled_s(self) -> float:
        """How long the request that waits longest has been repeated."""
        return max((stall.lasts_s for stall in self._stalls), default=0.0)

    @contextlib.asynccontextmanager
    async def while_connected(self) -> AsyncIterator[None]:
        """Wait for the connection, then run the body; raise TimeoutError in it if the connection is lost.

        No answer comes over a lost connection, so that its request has to be made again on the next one. If the client
        swallowed a cancellation in the body, it is raised afterwards: nats-py waits with `wait_for`, and in Python 3.11
        an answer that comes at the same moment wins over the cancellation.
        """
        await self._up.wait()
        # A refusal sets `_up` as well, to wake those who wait for a connection that would never do their work.
        self.raise_refusal()
        task = asyncio.current_task()
        cancelled_before = task.cancelling() if task else 0
        # A timeout without a deadline is a handle: `_interrupt` moves its deadline to now when the connection is lost.
        try:
            async with asyncio.timeout(None) as patience:
                self._waiting.add(patience)
                try:
                    yield
                finally:
                    self._waiting.discard(patience)
        finally:
            # In Python 3.11, `wait_for` loses a cancellation if an answer, or an error, arrives in the same turn of the
            # loop. An error would be taken for one that passes, and the request made again.
            if task and task.cancelling() > cancelled_before:
                raise asyncio.CancelledError

    def raise_refusal(self) -> None:
        """Raise BrokerDenied if the server has ever refused something: this role can no longer do its work."""
        if self._refusal is not None:
            raise BrokerDenied(self._refusal)

    def opened(self) -> None:
        """Start using the first connection. Raises BrokerDenied if it should be encrypted and is not."""
        self._check_encryption()
        self.raise_refusal()
        self._opened, self._since = True, time.monotonic()
        self._up.set()

    def _check_encryption(self) -> None:
        # Checked after each reconnect too: whoever sits in between could wait for one to take the encryption away.
        if self.encrypted and not self.client._server_info.get("tls_required"):
            self._refuse(
                f"{self.url} offers no TLS although broker.nats.ca_file is set: check the address, or unset it"
            )

    async def close(self) -> None:
        """Close the connection, and end every wait for it."""
        # The client writes what is pending to a socket that may be gone, and asserts that it was ever connected.
        # After a failed TLS handshake it waits for an answer to its close that never comes. uvloop raises a
        # RuntimeError for a socket that is gone ("the handler is closed").
        with contextlib.suppress(OSError, AssertionError, TimeoutError, RuntimeError):
            async with asyncio.timeout(CLOSE_S):
                await self.client.close()
        self._up.set()

    async def on_reconnected(self) -> None:
        self.counters.reconnects += 1
        self._since = time.monotonic()
        self._check_encryption()
        self._up.set()
        log.info("broker_reconnected", url=self.url, reconnects=self.counters.reconnects)

    async def on_disconnected(self) -> None:
        # Our own close and a refusal end the connection for good: clearing `_up` would let their waiters hang.
        if not self.client.is_closed and self._refusal is None:
            self._up.clear()
            self._interrupt()
            self._space_attempts(RECONNECT_WAIT_S)
            log.warning("broker_disconnected", url=self.url)

    def _space_attempts(self, wait_s: float) -> None:
        """Wait for up to `wait_s` before the next attempt to connect, each client for another time.

        A server that comes back would otherwise meet 10,000 actors in the same tenth of a second.
        """
        self._wait_s = min(wait_s, RECONNECT_MOST_S)
        self.client.options["reconnect_time_wait"] = self._wait_s * random.uniform(0.5, 1.0)

    async def on_closed(self) -> None:
        # Revoked while connected.
        if isinstance(self.client.last_error, nats.errors.AuthorizationError):
            await self.on_error(self.client.last_error)
        # Waiters wake and find the client closed, instead of waiting for a reconnect that never comes.
        self._up.set()

    async def on_error(self, error: Exception) -> None:
        """Tell a refusal from the noise of a lost connection; raise one that comes before the first connection."""
        # The server reports a refusal as a line of text on the connection, so the text is all there is to go by.
        text = str(error).removeprefix("nats: ").strip("'")
        if "permissions violation" in text.lower() and "_inbox." in text.lower():
            # Every key of a run may hear the answers of its own role, whatever else it may not.
            self._refuse(
                f"{self.url} refuses: {text}: the key in broker.nats.nkey_seed, or the user, is not of this role of "
                "this run (`horizonrl broker keys` writes one for each role): give the role its own"
            )
        elif "permissions violation" in text.lower():
            self._refuse(
                f"{self.url} refuses: {text}; give this user the permission (broker/PROTOCOL.md)"
            )
        elif "authorization violation" in text.lower():
            self._refuse(
                f"{self.url} refuses the credentials: check broker.nats.nkey_seed, or broker.nats.user and the password"
            )
        elif isinstance(error, ssl.SSLCertVerificationError):
            self._refuse(
                f"{self.url} has a certificate that is not trusted ({error.verify_message}): "
                "broker.nats.ca_file must hold the authority that signed it, and broker.url a name that it contains"
            )
        else:
            if not self._up.is_set():  # an attempt to connect again has failed
                self._space_attempts(2 * self._wait_s)
            log.debug("broker_error", url=self.url, error=repr(error))
            return
        # `connect` would try a refused address again until its timeout. Afterwards each call raises the refusal itself.
        if not self._opened:
            self.raise_refusal()

    def _refuse(self, refusal: str) -> None:
        """Remember a refusal and end every wait: a server does not answer requests that it refuses."""
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
