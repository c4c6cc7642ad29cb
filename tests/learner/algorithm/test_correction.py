"""The other losses, the weights and the masks, against NumPy float64, by hand, and by finite differences."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from numpy.typing import NDArray

from horizonrl.common.config.objective import (
    IcepopCorrection,
    Objective,
    SequenceCorrection,
    TokenCorrection,
)
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.config.section import by_kind
from horizonrl.common.errors import ConfigError
from horizonrl.learner.algorithm import correction as c
from horizonrl.learner.algorithm.loss import LOSSES, LossInputs, policy_clipped, policy_loss
from tests.learner.knowns import known
from tests.learner.sections import make_correction, make_loss

Floats = NDArray[np.float64]
KINDS = sorted(LOSSES)
MASKS: dict[str, Any] = {
    "geometric_band": (0.8, 1.25),
    "k3_max": 0.1,
    "veto_band": (0.3, 3.0),
    "stale_negative_max": 0.05,
}


@dataclass(frozen=True)
class Ragged:
    """Tokens of episodes of different lengths, each episode with one advantage."""

    logprobs_N: Floats
    mu_N: Floats
    advantages_N: Floats
    lags_N: NDArray[np.int64]
    episodes_N: NDArray[np.int64]

    def taken(self, places: NDArray[np.int64]) -> "Ragged":
        return Ragged(*(column[places] for column in vars(self).values()))

    @property
    def proximal_N(self) -> Floats:
        """A policy between μ and π, not halfway: π/π_prox and π_prox/μ differ."""
        return self.mu_N + (self.logprobs_N - self.mu_N) / 4

    def known(self) -> LossInputs:
        columns = (self.mu_N, self.advantages_N, self.lags_N, self.episodes_N)
        tensors = (torch.from_numpy(np.array(column)) for column in columns)
        return known(*tensors, proximal_N=torch.from_numpy(self.proximal_N))

    def loss(self, objective: Objective) -> Floats:
        loss_N = policy_loss(torch.from_numpy(self.logprobs_N), self.known(), objective)
        return np.asarray(loss_N.numpy(), dtype=np.float64)


@st.composite
def ragged(draw: st.DrawFn) -> Ragged:
    lengths = draw(st.lists(st.integers(1, 8), min_size=1, max_size=6))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 20)))
    spread = draw(st.sampled_from([1e-3, 0.1, 1.0]))
    tokens = sum(lengths)
    mu_N = rng.uniform(-3, -0.1, tokens)
    return Ragged(
        np.minimum(mu_N + rng.normal(0, spread, tokens), -1e-3),
        mu_N,
        np.repeat(rng.normal(0, 1, len(lengths)), lengths),
        rng.integers(0, 4, tokens),
        np.repeat(np.arange(len(lengths)), lengths),
    )


def by_episode(batch: Ragged, values_N: Floats, reduced: Callable[[Floats], float]) -> Floats:
    return np.array(
        [reduced(values_N[batch.episodes_N == episode]) for episode in batch.episodes_N]
    )


def oracle_weights(batch: Ragged, log_N: Floats, objective: Objective) -> Floats:
    settings: Any = objective.weight
    match settings:
        case TokenCorrection():
            return np.minimum(np.exp(log_N), settings.cap)
        case SequenceCorrection():
            return np.minimum(np.exp(by_episode(batch, log_N, np.sum)), settings.cap)
        case IcepopCorrection():
            low, high = settings.band
            return np.array(
                [math.exp(log) if low <= math.exp(log) <= high else 0.0 for log in log_N]
            )
    return np.ones(len(log_N))


def oracle_masks(batch: Ragged) -> dict[str, NDArray[np.bool_]]:
    """Whether each token is kept, mask by mask, with the bounds of MASKS."""
    log_N = batch.logprobs_N - batch.mu_N
    mean_N = by_episode(batch, log_N, np.mean)
    k3_N = by_episode(batch, np.exp(log_N) - log_N - 1, np.mean)
    within_N = (np.exp(log_N) >= 0.3) & (np.exp(log_N) <= 3.0)
    return {
        "geometric_band": (np.exp(mean_N) >= 0.8) & (np.exp(mean_N) <= 1.25),
        "k3_max": k3_N <= 0.1,
        "veto_band": by_episode(batch, within_N.astype(float), np.min) == 1,
        "stale_negative_max": ~((batch.advantages_N < 0) & (-mean_N > 0.05)),
    }


def oracle_loss(batch: Ragged, objective: Objective, stopped_at: Ragged | None = None) -> Floats:
    """The losses as algorithms.md writes them; what stands under a stop-gradient is taken from `stopped_at`."""
    still = stopped_at or batch
    A, ratio_N = batch.advantages_N, np.exp(batch.logprobs_N - batch.mu_N)
    still_log_N = still.logprobs_N - still.mu_N

    def clipped(value_N: Floats, low: float, high: float) -> Floats:
        objective_N = np.minimum(value_N * A, np.clip(value_N, 1 - low, 1 + high) * A)
        return np.where(A < 0, np.maximum(objective_N, 3 * A), objective_N)

    if objective.loss.kind == "ppo":
        return -clipped(ratio_N, 0.2, 0.28)
    if objective.loss.kind == "dppo":
        moved_N = np.exp(still.logprobs_N) - np.exp(still.mu_N)
        out_N = ((A > 0) & (moved_N > 0.2)) | ((A <= 0) & (moved_N < -0.2))
        return -np.where(out_N, 0, ratio_N * A) + 1e-3 * np.log(ratio_N) ** 2
    if objective.loss.kind == "cispo":
        return -np.minimum(np.exp(still_log_N), 5) * A * batch.logprobs_N
    if objective.loss.kind == "gspo":
        drift_N = by_episode(batch, still.logprobs_N - still.proximal_N, np.mean)
        moved_N = np.exp(drift_N) * np.exp(batch.logprobs_N - still.logprobs_N)
        weight_N = oracle_weights(still, still.proximal_N - still.mu_N, objective)
        return -weight_N * clipped(moved_N, 3e-4, 4e-4)
    if objective.loss.kind == "reinforce":
        return -oracle_weights(still, still_log_N, objective) * A * batch.logprobs_N
    assert objective.loss.kind == "decoupled_ppo", (
        f"write the formula of {objective.loss.kind} here"
    )
    alpha_N = np.array([(lag - 1) / lag if lag > 0 else 0.0 for lag in batch.lags_N])
    proximal_N = still.mu_N + alpha_N * still_log_N
    weight_N = oracle_weights(still, proximal_N - still.mu_N, objective)
    return -weight_N * clipped(np.exp(batch.logprobs_N - proximal_N), 0.2, 0.28)


def objective_for(kind: str, weight: str | None = "token", **correction: Any) -> Objective:
    """The loss of a kind, with the weight where it may have one; π_prox is interpolated, that of gspo scored."""
    keys = {"decoupled_ppo": {"proximal": "interpolated"}, "gspo": {"epochs": 2}}
    loss = make_loss(kind=kind, **keys.get(kind, {}))
    section = make_correction(kind=weight if loss.weighed else None, **correction)
    return Objective(loss=loss, correction=section)


def test_every_kind_that_a_recipe_can_name_is_a_loss() -> None:
    kinds = set(by_kind(Objective.model_fields["loss"].annotation)) - {"MODULE:FUNCTION"}
    assert kinds == set(LOSSES)


@pytest.mark.parametrize("weight", ["token", "sequence", "icepop", None])
@pytest.mark.parametrize("kind", KINDS)
@given(batch=ragged())
def test_every_loss_equals_the_oracle(kind: str, weight: str | None, batch: Ragged) -> None:
    objective = objective_for(kind, weight)
    assert_allclose(batch.loss(objective), oracle_loss(batch, objective), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "mask", ["geometric_band", "k3_max", "veto_band", "stale_negative_max", "all"]
)
@given(batch=ragged())
def test_every_mask_equals_the_oracle(mask: str, batch: Ragged) -> None:
    oracle = oracle_masks(batch)
    kept_N = np.logical_and.reduce(list(oracle.values())) if mask == "all" else oracle[mask]
    objective = objective_for("cispo", None, **MASKS if mask == "all" else {mask: MASKS[mask]})
    assert_allclose(
        batch.loss(objective),
        np.where(kept_N, oracle_loss(batch, objective), 0),
        rtol=1e-9,
        atol=1e-12,
    )
    clipped_N = policy_clipped(torch.from_numpy(batch.logprobs_N), batch.known(), objective)
    assert clipped_N.tolist() == (~kept_N).tolist()


@pytest.mark.parametrize("kind", KINDS)
@given(batch=ragged())
def test_the_gradient_equals_finite_differences_with_the_stopped_parts_held(
    kind: str, batch: Ragged
) -> None:
    objective, step = objective_for(kind), 1e-6
    logprobs_N = torch.from_numpy(batch.logprobs_N.copy()).requires_grad_()
    policy_loss(logprobs_N, batch.known(), objective).sum().backward()
    assert logprobs_N.grad is not None
    for place in range(len(batch.logprobs_N)):
        nudge_N = step * (np.arange(len(batch.logprobs_N)) == place)
        sides = [
            (
                oracle_loss(
                    replace(batch, logprobs_N=batch.logprobs_N + sign * nudge_N), objective, batch
                )
            ).sum()
            for sign in (1, -1, 0)
        ]
        forward, backward = (sides[0] - sides[2]) / step, (sides[2] - sides[1]) / step
        gradient = logprobs_N.grad[place].item()
        # At a kink, which random floats may come within a step of, any slope between the two sides is right.
        low, high = sorted((forward, backward))
        assert low - 1e-3 <= gradient <= high + 1e-3


@pytest.mark.parametrize("kind", KINDS)
@given(batch=ragged(), seed=st.integers(0, 1000))
def test_a_permutation_of_the_tokens_permutes_the_loss(kind: str, batch: Ragged, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(batch.mu_N))
    objective = objective_for(kind, "sequence", **MASKS)
    assert_allclose(
        batch.taken(order).loss(objective), batch.loss(objective)[order], rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("kind", KINDS)
@given(batch=ragged(), at=st.integers(0, 6))
def test_a_split_between_episodes_changes_no_loss(kind: str, batch: Ragged, at: int) -> None:
    objective = objective_for(kind, "sequence", **MASKS)
    parts = [
        batch.taken(np.flatnonzero(side))
        for side in (batch.episodes_N < at, batch.episodes_N >= at)
    ]
    assert_allclose(
        np.concatenate([part.loss(objective) for part in parts]),
        batch.loss(objective),
        rtol=1e-9,
        atol=1e-12,
    )


def logs(*ratios: float) -> torch.Tensor:
    return torch.tensor(ratios, dtype=torch.float64).log()


def test_weights_by_hand() -> None:
    episodes_N = torch.tensor([0, 0, 1])
    assert c.token_truncation(logs(0.5, 4.0, 1.5), 2.0).tolist() == pytest.approx([0.5, 2.0, 1.5])
    assert c.sequence_truncation(logs(2.0, 3.0, 1.5), episodes_N, 5.0).tolist() == pytest.approx(
        [5.0, 5.0, 1.5]
    )
    assert c.icepop(logs(0.4, 6.0, 1.5), (0.5, 5.0)).tolist() == pytest.approx([0.0, 0.0, 1.5])


def test_masks_by_hand() -> None:
    episodes_N = torch.tensor([0, 0, 1])
    assert c.geometric_mask(logs(2.0, 0.5, 1.1), episodes_N, (0.99, 1.01)).tolist() == [
        True,
        True,
        False,
    ]
    assert c.k3_mask(logs(2.0, 0.5, 1.1), episodes_N, 1e-2).tolist() == [False, False, True]
    assert c.veto_mask(logs(1e-5, 1.0, 1.0), episodes_N, (1e-4, 100.0)).tolist() == [
        False,
        False,
        True,
    ]
    negative_N = torch.tensor([-1.0, -1.0, 1.0])
    assert c.stale_negative_mask(logs(0.5, 0.5, 0.1), negative_N, episodes_N, 0.5).tolist() == [
        False,
        False,
        True,
    ]


def test_gspo_stops_a_whole_good_episode_that_has_gained_enough() -> None:
    nothing = np.zeros(2, np.int64)
    batch = Ragged(np.log([0.6, 0.2]), np.log([0.3, 0.2]), np.ones(2), nothing, nothing)
    logprobs_N = torch.from_numpy(batch.logprobs_N)
    inputs = replace(batch.known(), proximal_N=torch.from_numpy(batch.mu_N))
    loss_N = policy_loss(logprobs_N, inputs, objective_for("gspo"))
    assert loss_N.tolist() == pytest.approx([-1.0004, -1.0004])
    assert policy_clipped(logprobs_N, inputs, objective_for("gspo")).all()


@pytest.mark.parametrize("epochs", [1, 2])
@given(batch=ragged())
def test_before_an_update_gspo_clips_nothing_however_the_engines_differ(
    epochs: int, batch: Ragged
) -> None:
    """It is the policy gradient with the same weight."""
    inputs = replace(batch.known(), proximal_N=torch.from_numpy(batch.logprobs_N))
    gradients = []
    for loss in (make_loss(kind="gspo", epochs=epochs), make_loss(kind="reinforce")):
        logprobs_N = torch.from_numpy(batch.logprobs_N.copy()).requires_grad_()
        loss_N = policy_loss(logprobs_N, inputs, Objective(loss=loss))
        gradients += torch.autograd.grad(loss_N.sum(), logprobs_N)
        assert not policy_clipped(logprobs_N, inputs, Objective(loss=loss)).any()
    assert_allclose(*gradients, rtol=1e-9)


@pytest.mark.parametrize("kind", ["ppo", "decoupled_ppo", "gspo"])
def test_the_dual_clip_bounds_what_a_bad_token_may_do(kind: str) -> None:
    zero = np.zeros(1, np.int64)
    batch = Ragged(np.log([0.5]), np.log([0.1]), -np.ones(1), zero, zero)
    logprobs_N = torch.from_numpy(batch.logprobs_N)
    inputs = replace(batch.known(), proximal_N=torch.from_numpy(batch.mu_N))
    for dual_clip, value in ((3.0, 3.0), (None, 5.0)):
        loss = make_loss(kind=kind, epochs=2, dual_clip=dual_clip)
        objective = Objective(loss=loss)
        assert policy_loss(logprobs_N, inputs, objective).tolist() == pytest.approx([value])
        is_clipped = policy_clipped(logprobs_N, inputs, objective).tolist()
        assert is_clipped == [dual_clip is not None]


@pytest.mark.parametrize("turns", [(2, 2), (1, 4, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_on_policy_every_token_is_pushed_by_its_own_advantage(
    kind: str, turns: tuple[int, ...]
) -> None:
    tokens, rng = sum(turns), np.random.default_rng(0)
    mu_N, zero_N = rng.uniform(-3, -0.1, tokens), np.zeros(tokens, np.int64)
    advantages_N = np.repeat(rng.normal(0, 1, len(turns)), turns)
    batch = Ragged(mu_N, mu_N, advantages_N, zero_N, zero_N)
    logprobs_N = torch.from_numpy(mu_N.copy()).requires_grad_()
    policy_loss(logprobs_N, batch.known(), objective_for(kind)).sum().backward()
    assert logprobs_N.grad is not None
    assert_allclose(logprobs_N.grad, -advantages_N, rtol=1e-9)


@given(batch=ragged())
def test_with_one_advantage_an_episode_gspo_has_the_gradient_of_its_sequence_form(
    batch: Ragged,
) -> None:
    def gradient(loss: Callable[[torch.Tensor], torch.Tensor]) -> Floats:
        logprobs_N = torch.from_numpy(batch.logprobs_N.copy()).requires_grad_()
        return np.asarray(torch.autograd.grad(loss(logprobs_N).sum(), logprobs_N)[0].numpy())

    def of_sequences(logprobs_N: torch.Tensor) -> torch.Tensor:
        s_N = c.episode_mean(
            logprobs_N - torch.from_numpy(batch.proximal_N), torch.from_numpy(batch.episodes_N)
        ).exp()
        A_N = torch.from_numpy(batch.advantages_N)
        surrogate_N = torch.minimum(s_N * A_N, s_N.clamp(1 - 3e-4, 1 + 4e-4) * A_N)
        return -torch.where(A_N < 0, torch.maximum(surrogate_N, 3 * A_N), surrogate_N)

    by_token = gradient(
        lambda logprobs_N: policy_loss(logprobs_N, batch.known(), objective_for("gspo", None))
    )
    assert_allclose(by_token, gradient(of_sequences), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("lag", [-1, 0, 1])
def test_of_fresh_tokens_and_those_one_version_behind_the_proximal_policy_is_the_behaviour_policy(
    lag: int,
) -> None:
    zero = np.zeros(1, np.int64)
    one = Ragged(np.log([0.6]), np.log([0.3]), np.ones(1), zero + lag, zero)
    logprobs_N = torch.from_numpy(one.logprobs_N.copy()).requires_grad_()
    loss_N = policy_loss(logprobs_N, one.known(), objective_for("decoupled_ppo"))
    (gradient,) = torch.autograd.grad(loss_N.sum(), logprobs_N)
    # Ρ = 2 is clipped, and w is 1.
    assert (loss_N.item(), gradient.item()) == (pytest.approx(-1.28), 0.0)
    assert policy_clipped(logprobs_N, one.known(), objective_for("decoupled_ppo")).item()


def test_with_one_update_the_exact_proximal_policy_is_the_policy_itself() -> None:
    zero = np.zeros(1, np.int64)
    one = Ragged(np.log([0.6]), np.log([0.3]), np.ones(1), zero + 1, zero)
    exact = Objective(loss=make_loss(kind="decoupled_ppo"))
    assert one.loss(exact).tolist() == pytest.approx([-2.0])  # ρ = 1, w = min(0.6/0.3, 2)
    several = Objective(loss=make_loss(kind="decoupled_ppo", epochs=2))
    logprobs_N, proximal_N = torch.tensor([0.6]).log(), torch.tensor([0.4]).log()
    loss_N = policy_loss(logprobs_N, replace(one.known(), proximal_N=proximal_N), several)
    assert loss_N.tolist() == pytest.approx([-(0.4 / 0.3) * 1.28])  # ρ = 1.5 is clipped


@pytest.mark.parametrize("kind", KINDS)
def test_a_micro_batch_without_tokens_has_no_loss(kind: str) -> None:
    nothing, none = np.empty(0), np.empty(0, np.int64)
    empty = Ragged(nothing, nothing, nothing, none, none)
    assert empty.loss(objective_for(kind, "token", **MASKS)).size == 0


@pytest.mark.parametrize("kind", ["ppo", "dppo", "cispo"])
def test_a_weight_on_a_ratio_that_has_it_already_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"would count twice: leave correction\.kind at auto"):
        RunConfig.load([], ["--loss.kind", kind, "--correction.kind", "icepop"])


def test_the_default_weight_follows_the_loss() -> None:
    weights = {kind: RunConfig.load([], ["--loss.kind", kind]).objective.weight for kind in KINDS}
    assert weights == dict.fromkeys(KINDS) | dict.fromkeys(
        ("reinforce", "decoupled_ppo", "gspo"), TokenCorrection()
    )
    assert (
        RunConfig.load(
            [], ["--loss.kind", "reinforce", "--correction.kind", "none"]
        ).objective.weight
        is None
    )


def test_a_cap_below_the_clip_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"clipped above 1 \+ high = 1\.28"):
        RunConfig.load([], ["--loss.cap", "1.28"])
    assert RunConfig.load([], ["--loss.cap", "1.3"]).loss.cap == 1.3  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["band", "geometric_band", "veto_band"])
@pytest.mark.parametrize("band", ["[1.01, 0.99]", "[1.1, 2]", "[0.5, 0.9]", "[1, 1]"])
def test_a_band_without_1_inside_is_refused(name: str, band: str) -> None:
    with pytest.raises(ConfigError, match="include 1, which is the ratio"):
        RunConfig.load(
            [], ["--loss.kind=reinforce", "--correction.kind=icepop", f"--correction.{name}", band]
        )
