"""The task stream: a pure function `(seed, ticket number) → task`, so that any controller draws the same tasks.

The environment is drawn by weight; within an environment the tasks come in a fresh shuffle per epoch, so that each is
seen once before any is seen twice.
"""

import random
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from horizonrl.common.types import Kind, Task


@dataclass(frozen=True, slots=True)
class Source:
    """The tasks of one environment and their share of the tickets."""

    env_id: str
    task_ids: tuple[str, ...]
    weight: float


class Curriculum:
    def __init__(self, seed: int, sources: Sequence[Source]) -> None:
        self._seed = seed
        self._sources = sources
        self._bounds = list(accumulate(source.weight for source in sources))
        self._draws = {kind: (array("L"), array("Q")) for kind in Kind}
        """Per kind, for each ticket number: the source drawn, and how often it had been drawn before."""
        self._counts: dict[Kind, list[int]] = {kind: [0] * len(sources) for kind in Kind}

    def task(self, kind: Kind, number: int) -> Task:
        """Return the task of ticket `number` of its kind."""
        place, earlier = self._draw(kind, number)
        source = self._sources[place]
        epoch, index = divmod(earlier, len(source.task_ids))
        order = list(range(len(source.task_ids)))
        random.Random(f"{self._seed}/{kind.value}/{source.env_id}/{epoch}").shuffle(order)
        return Task(env_id=source.env_id, task_id=source.task_ids[order[index]])

    def _draw(self, kind: Kind, number: int) -> tuple[int, int]:
        (places, earlier), counts = self._draws[kind], self._counts[kind]
        while len(places) <= number:
            point = random.Random(f"{self._seed}/{kind.value}/{len(places)}").random() * self._bounds[-1]
            place = min(bisect_right(self._bounds, point), len(self._bounds) - 1)
            places.append(place)
            earlier.append(counts[place])
            counts[place] += 1
        return places[number], earlier[number]
