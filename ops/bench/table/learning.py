"""Rows of the learner's step, which `ops/bench/speed/learner.py` measures: as the table has them."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from horizonrl.common.errors import RunFailed
from horizonrl.ops.bench.table.rows import Request, Row

MEASURE = "horizonrl.ops.bench.speed.learner"


def rows(request: Request) -> list[Row]:
    """Measure the step's tokens per second. Raises MissingDependency without TRL."""
    if find_spec(MEASURE) is None:
        raise RunFailed(f"{MEASURE} is not part of this version")
    measure: Callable[[bool], list[dict[str, Any]]] = import_module(MEASURE).rows
    return [
        Row(row["what"], row["peer"], "tokens/s", row["ours"], row["theirs"], row["goal"])
        for row in measure(request.small)
    ]
