"""Losses, advantages, corrections and rewards of other packages, which a recipe names as `MODULE:FUNCTION`.

Each is a pure function of arrays and of the section's other keys, `options`. What it returns is checked, so that an
error names the function's file and line instead of showing as a run that learns nothing (docs/own-loss.md).
"""

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from horizonrl.common.config.objective import (
    Objective,
    OwnAdvantage,
    OwnCorrection,
    OwnLoss,
    OwnReward,
)
from horizonrl.common.errors import ConfigError
from horizonrl.common.plugins import attributed, definition, load_function
from horizonrl.common.types import Episode

if TYPE_CHECKING:
    from torch import Tensor

PARAMETERS: Mapping[type, tuple[str, ...]] = {
    OwnReward: ("reward.kind", "episode", "options"),
    OwnAdvantage: ("advantage.kind", "returns_M", "options"),
    OwnLoss: ("loss.kind", "logprobs_N", "inputs", "options"),
    OwnCorrection: ("correction.kind", "log_ratio_N", "episodes_N", "options"),
}
"""The key that names each function, and what it is called with."""


def require_functions(objective: Objective) -> None:
    """Raise ConfigError unless each function that the objective names exists and takes what it is called with."""
    for section in (objective.reward, objective.advantage, objective.loss, objective.correction):
        if type(section) in PARAMETERS:
            _load(type(section), str(section.kind))


@cache
def _load(section: type, path: str) -> Callable[..., Any]:
    key, *parameters = PARAMETERS[section]
    return load_function(key, path, *parameters)


def _call(settings: OwnReward | OwnAdvantage | OwnLoss | OwnCorrection, *arguments: Any) -> Any:
    """Call the function that a section names. Raises ConfigError, with file and line, for whatever it raises."""
    key, module = PARAMETERS[type(settings)][0], settings.kind.partition(":")[0]
    with attributed(f"{key} = {settings.kind!r}", "fails", module):
        return _load(type(settings), settings.kind)(*arguments, settings.options)


def own_rewards(episode: Episode, settings: OwnReward) -> list[float]:
    """Return the reward of each turn: `function(episode, options)`."""
    function = _load(OwnReward, settings.kind)
    rewards = [float(reward) for reward in _call(settings, episode)]
    if len(rewards) != len(episode.turns) or not all(map(math.isfinite, rewards)):
        raise ConfigError(
            f"reward.kind {settings.kind} returned {rewards!r:.200} for an episode of {len(episode.turns)} turns: "
            f"return a finite number for each turn ({definition(function)})"
        )
    return rewards


def own_comparison(settings: OwnAdvantage) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
    """Return what compares the returns of a group: `function(returns_M, options)`."""
    function = _load(OwnAdvantage, settings.kind)

    def compare(returns_M: NDArray[np.float64]) -> NDArray[np.float64]:
        compared_M = np.asarray(_call(settings, returns_M), np.float64)
        if compared_M.shape != returns_M.shape or not np.isfinite(compared_M).all():
            raise ConfigError(
                f"advantage.kind {settings.kind} returned {compared_M!r:.200} for the returns {returns_M!r:.200}: "
                f"return a finite number for each of them ({definition(function)})"
            )
        return compared_M

    return compare


def own_weights(log_ratio_N: "Tensor", episodes_N: "Tensor", settings: OwnCorrection) -> "Tensor":
    """Return the weight of each token: `function(log_ratio_N, episodes_N, options)`."""
    function = _load(OwnCorrection, settings.kind)
    weights_N = _call(settings, log_ratio_N, episodes_N)
    _require_tokens(f"correction.kind {settings.kind}", weights_N, log_ratio_N, function)
    return weights_N  # type: ignore[no-any-return]


def own_loss(
    logprobs_N: "Tensor", inputs: Any, settings: OwnLoss
) -> tuple["Tensor", dict[str, "Tensor"]]:
    """Return the loss of each token and the named numbers of each: `function(logprobs_N, inputs, options)`.

    `inputs` are `loss.LossInputs`.
    """
    function = _load(OwnLoss, settings.kind)
    returned = _call(settings, logprobs_N, inputs)
    loss_N, numbers = returned if isinstance(returned, tuple) else (returned, {})
    _require_tokens(f"loss.kind {settings.kind}", loss_N, logprobs_N, function)
    for name, number_N in numbers.items():
        _require_tokens(
            f"loss.kind {settings.kind}, number {name!r},", number_N, logprobs_N, function
        )
    return loss_N, numbers


def _require_tokens(
    subject: str, value_N: Any, like_N: "Tensor", function: Callable[..., Any]
) -> None:
    shape = getattr(value_N, "shape", None)
    if shape != like_N.shape or not value_N.isfinite().all():
        finite = "a tensor that is not finite" if shape == like_N.shape else f"{value_N!r:.100}"
        raise ConfigError(
            f"{subject} returned {finite}: return a finite tensor with a number for each of the "
            f"{len(like_N)} tokens ({definition(function)})"
        )


def number_names(
    objective: Objective, probe: Callable[[], tuple["Tensor", Any]]
) -> tuple[str, ...]:
    """Return the names of the numbers that the loss of another package measures, by calling it with two tokens.

    Raises ConfigError, as in training, for whatever it raises.
    """
    loss = objective.loss
    if not isinstance(loss, OwnLoss):
        return ()
    return tuple(own_loss(*probe(), loss)[1])
