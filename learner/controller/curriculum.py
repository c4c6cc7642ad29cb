"""The task stream: a pure function `(seed, kind, ticket number) → task`, so that any controller draws the same tasks.

Tickets come in blocks. Every block holds each environment by its weight, in an order of its own; within an environment
the tasks come in a fresh order per epoch, so that each is seen once before any is seen twice. Both orders follow from
hashes: a draw costs the same for every number, needs no earlier one, and is the same in every version of Python. The
tasks of an evaluation are always the same ones.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import gcd, lcm

import xxhash

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.config.training import EnvSection
from horizonrl.common.errors import ConfigError
from horizonrl.common.types import Kind, Task
from horizonrl.envs import registry
from horizonrl.envs.api import TaskSpec

MAX_BLOCK = 1_000
"""Tickets of a block, about: shares that no shorter block holds exactly are rounded to a thousandth."""
ROUNDS = 8
"""Of the permutation's network. With four, some orders of five tasks come eight times as often as others."""


@dataclass(frozen=True, slots=True)
class TaskSource:
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
    def __init__(self, seed: int, sources: Sequence[TaskSource]) -> None:
        self._seed = seed
        self._sources = {kind: [source for source in sources if kind in source.kinds] for kind in Kind}
        self._quotas = {kind: quotas([each.weight for each in of]) for kind, of in self._sources.items() if of}

    def task(self, kind: Kind, number: int) -> Task:
        """Return the task of ticket `number` of its kind. Raises ConfigError when no source is of that kind."""
        if not self._sources[kind]:
            raise ConfigError(f"no environment has {kind.value!r} among its kinds: add it to one of the envs")
        place, earlier = draw(self._quotas[kind], number, f"{self._seed}/{kind.value}")
        source = self._sources[kind][place]
        epoch, index = divmod(earlier, len(source.task_ids))
        drawn = permuted(index, len(source.task_ids), f"{self._seed}/{kind.value}/{source.env_id}/{epoch}")
        return Task(env_id=source.env_id, task_id=source.task_ids[drawn])


def quotas(weights: Sequence[float]) -> tuple[int, ...]:
    """Return how many tickets of a block each source gets: weights 3 and 1 make blocks of four.

    The shortest block that holds the weights exactly, as they are written in decimals; one above MAX_BLOCK is
    rounded to about that many, and each source gets at least one.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    if sum(whole) // gcd(*whole) <= MAX_BLOCK:
        return tuple(weight // gcd(*whole) for weight in whole)
    return tuple(max(1, round(MAX_BLOCK * weight / sum(exact))) for weight in exact)


def draw(quotas: tuple[int, ...], number: int, key: str) -> tuple[int, int]:
    """Return the source of ticket `number`, and how often that source had been drawn before."""
    block, place = divmod(number, sum(quotas))
    source, earlier = _block(quotas, f"{key}/block/{block}")[place]
    return source, block * quotas[source] + earlier


@lru_cache(maxsize=16)
def _block(quotas: tuple[int, ...], key: str) -> Sequence[tuple[int, int]]:
    """Return the sources of a block in order, each with how often the block had it before."""
    sources = [source for source, quota in enumerate(quotas) for _ in range(quota)]
    seen: Counter[int] = Counter()
    order = []
    for place in sorted(range(len(sources)), key=lambda place: _hash(f"{key}/{place}")):
        order.append((sources[place], seen[sources[place]]))
        seen[sources[place]] += 1
    return order


def permuted(place: int, count: int, key: str) -> int:
    """Return where the permutation of `range(count)` that belongs to `key` puts `place`, in constant time and memory.

    A Feistel network over the next power of four, walked until it is back in the range (Black and Rogaway, "Ciphers
    with arbitrary finite domains", 2002).
    """
    bits = ((count - 1).bit_length() + 1) // 2
    while True:
        left, right = divmod(place, 1 << bits)
        for step in range(ROUNDS):
            left, right = right, left ^ (_hash(f"{key}/{step}/{right}") % (1 << bits))
        place = (left << bits) + right
        if place < count:
            return place


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode())


def sources_of(envs: Iterable[EnvSection], *, demonstrations: bool = False) -> list[TaskSource]:
    """Return each environment with its tasks, checked: it must be able to play the kinds of tickets that it is given.

    `demonstrations` says whether the run needs any. Raises ConfigError for an environment that has no tasks or that
    cannot do what its kinds demand.
    """
    sources = []
    for env in envs:
        if registry.demonstrations_only(env.id) and {*env.kinds} != {Kind.DEMO}:
            raise ConfigError(
                f"{env.id} only has demonstrations, and its kinds are {', '.join(env.kinds)}: give it "
                'kinds = ["demo"], and for the other kinds an environment that can be played'
            )
        if demonstrations and Kind.DEMO in env.kinds and not registry.has_expert(env.id):
            raise ConfigError(
                f"{env.id} has no expert that could demonstrate its tasks: give it kinds = "
                '["train", "eval"], or set imitation.steps and rl.demos_per_step to 0'
            )
        specs = registry.select(env.id, env.split, env.categories, env.options)
        sources.append(TaskSource(env.id, tuple(spec.task_id for spec in specs), env.weight, env.kinds))
    return sources


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
    for spec in sorted(specs, key=lambda spec: (_hash(spec.task_id), spec.task_id)):
        placed.append((places[spec.category], spec.category, spec))
        places[spec.category] += 1
    return [spec for _, _, spec in sorted(placed, key=lambda found: found[:2])[:count]]
