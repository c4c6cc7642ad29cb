"""Horizon schedules: functions of recorded state alone, so that a resumed run continues at the exact turn.

`fixed`, `staged`, `linear` and `reversed` are functions of the RL step, `shuffled` one of the ticket's number. `staged`
is ScalingInter-RL (arXiv 2509.08755): horizons h1 < h2 < ..., the next one after every `steps_per_stage` training
steps. `linear` grows turn by turn and reaches the last horizon at the same step as `staged`. `reversed` and `shuffled`
are controls: they separate what the order of the horizons does from what their mixture and their mean cost do.

`adaptive` is a fold over what the learner consumed, step by step. A horizon grows when it truncates many episodes while
success has levelled off. The fold is the learner's, because only the learner sees every step exactly once. Its
checkpoint holds the histories, a resumed learner reads the same log and makes the same decisions again, and the
controller may miss any number of steps. A learner that is rolled back behind a growth announces the earlier horizon
until it gets there again. The controller keeps the horizon that it has recorded under the key `horizon`, so no later
ticket has fewer turns.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import Any, NamedTuple

from horizonrl.common.config.schedule import RunSchedule
from horizonrl.common.config.training import AdaptiveHorizon, FixedHorizon, StagedHorizon
from horizonrl.common.state import HorizonGrowth
from horizonrl.common.types import Group, HorizonTurns, Kind, Record, StopReason
from horizonrl.learner.controller.curriculum import draw, quotas


def horizon_turns(
    schedule: StagedHorizon | FixedHorizon, horizons: Sequence[int], step: int
) -> int:
    """Return the horizon in force at RL step `step` (from 0), in turns, under any kind but adaptive and shuffled."""
    if isinstance(schedule, FixedHorizon):
        return horizons[-1]
    stage = min(step // schedule.steps_per_stage, len(horizons) - 1)
    if schedule.kind == "staged":
        return horizons[stage]
    if schedule.kind == "reversed":
        return horizons[-1 - stage]
    last_step = max(1, schedule.steps_per_stage * (len(horizons) - 1))
    return horizons[0] + (horizons[-1] - horizons[0]) * min(step, last_step) // last_step


def shuffled_turns(
    horizons: Sequence[int], steps_per_stage: int, rl_steps: int, number: int, key: str
) -> int:
    """Return the horizon of train ticket `number`: those of `staged`, each with its share of the RL steps.

    The draw is that of environments in a mixed run: each block of tickets has every horizon in proportion.
    """
    last = len(horizons) - 1
    shares = [
        min(steps_per_stage, max(0, rl_steps - stage * steps_per_stage)) for stage in range(last)
    ]
    shares.append(max(0, rl_steps - last * steps_per_stage))
    drawn = [(turns, share) for turns, share in zip(horizons, shares, strict=True) if share]
    index, _ = draw(quotas([share for _, share in drawn]), number, f"{key}/horizon")
    return drawn[index][0]


def scheduled_turns(config: RunSchedule, seed: int, env_id: str, step: int, number: int) -> int:
    """Return the horizon of train ticket `number`, issued at RL step `step`, under any schedule but adaptive."""
    schedule, horizons = config.horizon, config.horizons(env_id)
    if schedule.kind == "shuffled":
        key = f"{seed}/{env_id}"
        return shuffled_turns(horizons, schedule.steps_per_stage, config.rl.steps, number, key)
    if isinstance(schedule, AdaptiveHorizon):
        raise ValueError("an adaptive horizon follows from what was consumed, not from a step")
    return horizon_turns(schedule, horizons, step)


@dataclass(frozen=True, slots=True)
class AdaptiveRule:
    """When an environment's horizon grows, and to which value."""

    horizons: tuple[int, ...]
    window_steps: int
    """Fewest RL steps with groups under the present horizon before it grows: it bounds the rate of growth."""
    truncated_above: float = 0.2
    """Share of episodes truncated by the horizon above which the horizon is too short."""


def adaptive_rules(config: RunSchedule) -> dict[str, AdaptiveRule]:
    """Return the rule of each environment, by id; empty unless the schedule is adaptive."""
    schedule = config.horizon
    if not isinstance(schedule, AdaptiveHorizon):
        return {}
    return {
        env.id: AdaptiveRule(config.horizons(env.id), schedule.steps_per_stage)
        for env in config.envs
    }


class HorizonOutcome(NamedTuple):
    """The results of a group's valid episodes."""

    episodes: int
    successes: int
    cut: int
    """Episodes that the horizon truncated."""


class History(Record):
    """Everything that an environment's adaptive horizon depends on."""

    turns: HorizonTurns
    window: tuple[tuple[HorizonOutcome, ...], ...] = ()
    """The outcomes under a horizon of `turns`, by RL step, the newest last. Steps without outcomes are left out."""
    growth: HorizonGrowth | None = None
    """The last growth."""


def decide(
    window: Sequence[Sequence[HorizonOutcome]], turns: int, rule: AdaptiveRule
) -> tuple[int, str] | None:
    """Return the next horizon and why, or None to stay.

    The horizon grows if the window is full, more than `truncated_above` of its episodes were truncated, and success in
    its later half exceeds that of its earlier half by one standard error at most.
    """
    above = [horizon for horizon in rule.horizons if horizon > turns]
    if not above or len(window) < rule.window_steps:
        return None
    episodes = sum(outcome.episodes for step in window for outcome in step)
    cut = sum(outcome.cut for step in window for outcome in step) / episodes
    # Success is averaged over groups: the episodes of one task are alike, so an error over episodes would be too small.
    middle = len(window) // 2
    earlier, later = (
        [outcome.successes / outcome.episodes for step in half for outcome in step]
        for half in (window[:middle], window[middle:])
    )
    error = math.sqrt(sum(variance(half) / len(half) for half in (earlier, later) if len(half) > 1))
    if cut <= rule.truncated_above or fmean(later) - fmean(earlier) > error:
        return None
    return min(above), (
        f"{cut:.0%} of {episodes} episodes cut in {len(window)} steps, "
        f"success {fmean(earlier):.1%} then {fmean(later):.1%} (standard error {error:.1%})"
    )


def observe(
    history: History, env_id: str, groups: Sequence[Group], rule: AdaptiveRule, phase_step: int
) -> History:
    """Return the history after RL step `phase_step` consumed `groups` of the environment's train tickets.

    Groups with a shorter horizon still arrive after a growth, and are ignored. A longer horizon appears if the run had
    another schedule before; it becomes the present horizon.
    """
    turns = max([history.turns, *(group.ticket.horizon_turns for group in groups)])
    # What a shorter horizon truncated says nothing about the longer one.
    window = history.window if turns == history.turns else ()
    outcomes = tuple(outcome_of(group) for group in groups if group.ticket.horizon_turns == turns)
    if valid := tuple(outcome for outcome in outcomes if outcome.episodes):
        window = (*window, valid)[-rule.window_steps :]
    if (decision := decide(window, turns, rule)) is None:
        return History(turns=turns, window=window, growth=history.growth)
    to_turns, reason = decision
    growth = HorizonGrowth(
        env_id=env_id, phase_step=phase_step, from_turns=turns, to_turns=to_turns, reason=reason
    )
    return History(turns=to_turns, growth=growth)


def outcome_of(group: Group) -> HorizonOutcome:
    valid = group.valid_episodes
    return HorizonOutcome(
        episodes=len(valid),
        successes=sum(episode.success for episode in valid),
        cut=sum(episode.stop is StopReason.HORIZON for episode in valid),
    )


class Histories:
    """The histories of a run's environments; empty for a schedule that is a function of the step alone."""

    def __init__(self, rules: Mapping[str, AdaptiveRule]) -> None:
        self._rules = rules
        self._by_env = {env_id: History(turns=rule.horizons[0]) for env_id, rule in rules.items()}

    def observe(self, groups: Sequence[Group], phase_step: int) -> None:
        """Add what RL step `phase_step` consumed."""
        trained = [group for group in groups if group.ticket.kind is Kind.TRAIN]
        for env_id, rule in self._rules.items():
            members = [group for group in trained if group.ticket.task.env_id == env_id]
            self._by_env[env_id] = observe(self._by_env[env_id], env_id, members, rule, phase_step)

    def turns(self, env_id: str) -> int:
        return self._by_env[env_id].turns

    def growths(self) -> tuple[HorizonGrowth, ...]:
        """Return the last growth of each environment whose horizon has grown."""
        return tuple(
            history.growth for history in self._by_env.values() if history.growth is not None
        )

    def dump(self) -> dict[str, Any]:
        """Return the histories as JSON-able values."""
        return {env_id: history.model_dump(mode="json") for env_id, history in self._by_env.items()}

    @classmethod
    def restore(cls, rules: Mapping[str, AdaptiveRule], dumped: Mapping[str, Any]) -> "Histories":
        histories = cls(rules)
        # An environment that the run did not have before begins at its first horizon.
        for env_id in rules.keys() & dumped.keys():
            histories._by_env[env_id] = History.model_validate(dumped[env_id])
        return histories
