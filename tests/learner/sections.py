"""Sections with kinds from their keys, as a recipe gives them."""

from typing import Any

from pydantic import TypeAdapter

from horizonrl.common.config.objective import Advantage, Correction, Loss

_ADVANTAGE: TypeAdapter[Any] = TypeAdapter(Advantage)
_LOSS: TypeAdapter[Any] = TypeAdapter(Loss)
_CORRECTION: TypeAdapter[Any] = TypeAdapter(Correction)


def make_advantage(**keys: Any) -> Any:
    return _ADVANTAGE.validate_python(keys)


def make_loss(**keys: Any) -> Any:
    return _LOSS.validate_python(keys)


def make_correction(**keys: Any) -> Any:
    return _CORRECTION.validate_python(keys)
