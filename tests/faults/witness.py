"""The witness: publishes messages of its own during the storm, and then looks whether each acknowledged one is there.

Place in the flow: the verdict judges a run by its tickets, which are issued again if they are lost. Nothing repeats the
witness's messages, so what the broker loses after it has acknowledged it shows here.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

from horizonrl.broker.api import Stream, Transport
from horizonrl.broker.connect import connected
from horizonrl.common.config.schema import BrokerSection

PAUSE_S = 0.05
MESSAGE = bytes(2_000)
READ_S = 30.0
BATCH = 8


@dataclass
class Witness:
    acknowledged: dict[str, int] = field(default_factory=dict)
    """By message id, the sequence that the broker has confirmed."""
    lost: int = 0
    doubled: int = 0

    @contextlib.asynccontextmanager
    async def watching(self, broker: BrokerSection) -> AsyncIterator[None]:
        """Publish while the body runs, then read everything back. `broker` is where to publish."""
        async with connected("witness", broker) as transport:
            publishing = asyncio.create_task(self._publish(transport))
            try:
                yield
            finally:
                publishing.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await publishing
            await self._read_back(transport)

    async def _publish(self, transport: Transport) -> None:
        number = 0
        while True:
            message_id = f"witness-{number}"
            stored = await transport.publish("groups.train", MESSAGE, message_id=message_id)
            self.acknowledged[message_id] = stored.sequence
            number += 1
            await asyncio.sleep(PAUSE_S)

    async def _read_back(self, transport: Transport) -> None:
        end, found = max(self.acknowledged.values(), default=0), dict[int, str | None]()
        reader = await transport.reader(Stream.GROUPS, 0)
        while max(found, default=0) < end and (messages := await reader.fetch(BATCH, READ_S)):
            found.update({message.sequence: message.message_id for message in messages})
        await reader.close()
        self.lost = sum(found.get(sequence) != name for name, sequence in self.acknowledged.items())
        self.doubled = sum(count - 1 for count in Counter(found.values()).values())

    def findings(self) -> Iterator[str]:
        if self.lost:
            yield f"witness: {self.lost} of {len(self.acknowledged)} acknowledged messages are gone"
        if self.doubled:
            yield f"witness: {self.doubled} messages are stored twice"
