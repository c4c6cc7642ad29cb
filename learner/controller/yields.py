"""What tasks and their categories yield: how many groups had different returns, and so an advantage to train.

A group whose episodes all earn the same is dropped (`zero_variance`), and the environment steps that it took are lost.
An adaptive curriculum draws more from the categories that yield (`curriculum.py`). As with adaptive horizons, the
learner folds what it consumed, step by step, and its checkpoint and its progress hold the result: a resumed learner
reads the same log and comes to the same yields, and the controller may miss any number of steps.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from horizonrl.common.errors import ConfigError
from horizonrl.common.state import (
    MAX_CATEGORIES,
    MAX_CATEGORY,
    MAX_REPEATED,
    CategoryYield,
    RepeatedTasks,
    Yield,
)
from horizonrl.common.types import Group, Kind
from horizonrl.learner.controller.curriculum import TaskSource

FADE = 0.95
"""What a group still weighs after the next one of its category: about the last 20 are what counts."""
COMPARED = 2
"""Fewest valid episodes of a group that can differ."""


class Yields:
    """The yields of a run's categories; empty for a uniform curriculum, which needs none."""

    def __init__(self, sources: Sequence[TaskSource] = ()) -> None:
        """Begin with nothing seen. Raises ConfigError as `followed_categories`."""
        self._category = {
            (source.env_id, task_id): category
            for source in sources
            if Kind.TRAIN in source.kinds
            for task_id, category in zip(source.task_ids, source.categories, strict=True)
        }
        names = followed_categories(sources)
        self._yields = {name: CategoryYield(env_id=name[0], category=name[1]) for name in names}
        self._repeats = {env_id: RepeatedTasks(env_id=env_id) for env_id, _ in names}

    def observe(self, groups: Sequence[Group], differs: Callable[[Group], bool]) -> None:
        """Add the train groups that a step consumed, in the order of the log; broken episodes say nothing."""
        for group in groups:
            task = group.ticket.task
            category = self._category.get((task.env_id, task.task_id))
            if (
                group.ticket.kind is not Kind.TRAIN
                or category is None
                or len(group.valid_episodes) < COMPARED
            ):
                continue
            varied, repeated = differs(group), self._repeats[task.env_id]
            if group.ticket.repeated:
                # Says nothing of its category: it was chosen because it teaches. The ticket says so, and not the list,
                # which other groups of the same task may have left meanwhile.
                repeated = repeated.model_copy(update=_fold(repeated, varied))
            else:
                before = self._yields[task.env_id, category]
                self._yields[task.env_id, category] = before.model_copy(
                    update=_fold(before, varied)
                )
            others = tuple(task_id for task_id in repeated.task_ids if task_id != task.task_id)
            kept = (*others, task.task_id)[-MAX_REPEATED:] if varied else others
            self._repeats[task.env_id] = repeated.model_copy(update={"task_ids": kept})

    def all(self) -> tuple[CategoryYield, ...]:
        return tuple(self._yields.values())

    def repeats(self) -> tuple[RepeatedTasks, ...]:
        return tuple(self._repeats.values())

    def restore(
        self, yields: Iterable[Mapping[str, Any]], repeats: Iterable[Mapping[str, Any]] = ()
    ) -> None:
        """Take over what a checkpoint holds; a category or task that the run no longer has is left out."""
        for entry in map(CategoryYield.model_validate, yields):
            if (entry.env_id, entry.category) in self._yields:
                self._yields[entry.env_id, entry.category] = entry
        for repeated in map(RepeatedTasks.model_validate, repeats):
            if repeated.env_id in self._repeats:
                task_ids = tuple(
                    task_id
                    for task_id in repeated.task_ids
                    if (repeated.env_id, task_id) in self._category
                )
                self._repeats[repeated.env_id] = repeated.model_copy(update={"task_ids": task_ids})


def followed_categories(sources: Iterable[TaskSource]) -> list[tuple[str, str]]:
    """Return the environment and name of each category of train tasks.

    Raises ConfigError for more of them, or longer names, than a progress record holds.
    """
    names = sorted(
        {
            (source.env_id, name)
            for source in sources
            if Kind.TRAIN in source.kinds
            for name in source.categories
        }
    )
    if len(names) > MAX_CATEGORIES:
        raise ConfigError(
            f"curriculum.kind is adaptive, but the environments have {len(names)} categories of tasks: it follows "
            f"at most {MAX_CATEGORIES}; choose some with envs.categories, or set kind to uniform"
        )
    longest = max((category for _, category in names), key=len, default="")
    if len(longest) > MAX_CATEGORY:
        raise ConfigError(
            f"curriculum.kind is adaptive, but the category {longest[:40]!r}... has {len(longest)} characters: it "
            f"follows names of at most {MAX_CATEGORY}; shorten it in the environment, or set kind to uniform"
        )
    return names


def _fold(before: Yield, varied: bool) -> dict[str, float]:
    return {"varied": FADE * before.varied + varied, "seen": FADE * before.seen + 1.0}
