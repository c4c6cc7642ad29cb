"""Horizon schedules: pure functions of the RL step, so that a resumed controller continues at the exact stage.

`staged` is ScalingInter-RL (arXiv 2509.08755): horizons h1 < h2 < ..., the next one after every `steps_per_stage`
training steps. `linear` reaches the last horizon where `staged` would, in single turns.
"""

from collections.abc import Sequence
from typing import Literal

ScheduleKind = Literal["fixed", "staged", "linear"]


def horizon_turns(kind: ScheduleKind, horizons: Sequence[int], steps_per_stage: int, step: int) -> int:
    """Return the horizon in force at RL step `step` (from 0), in turns."""
    if kind == "fixed":
        return horizons[-1]
    if kind == "staged":
        return horizons[min(step // steps_per_stage, len(horizons) - 1)]
    last_step = steps_per_stage * (len(horizons) - 1)
    share = min(step / last_step, 1.0) if last_step else 1.0
    return horizons[0] + int((horizons[-1] - horizons[0]) * share)
