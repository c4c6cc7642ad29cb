"""The task list, and the world and the task of an id: drawn from the id alone, the same on every machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from horizonrl.common.errors import ConfigError, EnvironmentFailure
from horizonrl.envs.api import TaskSpec
from horizonrl.envs.game import random_for
from horizonrl.envs.splits import lowest_hashes, split_tasks
from horizonrl.envs.worlds.webnav.page import Style
from horizonrl.envs.worlds.webnav.task import Task
from horizonrl.envs.worlds.webnav.templates.table import TEMPLATES, Template
from horizonrl.envs.worlds.webnav.world import SIZES, World, build_world

TASKS = {"Shopping": 100, "CMS": 96, "Maps": 66, "GitlabReddit": 135, "MultiSite": 25}
TEST_TASKS = {"Shopping": 12, "CMS": 12, "Maps": 8, "GitlabReddit": 15, "MultiSite": 3}
"""Of them, by category: the sums are AgentGym's, the mix is about WebArena's."""
MAX_WORLDS = 100
"""The most worlds drawn for a task. Few worlds have a pending order to cancel; in the list it takes 7 at most."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A task, its world, and that world as it should be after the task."""

    task: Task
    start: str
    """The address of the first page."""
    world: World
    wanted: World


@cache
def load_tasks() -> tuple[TaskSpec, ...]:
    """Return every task, category by category."""
    categories: dict[str, str] = {}
    test: set[str] = set()
    for category, count in TASKS.items():
        names = [
            _spoken(template)
            for templates in TEMPLATES[category].values()
            for template in templates
        ]
        ids = [f"{names[n % len(names)]}-{n // len(names)}" for n in range(count)]
        categories |= dict.fromkeys(ids, category)
        test |= lowest_hashes(ids, TEST_TASKS[category])
    return split_tasks(categories, test)


@cache
def _templates() -> Mapping[str, tuple[str, Template]]:
    """Return the site and the template of every task."""
    sites = [
        (site, template)
        for by_site in TEMPLATES.values()
        for site, templates in by_site.items()
        for template in templates
    ]
    named = {_spoken(template): (site, template) for site, template in sites}
    return {task.task_id: named[task.task_id.rpartition("-")[0]] for task in load_tasks()}


def draw_task(task_id: str, style: Style) -> Drawn:
    """Return the task of an id. Raises ConfigError for a task that does not exist.

    Where a world has no task of the kind, or nothing is left to do in it, the next world is drawn.
    """
    if task_id not in _templates():
        raise ConfigError(
            f"webnav has no task {task_id!r}: a task is one of its list, such as 'add-to-cart-0'"
        )
    site, template = _templates()[task_id]
    for attempt in range(MAX_WORLDS):
        seed = f"{task_id}/{attempt}"
        world, wanted = (build_world(seed, SIZES[style]) for _ in range(2))
        task = template(world, random_for(f"{seed}/task"))
        if task is None:
            continue
        if task.effect is not None:
            task.effect(wanted)
        # A task that is done before it begins would reward an agent that only stops.
        if task.effect is None or wanted != world:
            return Drawn(task, f"http://{site}/", world, wanted)
    raise EnvironmentFailure(f"none of {MAX_WORLDS} worlds has the task {task_id!r}")


def _spoken(template: Template) -> str:
    return template.__name__.replace("_", "-")
