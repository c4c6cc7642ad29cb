"""The task stream: a pure function `(seed, ticket number) → task`, so that any controller draws the same tasks.

The environment is drawn by weight; within an environment the tasks come in a fresh shuffle per epoch, so that each is
seen once before any is seen twice. The tasks of an evaluation are always the same ones.
"""

import random
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import xxhash

from horizonrl.common.config import EnvSection, RunConfig
from horizonrl.common.errors import ConfigError
from horizonrl.common.types import Kind, Task
from horizonrl.envs import registry
from horizonrl.envs.api import TaskSpec


@dataclass(frozen=True, slots=True)
class Source:
    """The tasks of one environment and their share of the tickets of some kinds."""

    env_id: str
    task_ids: tuple[str, ...]
    weight: float
    kinds: tuple[Kind, ...] = tuple(Kind)


@dataclass(frozen=True, slots=True)
class EvalTask:
    """A held-out task, and what its result is broken down by."""

    task: Task
    category: str


class Curriculum:
    def __init__(self, seed: int, sources: Sequence[Source]) -> None:
        self._seed = seed
        self._sources = {kind: [source for source in sources if kind in source.kinds] for kind in Kind}
        self._bounds = {kind: list(accumulate(source.weight for source in self._sources[kind])) for kind in Kind}
        self._draws = {kind: (array("L"), array("Q")) for kind in Kind}
        """Per kind, for each ticket number: the source drawn, and how often it had been drawn before."""
        self._counts = {kind: [0] * len(self._sources[kind]) for kind in Kind}

    def task(self, kind: Kind, number: int) -> Task:
        """Return the task of ticket `number` of its kind. Raises ConfigError when no source is of that kind."""
        if not self._sources[kind]:
            raise ConfigError(f"no environment has {kind.value!r} among its kinds: add it to one of the envs")
        place, earlier = self._draw(kind, number)
        source = self._sources[kind][place]
        epoch, index = divmod(earlier, len(source.task_ids))
        order = _shuffled(len(source.task_ids), f"{self._seed}/{kind.value}/{source.env_id}/{epoch}")
        return Task(env_id=source.env_id, task_id=source.task_ids[order[index]])

    def _draw(self, kind: Kind, number: int) -> tuple[int, int]:
        (places, earlier), counts, bounds = self._draws[kind], self._counts[kind], self._bounds[kind]
        while len(places) <= number:
            point = random.Random(f"{self._seed}/{kind.value}/{len(places)}").random() * bounds[-1]
            place = min(bisect_right(bounds, point), len(bounds) - 1)
            places.append(place)
            earlier.append(counts[place])
            counts[place] += 1
        return places[number], earlier[number]


@lru_cache(maxsize=64)
def _shuffled(count: int, seed: str) -> Sequence[int]:
    """Return the order of an epoch's tasks; kept, as every ticket of the epoch asks for it."""
    order = array("L", range(count))
    random.Random(seed).shuffle(order)
    return order


def eval_tasks(config: RunConfig) -> tuple[EvalTask, ...]:
    """Return the tasks of every evaluation round; none when evaluations are off. The run's seed has no part in them."""
    if not config.eval.every:
        return ()
    return tuple(
        EvalTask(Task(env_id=env.id, task_id=spec.task_id), spec.category)
        for env in config.envs
        if Kind.EVAL in env.kinds
        for spec in spread(_held_out(env, config.eval.every), config.eval.tasks)
    )


def _held_out(env: EnvSection, every: int) -> list[TaskSpec]:
    found = [spec for spec in registry.select(env.id, "all", env.categories, env.options) if spec.split == "test"]
    if not found:
        of = f" of the categories {', '.join(env.categories)}" if env.categories else ""
        raise ConfigError(
            f"eval.every is {every} but environment {env.id!r} holds out no task{of} (split test): set eval.every to "
            "0, or widen the environment's categories"
        )
    return found


def spread(specs: Iterable[TaskSpec], count: int) -> list[TaskSpec]:
    """Return `count` tasks, as many of each category as there are; within one, in the order of their ids' hashes."""
    places: Counter[str] = Counter()
    placed: list[tuple[int, str, TaskSpec]] = []
    for spec in sorted(specs, key=lambda spec: (xxhash.xxh3_64_intdigest(spec.task_id.encode()), spec.task_id)):
        placed.append((places[spec.category], spec.category, spec))
        places[spec.category] += 1
    return [spec for _, _, spec in sorted(placed, key=lambda found: found[:2])[:count]]
