"""The environments of a server that this process holds, by the numbers that the server gave them.

AgentGym's servers trust their callers: a number says who an episode is. SQLGym's hands out its eight environments in
turn, whoever uses them; a server that has started anew counts from 0 again. Either way two episodes would act in one
environment, and each would be paid for what the other did. So a number has one holder, and a broken connection voids
all.
"""

import asyncio
from collections.abc import MutableMapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary


@dataclass(eq=False, slots=True)
class Handle:
    number: int
    void: bool = False
    """The number may name somebody else's environment by now."""


class Handles:
    """Who holds which environment of one server, in one event loop."""

    def __init__(self) -> None:
        self.full = False
        """The server answered a number that is held: it has no further environment for us."""
        self.repeatable = False
        """It is a server of ours: it answers a repeated step once, and never uses a number again."""
        self._held: dict[int, Handle] = {}
        self._idle: list[Handle] = []
        self._changed = asyncio.Event()

    def hold(self, number: int, shares: bool) -> Handle | None:
        """Take a number that /create answered. None when a server that shares its environments gave a held one."""
        if number in self._held:
            if shares:
                self.full = True
                return None
            self.void_all()  # the server counts from 0 again: it has started anew
        handle = self._held[number] = Handle(number)
        return handle

    def take_idle(self) -> Handle | None:
        """Return an environment that is held by no episode."""
        return self._idle.pop() if self._idle else None

    def keep_idle(self, handle: Handle) -> None:
        """Keep an environment for the next episode."""
        self._idle.append(handle)
        self._wake()

    def drop(self, handle: Handle) -> None:
        """Forget an environment."""
        if self._held.get(handle.number) is handle:
            del self._held[handle.number]

    def void_all(self) -> None:
        """Give up every environment: their numbers may be others' now."""
        for handle in self._held.values():
            handle.void = True
        self._held, self._idle, self.full = {}, [], False
        self._wake()

    async def wait_for_change(self) -> None:
        """Wait until an environment becomes idle, or all are given up."""
        await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


_BY_LOOP: MutableMapping[asyncio.AbstractEventLoop, dict[str, Handles]] = WeakKeyDictionary()


def handles_of(base: str) -> Handles:
    """Return the environments held of the server at an address."""
    return _BY_LOOP.setdefault(asyncio.get_running_loop(), {}).setdefault(base, Handles())
