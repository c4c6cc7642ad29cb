"""What a step optimises, as configuration: the advantage, the loss, its correction, the reference and the critic.

`docs/algorithms.md` has the formulas, and `learner/engine/objective.py` puts them together. This file has the
defaults and rejects invalid combinations, with an explanation.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from horizonrl.common.config.section import (
    AboveZero,
    Band,
    ByKind,
    NotNegative,
    Own,
    OwnKind,
    Positive,
    Section,
    Share,
)


class AdvantageSection(Section):
    """What every kind of advantage has."""

    kind: str
    """Advantage estimator (docs/algorithms.md). return, with loss reinforce and no correction, clones episodes weighted
    by reward (AgentEvol)."""
    truncated: Literal["keep", "mask"] = "keep"
    """Whether truncated episodes are trained. They count in the baseline either way."""

    @property
    def group_relative(self) -> bool:
        """Whether episodes are compared with their siblings, so that a group of equal returns teaches nothing."""
        compared = ("grpo", "dr_grpo", "rloo", "maxrl", "otb", "reinforce_pp_baseline", "dpo")
        return self.kind in compared or isinstance(self, OwnAdvantage)

    @property
    def needs_critic(self) -> bool:
        return isinstance(self, CriticAdvantage)

    @property
    def critic_steps(self) -> int:
        """RL steps in which only the critic learns."""
        return self.critic_warmup_steps if isinstance(self, CriticAdvantage) else 0

    @property
    def linear_only(self) -> bool:
        """Whether only an episode of a single token sequence has this advantage; groups with others are malformed."""
        # A critic's next value, and DPO's likelihood, are those of one sequence whose every turn is trained.
        return self.needs_critic or self.kind == "dpo"

    @property
    def compares_states(self) -> bool:
        """Whether turns in the same state are compared, so that environments must name their states."""
        return isinstance(self, GrpoAdvantage) and self.state_weight > 0


class DiscountedAdvantage(AdvantageSection):
    discount: Share = 1.0
    """Discount per turn (per token for gae at token level). Below 1, a kind with `credit` needs credit by turn or
    `state_weight`."""


class CreditedAdvantage(DiscountedAdvantage):
    credit: Literal["episode", "turn"] = "episode"
    """Whether a token gets the return of its episode, or the rewards from its turn on."""

    @model_validator(mode="after")
    def _discounts_what_is_ahead(self) -> Self:
        # A discount needs a distance in turns. The return of a whole episode has none.
        if self.discount < 1 and self.credit == "episode" and not self.compares_states:
            raise ValueError(
                f"advantage.discount is {self.discount} but {self.kind} credits whole episodes: set "
                "advantage.credit to turn, or the discount to 1"
            )
        return self


class GrpoAdvantage(CreditedAdvantage):
    kind: Literal["grpo", "dr_grpo"] = "grpo"
    state_weight: NotNegative = 0.0
    """ω of GiGPO: weight of a comparison of turns in the same state, for environments that name their state. 0 turns it
    off."""

    @model_validator(mode="after")
    def _adds_to_whole_returns(self) -> Self:
        if self.compares_states and self.credit == "turn":
            raise ValueError(
                f"advantage.state_weight is {self.state_weight} but GiGPO adds to the returns of whole episodes: set "
                "advantage.credit to episode, or state_weight to 0"
            )
        return self


class TurnAdvantage(CreditedAdvantage):
    kind: Literal["otb", "reinforce_pp_baseline", "return"]


class EpisodeAdvantage(AdvantageSection):
    kind: Literal["rloo", "maxrl"]


class ReinforcePpAdvantage(DiscountedAdvantage):
    kind: Literal["reinforce_pp"] = "reinforce_pp"


class CriticAdvantage(DiscountedAdvantage):
    trace_decay: Share = 0.95
    """λ: 1 trusts returns, 0 the critic."""
    critic_lr: AboveZero = 1e-3
    """Learning rate of the value head, which does not change the policy."""
    critic_warmup_steps: Annotated[int, Field(ge=0)] = 0
    """RL steps in which only the critic learns, before the policy's warm-up."""


class GaeAdvantage(CriticAdvantage):
    kind: Literal["gae"] = "gae"
    level: Literal["turn", "token"] = "turn"
    """Step of gae: a turn or a token."""


class VtraceAdvantage(CriticAdvantage):
    kind: Literal["vtrace"] = "vtrace"


class DpoAdvantage(AdvantageSection):
    kind: Literal["dpo"] = "dpo"
    beta: AboveZero = 0.5
    """β: penalty for leaving the reference."""


class OwnAdvantage(CreditedAdvantage, Own):
    kind: OwnKind


Advantage = Annotated[
    GrpoAdvantage
    | TurnAdvantage
    | EpisodeAdvantage
    | ReinforcePpAdvantage
    | GaeAdvantage
    | VtraceAdvantage
    | DpoAdvantage
    | OwnAdvantage,
    ByKind("grpo"),
]


class RewardSection(Section):
    """What becomes of an environment's rewards before they are compared. Reports show them as they came."""

    kind: str
    """Rewards to train on. environment: those of the turns. success: only 1 at the end of a solved episode."""
    overlong: tuple[Positive, Positive, AboveZero] | None = None
    """Penalty of the last turn for long episodes: the generated tokens at which it begins and at which it is full, and
    its full size, such as [384, 512, 1.0] (soft overlong punishment, DAPO)."""
    normalisation: Literal["environment"] | None = None
    """Whether returns are divided by their standard deviation per environment. Estimators without a group baseline also
    subtract the mean."""

    @model_validator(mode="after")
    def _grows_over_a_band(self) -> Self:
        if self.overlong is not None and self.overlong[0] >= self.overlong[1]:
            raise ValueError(
                f"overlong is {list(self.overlong)}: give the length at which the penalty begins, a larger one at "
                "which it is full, and its full size"
            )
        return self


class EnvironmentReward(RewardSection):
    kind: Literal["environment", "success"] = "environment"


class OwnReward(RewardSection, Own):
    kind: OwnKind


Reward = Annotated[EnvironmentReward | OwnReward, ByKind("environment")]


class LossSection(Section):
    """What every kind of loss has."""

    kind: str
    """Policy loss (docs/algorithms.md)."""
    entropy: NotNegative = 0.0
    """Coefficient of the entropy bonus. 0 turns it off."""
    normalisation: Literal["auto", "token", "sequence", "prompt", "constant"] = "auto"
    """What weighs the same: tokens, episodes (sequence) or groups (prompt). constant (Dr. GRPO) divides by episodes
    times an episode's most tokens. auto: sequence for gspo, otherwise token."""
    minibatches: Positive = 1
    """Minibatches per batch, split by groups; each is one optimizer update."""
    epochs: Positive = 1
    """Passes over a batch."""
    shuffle: bool = False
    """Whether each pass draws other minibatches. False keeps the order of the log."""
    kl_max: AboveZero | None = None
    """KL(behaviour || learner), in nats per token, above which an update is the last of its batch."""

    @property
    def updates(self) -> int:
        """Optimizer updates per version."""
        return self.minibatches * self.epochs

    @property
    def counted_by(self) -> Literal["token", "sequence", "prompt", "constant"]:
        """The normalisation that `auto` stands for."""
        if self.normalisation == "auto":
            return "sequence" if self.kind == "gspo" else "token"
        return self.normalisation

    @property
    def weighed(self) -> bool:
        """Whether the ratio lacks μ, so that the correction gives each token a weight."""
        return self.kind in ("reinforce", "decoupled_ppo", "gspo")


class DualClipLoss(LossSection):
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    """c of dual-clip PPO: the surrogate of a negative advantage A is at least c·A."""


class ClippedLoss(DualClipLoss):
    low: Share = 0.2
    """Ratios below 1 - low are clipped."""
    high: NotNegative = 0.28
    """Ratios above 1 + high are clipped. The default is wider than below (Clip-higher, DAPO)."""


class PpoLoss(ClippedLoss):
    kind: Literal["ppo"] = "ppo"
    cap: AboveZero | None = None
    """Cap of a token's ratio (TIS), above 1 + high."""

    @model_validator(mode="after")
    def _keeps_its_upper_bound(self) -> Self:
        if self.cap is not None and self.cap <= 1.0 + self.high:
            raise ValueError(
                f"cap is {self.cap} but a ratio is clipped above 1 + high = {1.0 + self.high:g}, which a capped one "
                "never reaches: the trust region would have no upper side; set a higher cap, or none"
            )
        return self


class DecoupledPpoLoss(ClippedLoss):
    kind: Literal["decoupled_ppo"] = "decoupled_ppo"
    proximal: Literal["exact", "interpolated"] = "exact"
    """π_prox. exact: the policy before the step, which may take one more forward pass. interpolated: the version
    before, between log μ and log π (AReaL)."""


class DppoLoss(LossSection):
    kind: Literal["dppo"] = "dppo"
    delta: Share = 0.2
    """Change of a token's probability above which its gradient is dropped."""
    penalty: NotNegative = 1e-3
    """τ: weight of the squared log-ratio."""


class CispoLoss(LossSection):
    kind: Literal["cispo"] = "cispo"
    cap: AboveZero = 5.0
    """Upper bound of the ratio."""


class GspoLoss(DualClipLoss):
    kind: Literal["gspo"] = "gspo"
    low: Share = 3e-4
    """Lower side of the trust region, for an episode's geometric mean ratio to the policy before the step."""
    high: NotNegative = 4e-4
    """Upper side of the trust region."""


class ReinforceLoss(LossSection):
    kind: Literal["reinforce"] = "reinforce"


class OwnLoss(LossSection, Own):
    kind: OwnKind


Loss = Annotated[
    PpoLoss | DecoupledPpoLoss | DppoLoss | CispoLoss | GspoLoss | ReinforceLoss | OwnLoss,
    ByKind("ppo"),
]


class CorrectionSection(Section):
    """What every kind of correction has."""

    kind: str | None
    """Importance weight for reinforce, decoupled_ppo and gspo. auto: token for these, otherwise off."""
    geometric_band: Band | None = None
    """Geometric mean ratios of kept episodes, such as [0.99, 1.01]."""
    k3_max: AboveZero | None = None
    """Largest mean of r - log r - 1 of kept episodes, such as 1e-2."""
    veto_band: Band | None = None
    """Band outside which one token's ratio drops its episode, such as [1e-4, 100]."""
    stale_negative_max: AboveZero | None = None
    """Mean of log μ - log π above which an episode's tokens of negative advantage are masked."""
    ess_lr: bool = False
    """Whether the learning rate is scaled by the root of the effective sample size (arXiv 2602.17616)."""

    @property
    def masks(self) -> bool:
        """Whether any mask is on."""
        bounds = (self.geometric_band, self.k3_max, self.veto_band, self.stale_negative_max)
        return any(bound is not None for bound in bounds)

    @model_validator(mode="after")
    def _around_one(self) -> Self:
        for name in ("band", "geometric_band", "veto_band"):
            band = getattr(self, name, None)
            if band is not None and not (band[0] <= 1 <= band[1] and band[0] < band[1]):
                raise ValueError(
                    f"{name} is {list(band)}: give the lower bound first, and include 1, which is the ratio of tokens "
                    "that the policy itself sampled"
                )
        return self


class TokenCorrection(CorrectionSection):
    kind: Literal["auto", "token"] = "auto"
    cap: AboveZero = 2.0
    """Upper bound of a token's weight."""


class SequenceCorrection(CorrectionSection):
    kind: Literal["sequence"] = "sequence"
    cap: AboveZero = 5.0
    """Upper bound of an episode's weight."""


class IcepopCorrection(CorrectionSection):
    kind: Literal["icepop"] = "icepop"
    band: Band = (0.5, 5.0)
    """Ratios that are kept. Others have weight 0."""


class NoCorrection(CorrectionSection):
    kind: None = None


class OwnCorrection(CorrectionSection, Own):
    kind: OwnKind


Correction = Annotated[
    TokenCorrection | SequenceCorrection | IcepopCorrection | NoCorrection | OwnCorrection,
    ByKind("auto"),
]


class ReferenceSection(Section):
    kl: NotNegative = 0.0
    """Coefficient of the KL to the policy at the start of RL. 0 loads no reference."""
    estimator: Literal["k1", "k2", "k3", "k1_reward"] = "k3"
    """Estimator of the KL that is added to the loss. k1_reward is subtracted from each token's reward instead."""
    refresh_every: Positive | None = None
    """Versions after which the reference moves to the policy. None keeps the first."""


class Objective(Section):
    """What a step optimises."""

    reward: Reward = EnvironmentReward()
    advantage: Advantage = GrpoAdvantage()
    loss: Loss = PpoLoss()
    correction: Correction = TokenCorrection()
    reference: ReferenceSection = ReferenceSection()

    @property
    def weight(self) -> CorrectionSection | None:
        """The correction, if it weighs tokens."""
        if self.correction.kind is None:
            return None
        # The ratio of the other losses is π/μ, which is the correction already.
        return self.correction if self.correction.kind != "auto" or self.loss.weighed else None

    @property
    def penalised(self) -> bool:
        """Whether the KL to the reference is taken from the reward."""
        return self.reference.kl > 0 and self.reference.estimator == "k1_reward"

    @property
    def adds_kl(self) -> bool:
        """Whether the KL to the reference is added to the loss."""
        return self.reference.kl > 0 and not self.penalised

    @property
    def needs_reference(self) -> bool:
        return self.reference.kl > 0 or self.advantage.kind == "dpo"

    @property
    def needs_scores(self) -> bool:
        """Whether a forward pass at the start of the step must score the batch."""
        # With a single update, the policy at the start of the step is the one in training, so it needs no pass.
        loss = self.loss
        is_exact = isinstance(loss, GspoLoss) or (
            isinstance(loss, DecoupledPpoLoss) and loss.proximal == "exact"
        )
        return (
            self.needs_reference
            or self.advantage.needs_critic
            or self.advantage.kind == "otb"
            or (is_exact and loss.updates > 1)
        )

    @model_validator(mode="after")
    def _sound(self) -> Self:
        self.refuse_unsound()
        return self

    @property
    def _is_dpo(self) -> bool:
        """Whether the loss of the advantage dpo is DPO's."""
        # DPO's gradient is that of the policy at the start of the step: a second update, a clip or a weight changes it.
        clones = (self.loss.kind, self.weight, self.loss.updates) == ("reinforce", None, 1)
        evenly = self.loss.counted_by in ("token", "constant")
        return (
            clones and evenly and self.advantage.truncated == "keep" and not self.correction.masks
        )

    def refuse_unsound(self) -> None:
        """Raise ValueError for an invalid combination, with the reason and the fix."""
        advantage, loss, correction = self.advantage, self.loss, self.correction
        if self.weight is not None and not loss.weighed:
            raise ValueError(
                f"correction.kind is {correction.kind} but the ratio of loss.kind = {loss.kind} already divides by the "
                "behaviour policy, which would count twice: leave correction.kind at auto, or set loss.kind to "
                "reinforce, decoupled_ppo or gspo"
            )
        if advantage.kind == "dpo" and not self._is_dpo:
            raise ValueError(
                "advantage.kind dpo is the gradient of DPO's loss at the policy that the step begins with, over whole "
                "pairs whose tokens all count the same: set loss.kind to reinforce, correction.kind to none, "
                "minibatches and epochs to 1, loss.normalisation to token or constant, advantage.truncated to keep, "
                "and every mask of correction to none"
            )
        # DPO's implicit reward is β times the log-ratio to the reference: a second KL would count it twice.
        if advantage.kind == "dpo" and self.reference.kl > 0:
            raise ValueError(
                "reference.kl is set but dpo already has its KL in advantage.beta: set reference.kl to 0"
            )
        self._refuse_contradictions()
        self._refuse_what_does_nothing()

    def _refuse_contradictions(self) -> None:
        advantage, reward = self.advantage, self.reward
        positive = {
            "maxrl": "divides by the mean return",
            "return": "clones what earned: a loss without a trust region would push an episode away without end",
        }
        may_be_negative = {
            f"reward.kind {reward.kind}": isinstance(reward, OwnReward),
            "reward.overlong": reward.overlong is not None,
            "reward.normalisation": reward.normalisation is not None
            and not advantage.group_relative,
            "reference.estimator k1_reward": self.penalised,
        }
        causes = [key for key, is_set in may_be_negative.items() if is_set]
        if advantage.kind in positive and causes:
            raise ValueError(
                f"advantage.kind {advantage.kind} {positive[advantage.kind]}, and {' and '.join(causes)} may make a "
                "return negative: leave that out, or set advantage.kind to grpo"
            )

    def _refuse_what_does_nothing(self) -> None:
        kind, loss = self.advantage.kind, self.loss
        if self.reward.normalisation is not None and kind in ("grpo", "maxrl", "dpo"):
            raise ValueError(
                f"reward.normalisation is environment but {kind} does not depend on the scale of a return: set it to "
                "none, or advantage.kind to another one"
            )
        if loss.shuffle and loss.minibatches == 1:
            raise ValueError(
                "loss.shuffle is on but loss.minibatches is 1, so there is no order: set minibatches"
            )
        if loss.kl_max is not None and loss.updates == 1:
            raise ValueError(
                f"loss.kl_max is {loss.kl_max} but a batch makes a single update, which is always made: set "
                "minibatches or epochs above 1, or kl_max to none"
            )
