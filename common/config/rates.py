"""Learning-rate schedules: the rate of an optimizer step as a function of its number in the phase."""

import math
from typing import Literal

RateSchedule = Literal["constant", "linear", "cosine"]


def warm_up(step: int, warmup_steps: int) -> float:
    """Return the share of the peak at step `step` (from 0) of a linear warm-up; 1 after it."""
    # Counted from 1, so that the first step has a learning rate above 0.
    return min(1.0, (step + 1) / max(1, warmup_steps))


def decay(schedule: RateSchedule, step: int, steps: int, warmup_steps: int) -> float:
    """Return the share of the peak at step `step` (from 0) of a phase of `steps` steps; 1 during the warm-up.

    The first step after the warm-up has the peak, and a step after the last one would have 0, as in transformers'
    schedulers (SGDR's half cosine without restarts, arXiv 1608.03983).
    """
    if schedule == "constant" or step < warmup_steps:
        return 1.0
    passed = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    return 1.0 - passed if schedule == "linear" else (1.0 + math.cos(math.pi * passed)) / 2.0


def refuse_senseless(phase: str, schedule: RateSchedule, steps: int, warmup_steps: int) -> None:
    """Raise ValueError for a schedule whose keys contradict each other, with the fix."""
    if schedule != "constant" and 0 < steps <= warmup_steps:
        raise ValueError(
            f"{phase}.lr_schedule is {schedule} but the warm-up of {warmup_steps} steps takes all of the {steps} steps "
            f"in which {phase} trains the policy, so that nothing is left to fall: give fewer warmup_steps, or "
            "lr_schedule constant"
        )
