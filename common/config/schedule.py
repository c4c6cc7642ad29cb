"""What follows from the numbers of a config: phases, horizons, credit, evaluation rounds, learning rates.

These are methods, not keys: a bound with a formula has no second place where it could be set wrong.
"""

from typing import TYPE_CHECKING

from horizonrl.common.config.rates import decay, warm_up
from horizonrl.common.state import ContextRule
from horizonrl.common.types import Phase

if TYPE_CHECKING:
    from horizonrl.common.config.objective import Advantage
    from horizonrl.common.config.training import (
        EnvSection,
        EvalSection,
        Horizon,
        ImitationSection,
        LearnerSection,
        ModelSection,
        RlSection,
        RolloutSection,
    )


class RunSchedule:
    """The schedule of a run, as `RunConfig` inherits it.

    The sections that it reads are declared for the type checker alone: `RunConfig` has them as fields, in the order
    that docs and `config.toml` show.
    """

    if TYPE_CHECKING:
        model: ModelSection
        envs: tuple[EnvSection, ...]
        rollout: RolloutSection
        horizon: Horizon
        imitation: ImitationSection
        rl: RlSection
        advantage: Advantage
        eval: EvalSection
        learner: LearnerSection

    @property
    def total_steps(self) -> int:
        return self.imitation.steps + self.rl.steps

    def horizons(self, env_id: str) -> tuple[int, ...]:
        """Return the horizons of an environment's schedule, in turns: its own, or those of the run."""
        return next(env.horizons for env in self.envs if env.id == env_id) or self.horizon.horizons

    @property
    def longest_episode_tokens(self) -> int:
        """The most tokens that an episode can generate."""
        # Of all stages: Dr. GRPO divides by it (arXiv 2503.20783), and its divisor must not grow with the horizon.
        most = max(max(self.horizons(env.id)) for env in self.envs) * self.rollout.max_turn_tokens
        # A context that is shortened bounds a branch of the episode, and not the episode.
        return (
            min(most, self.model.max_context_tokens)
            if self.rollout.context is ContextRule.STOP
            else most
        )

    def phase(self, step: int) -> tuple[Phase, int]:
        """Return the phase that optimizer step number `step` (from 0) belongs to, and its number in the phase."""
        if step < self.imitation.steps:
            return Phase.IMITATION, step
        return Phase.RL, step - self.imitation.steps

    @property
    def eval_rounds(self) -> int:
        """Number of evaluations in the whole run: the initial model, the start of RL, every N RL steps, and the end."""
        if not self.eval.every:
            return 0
        # The last round comes at the end, even when the steps are no multiple: hence the ceiling.
        return 1 + (self.imitation.steps > 0) + -(-self.rl.steps // self.eval.every)

    def eval_step(self, number: int) -> int:
        """Return the optimizer steps after which evaluation `number` (from 0) is due."""
        # With imitation there is one more round before RL: that of the initial model.
        rl_round = number - (self.imitation.steps > 0)
        return (
            0
            if rl_round < 0
            else min(self.imitation.steps + rl_round * self.eval.every, self.total_steps)
        )

    def lr(self, step: int) -> float:
        """Return the learning rate of optimizer step number `step` (from 0): warm-up and decay of its phase."""
        phase, phase_step = self.phase(step)
        rates = self.imitation if phase is Phase.IMITATION else self.rl
        warmup_steps = self.warmup_steps(phase)
        steps = rates.steps
        if phase is Phase.RL:
            if phase_step < self.advantage.critic_steps:
                return 0.0
            phase_step, steps = (
                phase_step - self.advantage.critic_steps,
                steps - self.advantage.critic_steps,
            )
        fallen = decay(rates.lr_schedule, phase_step, steps, warmup_steps)
        return rates.lr * warm_up(phase_step, warmup_steps) * fallen

    def warmup_steps(self, phase: Phase) -> int:
        """Return the steps of a phase's warm-up."""
        return (self.imitation if phase is Phase.IMITATION else self.rl).warmup_steps

    def groups_per_step(self, phase: Phase) -> int:
        return (
            self.imitation.groups_per_step if phase is Phase.IMITATION else self.rl.groups_per_step
        )

    def demos_due(self, rl_steps: int) -> int:
        """Return the number of demonstrations that are trained before RL and in its first `rl_steps` steps."""
        return (
            self.imitation.steps * self.imitation.groups_per_step
            + self.rl.demos_per_step * rl_steps
        )

    def credit(self, phase: Phase, phase_step: int = 0) -> int:
        """Return the most tickets of the phase's kind that may be outstanding after `phase_step` steps.

        This keeps staleness bounded. Staleness counts from the version that actors have. Between two publications that
        is not the newest, so the credit shrinks with every step that is not published.
        """
        # Without this, rounds of 3 under `max_staleness = 2` dropped 56 of 152 groups as stale (ADR 44).
        behind = self._behind(phase_step) if phase is Phase.RL else 0
        return (self.rl.max_staleness + 1 - behind) * self.groups_per_step(phase)

    def outstanding_limit(self, phase: Phase, phase_step: int) -> int:
        """Return how many tickets may be outstanding: the credit, but not more than the phase still needs."""
        # Groups beyond that would be dropped as `phase` in the next phase, and after the last step nobody waits.
        last = self.imitation.steps if phase is Phase.IMITATION else self.rl.steps
        needed = (last - phase_step) * self.groups_per_step(phase)
        return min(self.credit(phase, phase_step), needed)

    def trainable_until(self, step: int) -> int:
        """Return the last version at which a train ticket that was issued after `step` optimizer steps is not stale."""
        return step - self._behind(self.phase(step)[1]) + self.rl.max_staleness

    def _behind(self, rl_step: int) -> int:
        """Return how many RL steps ago actors got a version."""
        return rl_step % self.rl.publish_every

    def publishes(self, step: int) -> bool:
        """Return whether actors receive the version after `step` optimizer steps, as they do all that they evaluate."""
        phase, phase_step = self.phase(step)
        evaluated = step in map(self.eval_step, range(self.eval_rounds))
        # An evaluated version is published, or its evaluation would judge another one (ADR 44).
        due = phase_step % self.rl.publish_every == 0 or evaluated or step == self.total_steps
        # Demonstrations need no policy, so imitation publishes nothing until RL begins.
        return phase is Phase.RL and due
