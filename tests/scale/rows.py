"""A row: messages, bytes and CPU time per group with so many actors, and what an idle actor costs.

Each row is a run of its own with as many groups per step as actors, so that every actor plays one group per version on
average, and the credit keeps all of them busy. The actors of every row play the same number of groups per second
together, so that the rows differ in the number of actors and in nothing else.
"""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from tests.scale.scaled_run import Reading, ScaledRun, running, step_s

WINDOWS, WINDOW_S = 3, 10.0
SMALL_WINDOW_S = 1.0
"""A row is measured in windows of at least so long, each of whole steps, because part of the cost comes once per step.
Long steps need fewer windows, but two."""
IDLE_FROM = 100
"""Fewer actors send too few messages in IDLE_S to count them."""
IDLE_S = 70.0
"""Twice the mean time after which an idle actor asks again."""
PROCESSES_S, CONNECTIONS_PER_S = 10, 200
"""Start of the processes, and light actors that connect per second, roughly."""


@dataclass(frozen=True, slots=True)
class ScaleRow:
    actors: int
    groups_per_s: float
    messages_per_group: float
    """In and out of the server, acknowledgements included."""
    bytes_per_group: float
    cpu_ms_per_group: float
    """Of server, controller and learner."""
    cpu_ms_low: float
    cpu_ms_high: float
    """Of the windows, the lowest and the highest."""
    server_ms_per_group: float
    controller_ms_per_group: float
    learner_ms_per_group: float
    actors_ms_per_group: float
    groups: int
    steps: int
    windows: int
    seconds: float
    """That were measured."""
    row_s: float
    """Of the whole row, with its start."""
    memory_mib: dict[str, float]
    idle_messages_per_s: float | None = None
    """Of one actor that waits for a ticket. None where it was not measured."""
    idle_server_cores: float | None = None
    """CPU time per second of the server while all of them wait."""


def forecast_s(actors: int, small: bool) -> float:
    """Return how long a row takes, roughly."""
    window_s = SMALL_WINDOW_S if small else WINDOW_S
    measured_s = max(WINDOWS * window_s, 2 * step_s(actors))
    idle_s = IDLE_S if _measures_idle(actors, small) else 0
    return PROCESSES_S + actors / CONNECTIONS_PER_S + idle_s + step_s(actors) + measured_s


async def measure(directory: Path, model: Path, actors: int, small: bool) -> ScaleRow:
    """Start a run with so many light actors, and measure it. Raises RunFailed if it does not get on."""
    began = time.monotonic()
    async with running(directory, model, actors) as scaled:
        # Before there is a learner, nobody issues tickets.
        idle = await _idle(scaled) if _measures_idle(actors, small) else None
        await scaled.start_role("learner")
        # The first step has the start of everything in it.
        await scaled.until_step(1)
        readings = await _read(scaled, SMALL_WINDOW_S if small else WINDOW_S)
        costs = [
            sum(cpu_ms.values()) - cpu_ms["actors"]
            for cpu_ms in map(_cpu_ms, readings, readings[1:])
        ]
        first, last = readings[0], readings[-1]
        groups, cpu_ms = last.groups - first.groups, _cpu_ms(first, last)
        return ScaleRow(
            actors=actors,
            groups_per_s=groups / (last.at - first.at),
            messages_per_group=(last.messages - first.messages) / groups,
            bytes_per_group=(last.bytes - first.bytes) / groups,
            cpu_ms_per_group=sum(cpu_ms.values()) - cpu_ms["actors"],
            cpu_ms_low=min(costs),
            cpu_ms_high=max(costs),
            server_ms_per_group=cpu_ms["server"],
            controller_ms_per_group=cpu_ms["controller"],
            learner_ms_per_group=cpu_ms["learner"],
            actors_ms_per_group=cpu_ms["actors"],
            groups=groups,
            steps=last.step - first.step,
            windows=len(costs),
            seconds=last.at - first.at,
            row_s=time.monotonic() - began,
            memory_mib=scaled.memory_mib(),
            idle_messages_per_s=idle and idle[0],
            idle_server_cores=idle and idle[1],
        )


async def _read(scaled: ScaledRun, window_s: float) -> list[Reading]:
    """Return readings at the ends of steps: one before the first window and one after each."""
    readings = [await scaled.read()]
    while len(readings) <= 2 or readings[-1].at - readings[0].at < WINDOWS * window_s:
        await asyncio.sleep(window_s)
        await scaled.until_step(max(readings[-1].step, await scaled.step()) + 1)
        readings.append(await scaled.read())
    return readings


def _cpu_ms(before: Reading, after: Reading) -> dict[str, float]:
    """Return the CPU time of each role per group between two readings."""
    groups = after.groups - before.groups
    return {role: 1e3 * (after.cpu_s[role] - before.cpu_s[role]) / groups for role in after.cpu_s}


def _measures_idle(actors: int, small: bool) -> bool:
    return actors >= IDLE_FROM and not small


async def _idle(scaled: ScaledRun) -> tuple[float, float]:
    """Return the messages per second of an actor that waits for a ticket, and the server's CPU time per second."""
    await scaled.until_idle()
    before, began = await scaled.server.figures(), time.monotonic()
    spent_s = scaled.cpu_s()["server"]
    await asyncio.sleep(IDLE_S)
    after, seconds = await scaled.server.figures(), time.monotonic() - began
    messages = sum(after[counter] - before[counter] for counter in ("in_msgs", "out_msgs"))
    return float(messages) / seconds / scaled.actors, (scaled.cpu_s()["server"] - spent_s) / seconds
