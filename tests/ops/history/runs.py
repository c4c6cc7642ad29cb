"""A recorded run of a small world, and runs of the same log or of a changed one."""

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from horizonrl.broker.api import Stream
from horizonrl.broker.memory import SERVERS, MemoryServer
from horizonrl.ops.rundir.directory import write_config
from horizonrl.ops.rundir.lines import read_lines
from tests.learner.world import MortalTransport, World

IMITATION, STEPS, RECORDED = 2, 7, 11
"""Steps of imitation, of a twin, and of the first run: a twin that drops groups finds others in its log."""


def world(root: Path, server: MemoryServer, *overrides: str, kind: type[World] = World) -> World:
    SERVERS[root.name.lower()] = server
    url = f"--broker.url=memory://{root.name.lower()}"
    return kind(
        root,
        server=server,
        overrides=("--rl.stale=drop", url, *overrides),
    )


def record(root: Path, *overrides: str, hand: int = 1, kind: type[World] = World) -> World:
    # On a busy machine too, a hand fills up, and no lease of it lapses: its tickets would be played again, in order.
    server, steps = MemoryServer(), f"--rl.steps={RECORDED - IMITATION}"
    run = world(root, server, steps, *overrides, kind=kind)
    run.hand, run.patience_s = hand, 0.1
    asyncio.run(run.run())
    write_config(run.config)
    return run


def forget_loop(server: MemoryServer) -> None:
    """Let a broker in memory serve another event loop, as a real one does."""
    server._changed = asyncio.Condition()


class Twin:
    """A run of the same log as the first one, or of a changed one."""

    def __init__(
        self, first: World, root: Path, seed: int, make: Callable[..., World] = world
    ) -> None:
        root.mkdir()
        self.root, self.dice, self.make = root, random.Random(seed), make
        self.ledger = first.ledger()
        self.server = MemoryServer()
        for stream in (Stream.TICKETS, Stream.GROUPS):
            held, copy = (
                server.runs["run"].streams[stream] for server in (first.server, self.server)
            )
            copy.messages, copy.ids = dict(held.messages), dict(held.ids)
            copy.last_sequence = held.last_sequence
        self.messages = self.server.runs["run"].streams[Stream.GROUPS].messages
        self.run_dir = root / "run"

    def learn(self, *parts: Sequence[str]) -> None:
        """Let learners train the log, one after the other, each with its own overrides."""

        async def learn() -> None:
            for overrides in parts or [()]:
                run = self.make(self.root, self.server, *overrides)
                await run.learn(MortalTransport(self.server, None))
                write_config(run.config)

        asyncio.run(asyncio.wait_for(learn(), 20))

    def draw_step(self) -> int:
        return self.dice.randint(IMITATION + 1, STEPS)

    def draw_group(self) -> tuple[int, int, str]:
        """Return a step of RL, and sequence and ticket of a group that it trained."""
        step = self.draw_step()
        sequence, ticket = self.dice.choice(self.ledger[step - 1]["trained"])
        return step, sequence, ticket

    def rewrite(self, name: str, change: Callable[[int, dict[str, Any]], Any]) -> None:
        lines = [
            change(number, line) for number, line in enumerate(read_lines(self.run_dir / name))
        ]
        (self.run_dir / name).write_text("".join(json.dumps(line) + "\n" for line in lines))

    def change_from(self, step: int, *overrides: str) -> None:
        self.learn([f"--rl.steps={step - 1 - IMITATION}"], overrides)
