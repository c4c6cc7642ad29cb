"""The run's state: four keys, each with one writer. Everyone may watch them."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TypeVar

from horizonrl.broker.api import Key, Transport
from horizonrl.broker.codec import decode, encode
from horizonrl.common.errors import MalformedRecord, RecordTooLarge, RunFailed
from horizonrl.common.logs import get_logger
from horizonrl.common.state import HorizonState, Progress, RunSettings, WeightsManifest

log = get_logger()

R = TypeVar("R", Progress, WeightsManifest)
StateRecord = Progress | WeightsManifest | HorizonState | RunSettings

RECORDS: dict[Key, type[StateRecord]] = {
    Key.PROGRESS: Progress,
    Key.POLICY: WeightsManifest,
    Key.HORIZON: HorizonState,
    Key.RUN: RunSettings,
}


@dataclass(frozen=True, slots=True)
class StateStore:
    transport: Transport

    async def put(self, key: Key, record: StateRecord, after: int | None = None) -> int:
        """Set a key and return its revision. With `after`, raise StateConflict if the key has another revision by now.

        Raises TypeError for a record that belongs to another key.
        """
        if not isinstance(record, RECORDS[key]):
            raise TypeError(
                f"the key {key.value} holds a {RECORDS[key].__name__}, not a {type(record).__name__}"
            )
        return await self.transport.put(key, encode(record), after)

    async def get(self, key: Key) -> StateRecord | None:
        """Return a key's record, or None if it has none; bytes that are no record are logged and count as none.

        Raises UnknownSchema for a record of another schema.
        """
        data = await self.transport.get(key)
        return None if data is None else _decode(key, data)

    async def until_end(self, follows: type[R], total_steps: int) -> AsyncIterator[R]:
        """Yield what the learner announces until the run is over: its progress, or the weights, as actors do.

        `total_steps` is the run's length in the caller's config. A run that was finished and then given more steps is
        not over: this waits for its learner, however long that takes to load. Raises RunFailed if the broker stops
        sending.
        """
        running = False
        async for record in self.watch(Key.PROGRESS if follows is Progress else Key.POLICY):
            if not isinstance(record, follows):
                continue
            ended = record.finished_step
            # The first value may be the end of an earlier, shorter run, which says nothing about this one.
            running = running or ended is None
            yield record
            if ended is not None and (running or ended >= total_steps):
                return
            if ended is not None:
                log.info("learner_awaited", finished_at=ended, steps=total_steps)
        # No silent end: whoever waits for what comes next would wait for ever.
        raise RunFailed("the broker stopped sending the run's state; start this role again")

    async def watch(self, key: Key) -> AsyncIterator[StateRecord]:
        """Yield a key's present record, then each later one. Intermediate records may be skipped."""
        async for data in self.transport.watch(key):
            if (record := _decode(key, data)) is not None:
                yield record


def _decode(key: Key, data: bytes) -> StateRecord | None:
    try:
        return decode(data, RECORDS[key])
    except (MalformedRecord, RecordTooLarge) as error:
        # UnknownSchema goes on to the caller: a role that cannot read the run's state has to end, and to say so.
        log.error("state_defaced", key=key.value, reason=str(error))
        return None
