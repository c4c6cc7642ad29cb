"""How much of the machine the environments of this process may use."""

import os
from functools import cache

_processes = 1


def divide(processes: int) -> None:
    """Say that as many processes play here side by side, so that each may use its share of the cores."""
    global _processes
    _processes = processes
    cores.cache_clear()


@cache
def cores() -> int:
    """Return the cores that this process's environments may keep busy, at least 1."""
    all_cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, all_cores // _processes)
