"""The server environments that this process holds, by the numbers that the server gave them.

AgentGym's servers trust their callers: the number alone identifies an episode. SQLGym's server hands out its eight
environments in turn even if they are in use, and a restarted server counts from 0 again. In both cases two episodes
would act in one environment and each would get rewards for the other's actions. So a number has one holder at a time,
and a broken connection voids all numbers.
"""

import asyncio
from collections.abc import MutableMapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary


@dataclass(eq=False, slots=True)
class Handle:
    number: int
    void: bool = False
    """The number may belong to another client's environment by now."""


class Handles:
    """The environments of one server that are in use or idle, in one event loop."""

    def __init__(self) -> None:
        self.full = False
        """The server returned a number that is in use here: it has no further environment."""
        self.repeatable = False
        """The server is ours: it takes a repeated step only once and never reuses a number."""
        self._held: dict[int, Handle] = {}
        self._idle: list[Handle] = []
        self._changed = asyncio.Event()

    def hold(self, number: int, shares: bool) -> Handle | None:
        """Hold a number that /create returned. Returns None if the server shares environments and this one is held."""
        if number in self._held:
            if shares:
                self.full = True
                return None
            self.void_all()  # the server has restarted and counts from 0 again
        handle = self._held[number] = Handle(number)
        return handle

    def take_idle(self) -> Handle | None:
        """Return an idle environment, or None."""
        return self._idle.pop() if self._idle else None

    def keep_idle(self, handle: Handle) -> None:
        """Keep an environment for the next episode."""
        self._idle.append(handle)
        self._wake()

    def drop(self, handle: Handle) -> None:
        """Forget an environment."""
        # After `void_all` the number may be another handle's.
        if self._held.get(handle.number) is handle:
            del self._held[handle.number]

    def void_all(self) -> None:
        """Give up every environment, since other clients may have their numbers now."""
        for handle in self._held.values():
            handle.void = True
        self._held, self._idle, self.full = {}, [], False
        self._wake()

    async def wait_for_change(self) -> None:
        """Wait until an environment becomes idle, or all are given up."""
        await self._changed.wait()

    def _wake(self) -> None:
        # A new event for the next change: whoever waits for this one wakes, and nobody has to clear it.
        self._changed.set()
        self._changed = asyncio.Event()


# By loop, since an event belongs to one; weak, since loops end before the process does.
_BY_LOOP: MutableMapping[asyncio.AbstractEventLoop, dict[str, Handles]] = WeakKeyDictionary()


def make_handles(base: str) -> Handles:
    """Return the environments that this event loop holds on the server at an address."""
    return _BY_LOOP.setdefault(asyncio.get_running_loop(), {}).setdefault(base, Handles())
