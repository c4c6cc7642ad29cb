"""When to give up: a step that no batch can fill must end the run with its cause, and not sample for ever.

Place in the flow: Group → Batch, beside the intake. There are two ways in which no batch fills: hardly any group can be
trained on (dropped), or tickets end without a group (void). Tickets that do not fit end their actor (`actors/loop.py`).
"""

import time
from collections import Counter

from horizonrl.common.errors import NoGroups, NothingToLearn
from horizonrl.common.logs import get_logger
from horizonrl.common.types import DropReason, Group, Void
from horizonrl.learner.loop.state import LearnerState

log = get_logger()

STARVED_AFTER = 10
"""Dropped groups of one step, in batches, at which the learner warns, and again at every doubling. verl's DAPO gives
up at this number."""
GIVE_UP_AFTER = 16 * STARVED_AFTER
VOID_IN_A_ROW = 32
"""Tickets without a group, one after another, that are no accident: with every second one void by chance, 32 in a row
come once in 4 billion. Each has been played `broker.max_deliver` times."""
CURES = {
    DropReason.MALFORMED: "Actors and learner differ in the model, the tokenizer, the chat template or the context: "
    "give all of them one recipe and one model directory",
    DropReason.STALE: "Groups take longer than rl.max_staleness steps: raise it, or set rl.stale to wait",
    DropReason.TOO_FEW_VALID: "Most episodes break: logs/actor-*.log says where (environment_failed)",
}
"""What to do about the reason of most drops, where it is another than equal rewards."""


class Breaker:
    def __init__(self, state: LearnerState, patience_s: float) -> None:
        self._state = state
        self._patience_s = patience_s
        """Time that a run which has trained waits for a group (`learner.step_timeout_s`)."""
        self._warned = 0
        """Dropped groups of the step at the last warning."""
        self._voids = 0
        """Tickets that ended void since the last group."""
        self._last_group_at = time.monotonic()

    def notice(self, record: Group | Void) -> None:
        """Take the end of a ticket into account. Raises NoGroups when tickets end without a group, again and again.

        A run that has trained is patient: a server of its environments may come back.
        """
        if isinstance(record, Group):
            self._voids, self._last_group_at = 0, time.monotonic()
            return
        self._voids += 1
        patience_s = self._patience_s if self._state.step else 0.0
        if self._voids >= VOID_IN_A_ROW and time.monotonic() - self._last_group_at >= patience_s:
            raise NoGroups(
                f"the last {self._voids} tickets ended without a group, the last one of "
                f"{record.ticket.task.env_id} because {record.reason}. Mend that (logs/actor-*.log has the traceback "
                "of what an environment raised; `horizonrl envs check` tries it), and give the same command again"
            )

    def look(self) -> None:
        """Warn when hardly any group of this step can be trained on. Raises NothingToLearn after GIVE_UP_AFTER."""
        dropped, wanted = self._state.collector.pending.dropped, self._state.groups_wanted
        if len(dropped) < self._warned:  # of another step
            self._warned = 0
        if len(dropped) < max(2 * self._warned, STARVED_AFTER * wanted):
            return
        self._warned = len(dropped)
        reasons = Counter(drop.reason for drop in dropped)
        groups = self._state.collector.pending.consumed
        episodes = [episode for group in groups for episode in group.valid_episodes]
        success_rate = sum(episode.success for episode in episodes) / max(1, len(episodes))
        mean_return = sum(episode.episode_return for episode in episodes) / max(1, len(episodes))
        log.warning(
            "batch_starved",
            step=self._state.step,
            missing=self._state.groups_missing,
            dropped={reason.value: count for reason, count in reasons.items()},
            success_rate=round(success_rate, 3),
            return_mean=round(mean_return, 3),
        )
        if len(dropped) >= GIVE_UP_AFTER * wanted:
            (most, _), *_ = reasons.most_common(1)
            counts = ", ".join(f"{count} {reason.value}" for reason, count in reasons.most_common())
            raise NothingToLearn(
                f"{NothingToLearn.opening}: step {self._state.step} has dropped {len(dropped)} groups ({counts}) and "
                f"still misses {self._state.groups_missing}; success rate {success_rate:.3f}, mean return "
                f"{mean_return:.3f}. {CURES.get(most, _equal(success_rate))}"
            )


def _equal(success_rate: float) -> str:
    """Return what to do about groups whose episodes all earn the same."""
    why = (
        "the policy solves these tasks"
        if success_rate > 0.5
        else "the policy solves none of these tasks"
    )
    return (
        f"Within a group all episodes earn the same: {why}, or the reward does not tell them apart. Use harder or "
        "easier tasks, a larger rollout.group_size or a lower rl.lr, or export the model as it is (`horizonrl export`)"
    )
