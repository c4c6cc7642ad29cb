"""Losses, advantages, corrections and rewards of other packages, which a recipe names as `MODULE:FUNCTION`.

Each is a pure function of arrays; it takes the section's other keys, `options`, as keywords. What it returns is
checked, so that an error names the function's file and line instead of showing as a run that learns nothing
(docs/own-loss.md).
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
from horizonrl.common.config.section import Section
from horizonrl.common.errors import ConfigError
from horizonrl.common.plugins import attributed, definition, load_function
from horizonrl.common.types import Episode

if TYPE_CHECKING:
    from torch import Tensor

PARAMETERS: Mapping[type, tuple[str, ...]] = {
    OwnReward: ("reward.kind", "episode"),
    OwnAdvantage: ("advantage.kind", "returns_M"),
    OwnLoss: ("loss.kind", "logprobs_N", "inputs"),
    OwnCorrection: ("correction.kind", "log_ratio_N", "episodes_N"),
}
"""The key that names each function, and what it is called with."""


OwnSection = OwnReward | OwnAdvantage | OwnLoss | OwnCorrection


def require_functions(objective: Objective) -> None:
    """Raise ConfigError unless each function that the objective names exists and takes what it is called with."""
    for section in (objective.reward, objective.advantage, objective.loss, objective.correction):
        if isinstance(section, OwnSection):
            _load(section)


def _load(settings: OwnSection) -> Callable[..., Any]:
    return _load_once(type(settings), settings.kind, tuple(settings.options))


@cache
def _load_once(section: type[Section], path: str, options: tuple[str, ...]) -> Callable[..., Any]:
    key, *parameters = PARAMETERS[section]
    return load_function(key, path, *parameters, options=options, keys=section.model_fields)


def _call(settings: OwnSection, *arguments: Any) -> Any:
    """Call the function that a section names. Raises ConfigError, with file and line, for whatever it raises."""
    function = _load(settings)
    key, module = PARAMETERS[type(settings)][0], settings.kind.partition(":")[0]
    with attributed(f"{key} = {settings.kind!r}", "fails", module):
        return function(*arguments, **settings.options)


def own_rewards(episode: Episode, settings: OwnReward) -> list[float]:
    """Return the reward of each turn: `function(episode, **options)`."""
    rewards = [float(reward) for reward in _call(settings, episode)]
    if len(rewards) != len(episode.turns) or not all(map(math.isfinite, rewards)):
        raise ConfigError(
            f"reward.kind {settings.kind} returned {rewards!r:.200} for an episode of {len(episode.turns)} turns: "
            f"return a finite number for each turn ({definition(_load(settings))})"
        )
    return rewards


def own_comparison(settings: OwnAdvantage) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
    """Return what compares the returns of a group: `function(returns_M, **options)`."""

    def compare(returns_M: NDArray[np.float64]) -> NDArray[np.float64]:
        compared_M = np.asarray(_call(settings, returns_M), np.float64)
        if compared_M.shape != returns_M.shape or not np.isfinite(compared_M).all():
            raise ConfigError(
                f"advantage.kind {settings.kind} returned {compared_M!r:.200} for the returns {returns_M!r:.200}: "
                f"return a finite number for each of them ({definition(_load(settings))})"
            )
        return compared_M

    return compare


def own_weights(log_ratio_N: "Tensor", episodes_N: "Tensor", settings: OwnCorrection) -> "Tensor":
    """Return the weight of each token: `function(log_ratio_N, episodes_N, **options)`."""
    weights_N = _call(settings, log_ratio_N, episodes_N)
    _require_tokens(settings, "", weights_N, log_ratio_N)
    return weights_N  # type: ignore[no-any-return]


def own_loss(
    logprobs_N: "Tensor", inputs: Any, settings: OwnLoss
) -> tuple["Tensor", dict[str, "Tensor"]]:
    """Return the loss of each token and the named numbers of each: `function(logprobs_N, inputs, **options)`.

    `inputs` are `loss.LossInputs`.
    """
    returned = _call(settings, logprobs_N, inputs)
    loss_N, numbers = returned if isinstance(returned, tuple) else (returned, {})
    _require_tokens(settings, "", loss_N, logprobs_N)
    for name, number_N in numbers.items():
        _require_tokens(settings, f", number {name!r},", number_N, logprobs_N)
    return loss_N, numbers


def _require_tokens(settings: OwnSection, part: str, value_N: Any, like_N: "Tensor") -> None:
    """Raise ConfigError unless a function returned, as a part of its answer, a finite number per token."""
    shape = getattr(value_N, "shape", None)
    if shape != like_N.shape or not value_N.isfinite().all():
        finite = "a tensor that is not finite" if shape == like_N.shape else f"{value_N!r:.100}"
        key = PARAMETERS[type(settings)][0]
        raise ConfigError(
            f"{key} {settings.kind}{part} returned {finite}: return a finite tensor with a number for each "
            f"of the {len(like_N)} tokens ({definition(_load(settings))})"
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
