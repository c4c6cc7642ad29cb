"""The pages and their tasks. A task is a page with a seed; its id is `PAGE-SEED`, its category the page."""

import importlib.util
import shutil
from functools import cache
from pathlib import Path

from horizonrl.common.errors import ConfigError, MissingDependency
from horizonrl.envs.api import TaskSpec
from horizonrl.envs.splits import lowest_hashes, split_tasks
from horizonrl.envs.worlds.miniwob.expert import STRATEGIES

PACKAGE = "miniwob==1.1.0"
CURE = f"pip install 'horizonrl[browser]' ({PACKAGE} and playwright), and a chromium (Debian: apt install chromium)"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")

PAGES = tuple(STRATEGIES)
"""Pages that can be solved from what the agent reads: no drawing, no dragging, nothing that waits for a clock."""
SEEDS = 25
TEST_SEEDS = 5
"""Test tasks per page."""


@cache
def load_tasks() -> tuple[TaskSpec, ...]:
    """Return every task, page by page."""
    categories: dict[str, str] = {}
    test: set[str] = set()
    for page in PAGES:
        ids = [f"{page}-{seed}" for seed in range(SEEDS)]
        categories |= dict.fromkeys(ids, page)
        test |= lowest_hashes(ids, TEST_SEEDS)
    return split_tasks(categories, test)


def page_path(task_id: str) -> str:
    """Return the page of a task. Raises ConfigError for a task that does not exist."""
    page, _, seed = task_id.rpartition("-")
    if page not in PAGES or seed not in map(str, range(SEEDS)):
        raise ConfigError(
            f"miniwob has no task {task_id!r}: a task is a page and a seed, such as 'click-test-0'"
        )
    return page


def find_chromium() -> str:
    """Return the browser on the PATH. Raises MissingDependency if the browser or playwright is not installed."""
    if importlib.util.find_spec("playwright") is None:
        raise MissingDependency(f"miniwob needs playwright, which is not installed: {CURE}")
    for name in BROWSERS:
        if browser := shutil.which(name):
            return browser
    raise MissingDependency(
        f"miniwob needs a browser, and none of {', '.join(BROWSERS)} is on the path: {CURE}"
    )


def find_pages() -> Path:
    """Return the folder of the installed pages, without importing their package."""
    spec = importlib.util.find_spec("miniwob")
    for location in (spec and spec.submodule_search_locations) or ():
        if (folder := Path(location) / "html" / "miniwob").is_dir():
            return folder
    raise MissingDependency(f"the pages of MiniWoB++ are not installed: {CURE}")
