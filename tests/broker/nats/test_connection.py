import asyncio
import time
from collections.abc import Callable, Coroutine, MutableMapping
from typing import Any

import nats.errors
import nats.js.errors
import pytest
from structlog.testing import capture_logs

from horizonrl.broker.nats.connection import Connection, Stall
from horizonrl.common.errors import BrokerUnreachable


async def deaf() -> str:
    """Answer although cancelled, as `wait_for` does when the answer comes at the same moment."""
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        return "answer"
    return "never"


async def denied() -> str:
    """Fail although cancelled: the answer that comes at the same moment is an error, which passes."""
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        raise nats.errors.NoRespondersError from None
    return "never"


@pytest.mark.parametrize("swallowing", [deaf, denied])
async def test_a_cancellation_that_the_client_swallows_still_ends_the_request(
    swallowing: Callable[[], Coroutine[Any, Any, str]],
) -> None:
    connection = Connection("nats://nowhere")
    connection.opened()
    asking = asyncio.create_task(connection.ask(swallowing))
    await asyncio.sleep(0.01)
    asking.cancel()
    await asyncio.wait([asking], timeout=5)
    assert asking.cancelled()


async def test_a_deadline_that_the_client_swallows_does_not_cancel_what_comes_next() -> None:
    connection = Connection("nats://nowhere")
    connection.opened()
    with pytest.raises(BrokerUnreachable, match=r"has not answered for 0.01 s \(look\)"):
        await connection.ask(deaf, deadline_s=0.01, what="look")
    await asyncio.sleep(0.01)


FULL = nats.js.errors.ServiceUnavailableError(
    code=503, err_code=10077, description="maximum bytes exceeded"
)


@pytest.mark.parametrize(
    ("error", "event"),
    [
        (TimeoutError("nats: timeout"), "broker_stalled"),
        (nats.errors.NoRespondersError(), "broker_stalled"),
        (FULL, "stream_full"),
    ],
)
def test_a_request_that_waits_long_is_told_of_once_and_whenever_the_wait_has_doubled(
    error: Exception, event: str
) -> None:
    stall = Stall("publish run.groups.train", error)
    told: dict[int, MutableMapping[str, Any]] = {}
    for lasts_s in (0, 9, 11, 20, 23, 40, 47, 90, 95):
        stall.since = time.monotonic() - lasts_s
        with capture_logs() as logs:
            stall.tell("nats://there")
        if logs:
            told[lasts_s] = logs[0]
    assert list(told) == [11, 23, 47, 95]
    assert (told[23]["event"], told[23]["log_level"]) == (event, "warning")
    assert (told[23]["what"], told[23]["error"]) == ("publish run.groups.train", repr(error))
    assert told[23]["for_s"] >= 23


def test_a_link_tells_of_what_is_left_undone_and_that_it_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        connection, stalled, answers = (
            Connection("nats://there"),
            [],
            iter([TimeoutError(), FULL, "answer"]),
        )
        connection.opened()

        async def request() -> str:
            stalled.append(connection.stalled_s > 0)
            answer = next(answers)
            if isinstance(answer, Exception):
                raise answer
            return answer

        assert await connection.ask(request, what="look") == "answer"
        assert stalled == [False, True, True]
        assert connection.stalled_s == 0
        with pytest.raises(BrokerUnreachable):
            await connection.ask(deaf, deadline_s=0.01)

    monkeypatch.setattr("horizonrl.broker.nats.connection.TELL_AFTER_S", 0.0)
    with capture_logs() as logs:
        asyncio.run(scenario())
    events = [line["event"] for line in logs if not line["event"].startswith("stamina.")]
    assert events == ["broker_stalled", "stream_full", "broker_recovered"]
