"""The task stream: a pure function `(seed, kind, ticket number) → task`, so that every controller draws the same tasks.

Tickets come in blocks. Every block has each environment in proportion to its weight, in an order of its own. Within an
environment, each epoch has a new order of the tasks, so that each task is seen once before any is seen twice. Both
orders are computed from hashes: a draw costs the same for every number, needs no earlier draw, and is the same in every
version of Python. An evaluation always has the same tasks.
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
"""Approximate limit of a block, in tickets. Shares that need a longer block are rounded to a thousandth."""
ROUNDS = 8
"""Rounds of the permutation's network. With four, some orders of five tasks are eight times as frequent as others."""


@dataclass(frozen=True, slots=True)
class TaskSource:
    """The tasks of one environment and their share of the tickets of some kinds."""

    env_id: str
    task_ids: tuple[str, ...]
    weight: float
    kinds: tuple[Kind, ...] = tuple(Kind)


@dataclass(frozen=True, slots=True)
class EvalTask:
    """A held-out task, and the category that its result counts towards."""

    task: Task
    category: str


class Curriculum:
    def __init__(self, seed: int, sources: Sequence[TaskSource]) -> None:
        self._seed = seed
        self._sources = {kind: [source for source in sources if kind in source.kinds] for kind in Kind}
        self._quotas = {
            kind: quotas([source.weight for source in drawn]) for kind, drawn in self._sources.items() if drawn
        }

    def task(self, kind: Kind, number: int) -> Task:
        """Return the task of ticket `number` of a kind. Raises ConfigError if no environment has that kind."""
        if not self._sources[kind]:
            raise ConfigError(f"no environment has {kind.value!r} among its kinds: add it to one of the envs")
        place, earlier = draw(self._quotas[kind], number, f"{self._seed}/{kind.value}")
        source = self._sources[kind][place]
        epoch, index = divmod(earlier, len(source.task_ids))
        drawn = permuted(index, len(source.task_ids), f"{self._seed}/{kind.value}/{source.env_id}/{epoch}")
        return Task(env_id=source.env_id, task_id=source.task_ids[drawn])


def quotas(weights: Sequence[float]) -> tuple[int, ...]:
    """Return how many tickets of a block each source gets. Weights 3 and 1 make blocks of four tickets.

    It is the shortest block that has exactly these weights, as written in decimals. If that is longer than MAX_BLOCK,
    it is rounded to about MAX_BLOCK, and each source gets at least one ticket.
    """
    exact = [Fraction(str(weight)) for weight in weights]  # 0.1 is a tenth, not the nearest binary fraction
    scale = lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    if sum(whole) // gcd(*whole) <= MAX_BLOCK:
        return tuple(weight // gcd(*whole) for weight in whole)
    return tuple(max(1, round(MAX_BLOCK * weight / sum(exact))) for weight in exact)


def draw(quotas: tuple[int, ...], number: int, key: str) -> tuple[int, int]:
    """Return the source of ticket `number`, and how often that source has been drawn before."""
    block, place = divmod(number, sum(quotas))
    source, earlier = _block(quotas, f"{key}/block/{block}")[place]
    return source, block * quotas[source] + earlier


# Tickets come in order, so that a kind asks for the same block again and again.
@lru_cache(maxsize=16)
def _block(quotas: tuple[int, ...], key: str) -> Sequence[tuple[int, int]]:
    """Return the sources of a block in order, each with the number of its earlier places in the block."""
    sources = [source for source, quota in enumerate(quotas) for _ in range(quota)]
    seen: Counter[int] = Counter()
    order = []
    for place in sorted(range(len(sources)), key=lambda place: _hash(f"{key}/{place}")):
        order.append((sources[place], seen[sources[place]]))
        seen[sources[place]] += 1
    return order


def permuted(place: int, count: int, key: str) -> int:
    """Return where the permutation of `range(count)` given by `key` puts `place`, in constant time and memory.

    It is a Feistel network over the next power of four, applied until the result is in the range (Black and Rogaway,
    "Ciphers with arbitrary finite domains", 2002).
    """
    bits = ((count - 1).bit_length() + 1) // 2
    # Fewer than four turns on average: the next power of four is less than four times `count`.
    while True:
        left, right = divmod(place, 1 << bits)
        for step in range(ROUNDS):
            left, right = right, left ^ (_hash(f"{key}/{step}/{right}") % (1 << bits))
        place = (left << bits) + right
        if place < count:
            return place


def _hash(text: str) -> int:
    # Not `hash`, which Python salts anew in every process: two controllers have to draw the same tasks.
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
    """Return the tasks of every evaluation round; none if evaluations are off. They do not depend on the run's seed."""
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
        scope = f" of the categories {', '.join(env.categories)}" if env.categories else ""
        raise ConfigError(
            f"eval.every is {every} but environment {env.id!r} holds out no task{scope} (split test): set eval.every "
            "to 0, or widen the environment's categories"
        )
    return found


def spread(specs: Iterable[TaskSpec], count: int) -> list[TaskSpec]:
    """Return `count` tasks, spread evenly over the categories; within a category, in the order of their ids' hashes."""
    places: Counter[str] = Counter()
    placed: list[tuple[int, str, TaskSpec]] = []
    for spec in sorted(specs, key=lambda spec: (_hash(spec.task_id), spec.task_id)):
        placed.append((places[spec.category], spec.category, spec))
        places[spec.category] += 1
    return [spec for _, _, spec in sorted(placed, key=lambda entry: entry[:2])[:count]]
