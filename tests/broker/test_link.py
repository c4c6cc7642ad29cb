import asyncio

import pytest

from horizonrl.broker.link import Link
from horizonrl.common.errors import BrokerUnreachable


async def deaf() -> str:
    """Answer although cancelled, as `wait_for` does when the answer comes at the same moment."""
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        return "answer"
    return "never"


def test_a_cancellation_that_the_client_swallows_still_ends_the_request() -> None:
    async def scenario() -> None:
        link = Link("nats://nowhere")
        link.opened()
        asking = asyncio.create_task(link.ask(deaf))
        await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.wait([asking], timeout=5)
        assert asking.cancelled()

    asyncio.run(scenario())


def test_a_deadline_that_the_client_swallows_does_not_cancel_what_comes_next() -> None:
    async def scenario() -> None:
        link = Link("nats://nowhere")
        link.opened()
        with pytest.raises(BrokerUnreachable, match=r"has not answered for 0.01 s"):
            await link.ask(deaf, deadline_s=0.01)
        await asyncio.sleep(0.01)

    asyncio.run(scenario())
