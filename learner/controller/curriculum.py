"""The task stream: a pure function `(seed, kind, ticket number) → task`, so that every controller draws the same tasks.

Tickets come in blocks. Every block has each environment in proportion to its weight, in an order of its own. Within an
environment, each epoch has a new order of the tasks, so that each task is seen once before any is seen twice. Both
orders are computed from hashes: a draw costs the same for every number, needs no earlier draw, and is the same in every
version of Python. An evaluation always has the same tasks.

With an adaptive curriculum, a train ticket's task also follows from what the learner has announced of categories and of
tasks that taught last time (`yields.py`). The ticket stream remembers the ticket that was issued, as it does for
adaptive horizons.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from math import gcd, lcm
from sys import intern

import xxhash

from horizonrl.common.config.schedule import RunSchedule
from horizonrl.common.config.training import EnvSection, EvalSection
from horizonrl.common.errors import ConfigError
from horizonrl.common.state import CategoryYield, RepeatedTasks
from horizonrl.common.types import Kind, Task
from horizonrl.envs import registry
from horizonrl.envs.api import TaskSpec

MAX_BLOCK = 1_000
"""Approximate limit of a block, in tickets. Shares that need a longer block are rounded to a thousandth."""
FLOOR = 0.1
"""Least chance of a task under an adaptive curriculum, as a share of that of the most likely one."""
REPEATED, HALF = 0.75, 8
"""Limit of the share of an environment's tickets that tasks which taught last time get, and the number of them at which
they get half of that: with few of them, the same one would be drawn several times before its outcome is known. As many
as MAX_REPEATED get two thirds of the tickets."""
REPEATED_LABEL = "(repeated)"
ROUNDS = 8
"""Rounds of the permutation's network. With four, some orders of five tasks are eight times as frequent as others."""


@dataclass(frozen=True, slots=True)
class TaskSource:
    """The tasks of one environment and their share of the tickets of some kinds."""

    env_id: str
    task_ids: tuple[str, ...]
    weight: float
    kinds: tuple[Kind, ...] = tuple(Kind)
    categories: tuple[str, ...] = ()
    """The category of each task; an adaptive curriculum needs them."""


@dataclass(frozen=True, slots=True)
class EvalTask:
    """A held-out task, and the category that its result counts towards."""

    task: Task
    category: str


@dataclass(frozen=True, slots=True)
class DrawShare:
    """What an adaptive curriculum draws next, and why."""

    env_id: str
    category: str
    """REPEATED_LABEL for the tasks that taught last time."""
    share: float
    """Share of the environment's train tickets."""
    differed: float | None
    """Share of the last groups drawn from here whose returns differed; None before one was seen."""
    tasks: int
    """Number of tasks to draw from."""


class Curriculum:
    def __init__(self, seed: int, sources: Sequence[TaskSource], *, adaptive: bool = False) -> None:
        self.seed = seed
        self.adaptive = adaptive
        """Whether the draws follow what the learner announces."""
        self.sources = sources
        self._sources = {
            kind: [source for source in sources if kind in source.kinds] for kind in Kind
        }
        self._quotas = {
            kind: quotas([source.weight for source in drawn])
            for kind, drawn in self._sources.items()
            if drawn
        }
        self._by_category: dict[str, dict[str, list[str]]] = {}
        self._own_tasks: dict[str, frozenset[str]] = {}

    def draw(
        self,
        kind: Kind,
        number: int,
        yields: Sequence[CategoryYield] = (),
        repeats: Sequence[RepeatedTasks] = (),
    ) -> tuple[Task, bool]:
        """Return the task of ticket `number` of a kind, and whether it is drawn again because it taught last time.

        `yields` and `repeats` are what the learner has announced for an adaptive curriculum; without them the draw is
        uniform. Raises ConfigError if no environment has that kind.
        """
        if not self._sources[kind]:
            raise ConfigError(
                f"no environment has {kind.value!r} among its kinds: add it to one of the envs"
            )
        offset, earlier = draw(self._quotas[kind], number, f"{self.seed}/{kind.value}")
        source = self._sources[kind][offset]
        key = f"{self.seed}/{kind.value}/{source.env_id}"
        repeated = next((entry for entry in repeats if entry.env_id == source.env_id), None)
        if repeated and _chance(f"{key}/{earlier}/repeated") < self.repeated_share(
            repeated, yields
        ):
            task_id = repeated.task_ids[_hash(f"{key}/{earlier}/which") % len(repeated.task_ids)]
            if task_id in self._own(source):  # the recipe may have changed since it was announced
                return Task(env_id=source.env_id, task_id=task_id), True
        task_ids = self._choose(source, f"{key}/{earlier}", yields) if yields else source.task_ids
        epoch, index = divmod(earlier, len(task_ids))
        task_id = task_ids[permuted(index, len(task_ids), f"{key}/{epoch}")]
        return Task(env_id=source.env_id, task_id=task_id), False

    def _choose(
        self, source: TaskSource, key: str, yields: Sequence[CategoryYield]
    ) -> Sequence[str]:
        """Return the tasks of the category that a ticket draws from."""
        shares = self.shares(source.env_id, yields)
        index = bisect_right(list(accumulate(shares.values())), _chance(f"{key}/category"))
        # The last one, if rounding leaves a rest.
        return self._members(source)[list(shares)[min(index, len(shares) - 1)]]

    def explained(
        self, yields: Sequence[CategoryYield], repeats: Sequence[RepeatedTasks]
    ) -> list[DrawShare]:
        """Return what each category gets of its environment's train tickets, and the repeated tasks before them."""
        explanations = []
        for env_id in dict.fromkeys(entry.env_id for entry in yields):
            again = next(
                (entry for entry in repeats if entry.env_id == env_id), RepeatedTasks(env_id=env_id)
            )
            share = self.repeated_share(again, yields)
            explanations.append(
                DrawShare(env_id, REPEATED_LABEL, share, again.differed, len(again.task_ids))
            )
            differed = {
                entry.category: entry.differed for entry in yields if entry.env_id == env_id
            }
            members, rest = self._members(self._source(env_id)), 1.0 - share
            for category, of_rest in self.shares(env_id, yields).items():
                tasks = len(members[category])
                explanations.append(
                    DrawShare(env_id, category, rest * of_rest, differed.get(category), tasks)
                )
        return explanations

    def shares(self, env_id: str, yields: Sequence[CategoryYield]) -> dict[str, float]:
        """Return the share of an environment's train tickets that each of its categories gets.

        A category counts as its number of tasks, times what it yields as a share of what the best one does. No task's
        chance is below FLOOR of another's, so that a category that has become possible to learn is found.
        """
        source = self._source(env_id)
        shares = {entry.category: entry.share for entry in yields if entry.env_id == env_id}
        best = max(shares.values(), default=1.0)
        weights = {
            category: len(tasks) * max(FLOOR, shares.get(category, best) / best)
            for category, tasks in self._members(source).items()
        }
        total = sum(weights.values())
        return {category: weight / total for category, weight in weights.items()}

    def repeated_share(self, repeated: RepeatedTasks, yields: Sequence[CategoryYield]) -> float:
        """Return the share of an environment's train tickets that repeat tasks which taught last time.

        It rises with their number to REPEATED, and falls with their yield where that is below the best category's.
        """
        best = max(
            (entry.share for entry in yields if entry.env_id == repeated.env_id), default=1.0
        )
        count = len(repeated.task_ids)
        return REPEATED * count / (count + HALF) * min(1.0, repeated.share / best)

    def _source(self, env_id: str) -> TaskSource:
        return next(source for source in self._sources[Kind.TRAIN] if source.env_id == env_id)

    def _own(self, source: TaskSource) -> frozenset[str]:
        """Return an environment's tasks. It is made once, since there may be a million."""
        if source.env_id not in self._own_tasks:
            self._own_tasks[source.env_id] = frozenset(source.task_ids)
        return self._own_tasks[source.env_id]

    def _members(self, source: TaskSource) -> dict[str, list[str]]:
        """Return an environment's tasks by category. It is made once, since there may be a million."""
        if source.env_id not in self._by_category:
            members: dict[str, list[str]] = {}
            for task_id, category in zip(source.task_ids, source.categories, strict=True):
                members.setdefault(category, []).append(task_id)
            self._by_category[source.env_id] = members
        return self._by_category[source.env_id]


def quotas(weights: Sequence[float]) -> tuple[int, ...]:
    """Return how many tickets of a block each source gets. Weights 3 and 1 make blocks of four tickets.

    It is the shortest block that has exactly these weights, as written in decimals. If that is longer than MAX_BLOCK,
    it is rounded to about MAX_BLOCK, and each source gets at least one ticket.
    """
    # 0.1 is a tenth, not the nearest binary fraction.
    exact = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    if sum(whole) // gcd(*whole) <= MAX_BLOCK:
        return tuple(weight // gcd(*whole) for weight in whole)
    return tuple(max(1, round(MAX_BLOCK * weight / sum(exact))) for weight in exact)


def draw(quotas: tuple[int, ...], number: int, key: str) -> tuple[int, int]:
    """Return the source of ticket `number`, and how often that source has been drawn before."""
    block, index = divmod(number, sum(quotas))
    source, earlier = _block(quotas, f"{key}/block/{block}")[index]
    return source, block * quotas[source] + earlier


# Tickets come in order, so that a kind asks for the same block again and again.
@lru_cache(maxsize=16)
def _block(quotas: tuple[int, ...], key: str) -> Sequence[tuple[int, int]]:
    """Return the sources of a block in order, each with the number of its earlier places in the block."""
    sources = [source for source, quota in enumerate(quotas) for _ in range(quota)]
    seen: Counter[int] = Counter()
    order = []
    for index in sorted(range(len(sources)), key=lambda index: _hash(f"{key}/{index}")):
        order.append((sources[index], seen[sources[index]]))
        seen[sources[index]] += 1
    return order


def permuted(index: int, count: int, key: str) -> int:
    """Return where the permutation of `range(count)` given by `key` puts `index`, in constant time and memory.

    It is a Feistel network over the next power of four, applied until the result is in the range (Black and Rogaway,
    "Ciphers with arbitrary finite domains", 2002).
    """
    bits = ((count - 1).bit_length() + 1) // 2
    # Fewer than four turns on average: the next power of four is less than four times `count`.
    while True:
        high, low = divmod(index, 1 << bits)
        for step in range(ROUNDS):
            high, low = low, high ^ (_hash(f"{key}/{step}/{low}") % (1 << bits))
        index = (high << bits) + low
        if index < count:
            return index


def _chance(text: str) -> float:
    """Return a number from 0 up to 1 that is the same for the same text."""
    return _hash(text) / (1 << 64)


def _hash(text: str) -> int:
    # Not `hash`, which Python salts anew in every process: two controllers have to draw the same tasks.
    return xxhash.xxh3_64_intdigest(text.encode())


def sources_of(
    envs: Iterable[EnvSection], *, demonstrations: bool = False, states: bool = False
) -> list[TaskSource]:
    """Return each environment with its tasks, checked: it must be able to play the kinds of tickets that it is given.

    `demonstrations` says whether the run needs any, `states` whether its advantage compares turns within them. Raises
    ConfigError for an environment that has no tasks or that
    cannot do what its kinds demand.
    """
    sources = []
    for env in envs:
        if registry.demonstrations_only(env.id, env.options) and {*env.kinds} != {Kind.DEMO}:
            raise ConfigError(
                f"{env.id} only has demonstrations, and its kinds are {', '.join(env.kinds)}: give it "
                'kinds = ["demo"], and for the other kinds an environment that can be played'
            )
        if (
            demonstrations
            and Kind.DEMO in env.kinds
            and not registry.has_expert(env.id, env.options)
        ):
            raise ConfigError(
                f"{env.id} has no expert that could demonstrate its tasks: give it kinds = "
                '["train", "eval"], or set imitation.steps and rl.demos_per_step to 0'
            )
        if states and Kind.TRAIN in env.kinds and not registry.names_state(env.id, env.options):
            raise ConfigError(
                f"{env.id} does not name its states, which advantage.state_weight compares turns in: set state_weight "
                "to 0, or choose an environment with a method `state` (docs/environments/your-own.md)"
            )
        specs = registry.select(env.id, env.split, env.categories, env.options)
        # Interned: a million tasks share a few categories.
        categories = tuple(intern(spec.category) for spec in specs)
        sources.append(
            TaskSource(
                env.id, tuple(spec.task_id for spec in specs), env.weight, env.kinds, categories
            )
        )
    return sources


def eval_tasks(schedule: RunSchedule) -> tuple[EvalTask, ...]:
    """Return the tasks of every evaluation round; none if evaluations are off. They do not depend on the run's seed."""
    if not schedule.eval.every:
        return ()
    return tuple(
        EvalTask(Task(env_id=env.id, task_id=spec.task_id), spec.category)
        for env in schedule.envs
        if Kind.EVAL in env.kinds
        for spec in spread(_held_out(env, schedule.eval), schedule.eval.tasks)
    )


def _held_out(env: EnvSection, settings: EvalSection) -> list[TaskSpec]:
    specs = [
        spec
        for spec in registry.select(env.id, "all", env.categories, env.options)
        if spec.split == settings.split
    ]
    if not specs:
        scope = f" of the categories {', '.join(env.categories)}" if env.categories else ""
        raise ConfigError(
            f"eval.every is {settings.every} but environment {env.id!r} has no task{scope} of split "
            f"{settings.split!r}: {_cure(settings)}, widen the environment's categories, or set "
            "eval.every to 0"
        )
    return specs


def _cure(settings: EvalSection) -> str:
    if settings.split == "test":
        return "give some of its tasks that split"
    return (
        "give some of its tasks that split, or set eval.split to 'test' and read what a choice on "
        "test costs (docs/evaluation.md)"
    )


def spread(specs: Iterable[TaskSpec], count: int) -> list[TaskSpec]:
    """Return `count` tasks, spread evenly over the categories; within a category, in the order of their ids' hashes."""
    places: Counter[str] = Counter()
    placed: list[tuple[int, str, TaskSpec]] = []
    for spec in sorted(specs, key=lambda spec: (_hash(spec.task_id), spec.task_id)):
        placed.append((places[spec.category], spec.category, spec))
        places[spec.category] += 1
    return [spec for _, _, spec in sorted(placed, key=lambda entry: entry[:2])[:count]]
