"""One thread, one virtual clock, several processes: the event loop of a simulation.

Each simulated process is a `Life`. What it runs carries it as a context variable, so the loop knows whose callback
comes next. Within a life, callbacks run in their order, as asyncio promises; between lives a seed decides. A life that
is killed runs nothing more, not even its `finally`, and one that is paused runs on later. When nothing is ready the
clock jumps to the next timer.
"""

import asyncio
import heapq
import itertools
import random
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

EPOCH = 1.75e9
"""What the wall clock shows when a simulation begins."""
STEP_S = 2e-5
"""What a callback takes."""
MOST_CALLBACKS = 250_000
"""Callbacks of a run: one that needs more goes round in circles."""


class Stuck(Exception):
    """The run cannot go on, or does not end."""


@dataclass(eq=False)
class Life:
    """A process from its start to its end."""

    role: str
    number: int
    ready: deque[asyncio.Handle] = field(default_factory=deque)
    dead: bool = False
    awake_at: float = 0.0
    """It runs nothing before: SIGSTOP, or a machine that stalls."""
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    kills: list[Callable[[], None]] = field(default_factory=list)
    """Called when it is killed: what its sockets and its parent notice."""
    main: asyncio.Task[Any] | None = None
    signalled: bool = False
    """It was asked to end before its work was done."""

    @property
    def alive(self) -> bool:
        return not self.dead and self.main is not None and not self.main.done()

    def __str__(self) -> str:
        return f"{self.role}.{self.number}"


HOST = Life("host", 0)
"""The simulator itself, with the broker."""
LIFE: ContextVar[Life] = ContextVar("life", default=HOST)


class NumberedTask(asyncio.Task):  # type: ignore[type-arg]
    """A task whose place in a set does not depend on its address, since sets decide who is cancelled first."""

    numbers = itertools.count()

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.number = next(self.numbers)
        super().__init__(*arguments, **named)
        LIFE.get().tasks.append(self)

    def __hash__(self) -> int:
        return self.number


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop whose time is virtual. `before` is called before each callback of a life, and may kill it."""

    def __init__(self, dice: random.Random, deadline_s: float) -> None:
        super().__init__()
        self.dice = dice
        self.now, self.deadline_s = 0.0, deadline_s
        self.callbacks = 0
        self.before: Callable[[Life], None] = lambda _: None
        self.thread_s: Callable[[], float] = lambda: 0.0
        """Draws how long a call in a thread takes."""
        self._lives: list[Life] = []
        """Those with something to run."""
        self._order = itertools.count()
        self._free_at: dict[int, float] = {}
        """By executor with one thread, when that is free."""
        HOST.ready.clear()
        HOST.tasks.clear()
        self.set_task_factory(
            lambda loop, work, context=None: NumberedTask(work, loop=loop, context=context)
        )

    def time(self) -> float:
        return self.now

    def _call_soon(self, callback: Any, arguments: Any, context: Context | None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, arguments, self, context)
        self._add(handle)
        return handle

    def _add(self, handle: Any) -> None:
        life = handle._context.get(LIFE, HOST)
        if not life.ready and not life.dead:
            self._lives.append(life)
        life.ready.append(handle)

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Any, *arguments: Any, context: Context | None = None
    ) -> asyncio.Handle:
        return self._call_soon(callback, arguments, context)

    def _write_to_self(self) -> None: ...

    def _process_events(self, events: Any) -> None: ...

    def _run_once(self) -> None:
        """Run one callback of a life that the dice choose; if there is none, go to the next timer."""
        timers: list[Any] = self._scheduled  # type: ignore[attr-defined]
        while timers and (timers[0]._cancelled or timers[0]._when <= self.now):
            handle = heapq.heappop(timers)
            handle._scheduled = False
            if not handle._cancelled:
                self._add(handle)
        lives = [life for life in self._lives if life.awake_at <= self.now]
        if not lives:
            wakes = [life.awake_at for life in self._lives] + [timers[0]._when for _ in timers[:1]]
            if not wakes:
                raise Stuck("everyone waits for something that nothing will bring")
            self.now = max(self.now, min(wakes))
            if self.now > self.deadline_s:
                raise Stuck(f"the run has not ended after {self.deadline_s:g} s")
            return
        life = lives[0] if len(lives) == 1 else self.dice.choice(lives)
        self.before(life)
        if life.dead or life.awake_at > self.now:
            return
        handle = life.ready.popleft()
        if not life.ready:
            self._lives.remove(life)
        self.now += STEP_S
        self.callbacks += 1
        if self.callbacks > MOST_CALLBACKS:
            raise Stuck(f"{MOST_CALLBACKS} callbacks were not enough")
        if not handle._cancelled:
            handle._run()

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, call: Callable[..., Any], *arguments: Any
    ) -> asyncio.Future[Any]:
        """Make the call as a later callback. A process that is killed before does not make it."""
        future = self.create_future()
        took_s = self.thread_s()
        starts_at = self.now
        if executor is not None:  # the engine's, with one thread
            starts_at = max(self.now, self._free_at.get(id(executor), 0.0))
            self._free_at[id(executor)] = starts_at + took_s

        def run() -> None:
            # A thread that has begun goes on to the end, whoever waits for it.
            if executor is not None and future.cancelled():
                return
            try:
                result, error = call(*arguments), None
            except Exception as failure:  # noqa: BLE001 - whoever waits for it is told
                result, error = None, failure
            self.call_later(took_s / 2, answer, result, error)

        def answer(result: Any, error: Exception | None) -> None:
            if future.cancelled():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        self.call_at(starts_at + took_s / 2, run)
        return future

    def begin(self, life: Life, work: Any) -> asyncio.Task[Any]:
        """Start a coroutine as the main task of a life."""
        context = copy_context()
        context.run(LIFE.set, life)
        return context.run(self.create_task, work)

    def kill(self, life: Life) -> None:
        """End a life at once, as SIGKILL does."""
        life.dead = True
        if life in self._lives:
            self._lives.remove(life)
        for notice in life.kills:
            notice()

    def bury(self, life: Life) -> None:
        """Let a killed life run on, so that its tasks can be cancelled and nothing of it is collected half-way."""
        life.dead, life.awake_at = False, 0.0
        if life.ready and life not in self._lives:
            self._lives.append(life)


@contextmanager
def virtual_time(loop: VirtualLoop) -> Iterator[None]:
    """Show the loop's clock and dice to whoever asks the standard library."""

    def identifier() -> uuid.UUID:
        return uuid.UUID(int=loop.dice.getrandbits(128), version=4)

    with (
        patch.object(time, "monotonic", loop.time),
        patch.object(time, "time", lambda: EPOCH + loop.now),
        patch.object(time, "time_ns", lambda: int((EPOCH + loop.now) * 1e9)),
        patch.object(uuid, "uuid4", identifier),
    ):
        yield
