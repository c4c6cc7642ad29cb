"""Shape the rewards of a batch before they are compared: their kind, punishment of length, scale.

Place in the flow: Group → **rewards** → Batch. Pure functions of records. What journals and reports show are the
rewards of the environment, untouched; only advantages see these.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from horizonrl.common.config.objective import AdvantageSection, OwnReward, RewardSection
from horizonrl.common.types import Episode, Group, Kind
from horizonrl.learner.algorithm.own import own_rewards

STD_FLOOR = 1e-6
"""Added to a standard deviation, so that equal values give zeros instead of NaN. Below it, values count as equal."""

EpisodeRewards = list[float]
"""A reward for each turn of an episode, in order of time."""


def shaped(episode: Episode, settings: RewardSection) -> EpisodeRewards:
    """Return the episode's rewards of the kind wanted, less the punishment of its length."""
    rewards = [turn.reward for turn in episode.turns]
    if isinstance(settings, OwnReward):
        rewards = own_rewards(episode, settings)
    elif settings.kind == "success":
        rewards = [0.0] * (len(rewards) - 1) + [float(episode.success)]
    if settings.overlong is not None:
        begins_at, full_at, cost = settings.overlong
        rewards[-1] -= cost * overlong(episode.generated_tokens, begins_at, full_at)
    return rewards


def overlong(tokens: int, begins_at: int, full_at: int) -> float:
    """Return the share of the soft overlong punishment: 0 up to `begins_at`, 1 from `full_at` on, a line between.

    DAPO (arXiv 2503.14476, eq. 13) with L_max = `full_at` and L_cache = `full_at` − `begins_at`; over the generated
    tokens of a whole episode, where DAPO has a single reply.
    """
    return min(1.0, max(0.0, (tokens - begins_at) / (full_at - begins_at)))


def batch_rewards(
    groups: Sequence[Group], settings: RewardSection, advantage: AdvantageSection
) -> list[list[EpisodeRewards]]:
    """Return the rewards of every group's valid episodes. Those of demonstrations, which are cloned, are unchanged."""
    rewards = [
        [
            [turn.reward for turn in episode.turns]
            if group.ticket.kind is Kind.DEMO
            else shaped(episode, settings)
            for episode in group.valid_episodes
        ]
        for group in groups
    ]
    if settings.normalisation == "environment":
        _normalise(rewards, groups, centred=not advantage.group_relative)
    return rewards


def _normalise(rewards: list[list[EpisodeRewards]], groups: Sequence[Group], centred: bool) -> None:
    """Divide by the returns' deviation over each environment's episodes; if `centred`, subtract their mean before.

    (R − μ_e) / (σ_e + 1e-6) of the return R. The mean is taken from the last turn, so that every return from a turn on
    loses it too. Where siblings are compared it would cancel, except under a discount, which would bend it.

    Equal returns are not divided: the rewards of single turns, which may differ, would become a million times as large.
    """
    by_env: defaultdict[str, list[EpisodeRewards]] = defaultdict(list)
    for group, episodes in zip(groups, rewards, strict=True):
        if group.ticket.kind is not Kind.DEMO:
            by_env[group.ticket.task.env_id] += episodes
    for episodes in by_env.values():
        returns = np.array([sum(episode) for episode in episodes])
        mean, deviation = (float(returns.mean()) if centred else 0.0), float(returns.std())
        scale = deviation + STD_FLOOR if deviation > STD_FLOOR else 1.0
        for episode in episodes:
            episode[-1] -= mean
            episode[:] = [reward / scale for reward in episode]
