"""The environment contract, checked against every environment that this process can play.

`served` and `openenv` need a server, so they are checked against one that plays parity. The `agentgym-*` clients do not
know whether a task can be solved: `tests/envs/serving/test_agentgym_clients.py` checks one of them against a server of
ours, and `tests/envs/agentgym` all of them against a stub of AgentGym's.
"""

import asyncio
import re
import shutil
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from horizonrl.common.errors import MissingDependency
from horizonrl.envs import registry
from horizonrl.envs.check import TRIALS, CheckReport, check
from horizonrl.envs.worlds.deepsearch.library import load_questions
from horizonrl.envs.worlds.miniwob.pages import BROWSERS
from horizonrl.envs.worlds.shop.env import Shop
from tests.envs.hubs.guess import GUESS
from tests.envs.serving.servers import server_of

ENVS = Path(__file__).parents[2] / "envs"
REMOTE = ("served", "openenv")
NATIVE = [
    name
    for name in registry.names()
    if name not in REMOTE and not name.startswith("agentgym-") and not registry.drives_itself(name)
]
SHELF = Path(__file__).parents[1] / "envs" / "mcp"
OPTIONS: dict[str, dict[str, Any]] = {
    "delayed": {"env": "parity", "seconds": 0.001, "sigma": 1.0},
    "gymnasium": {"id": GUESS},
    "transcripts": {"path": Path(__file__).with_name("transcripts.jsonl")},
    "mcp": {
        "path": SHELF / "tasks.jsonl",
        "grader": "tests.envs.mcp.graders:same",
        "command": [sys.executable, str(SHELF / "server.py")],
        "show": ["put", "look"],
    },
}
TASKS = {
    "mcp": ("sum",),
    "miniwob": ("click-test-0", "enter-text-1"),
    "sciworld": ("2321", "3470"),
    "textworld": ("coin_collector-0", "cooking-1", "custom-1"),
}
"""Tasks of environments in which an episode takes up to a second; `check` would try 20 of them."""
PROGRAMS = {"miniwob": BROWSERS, "sciworld": ("java",)}
"""Programs that `make setup` cannot install: without them the environment is skipped.

A missing Python package fails instead, because `make setup` installs every one of them.
"""
LARGE = {"textworld": "textworld"}
"""Packages that `make setup` leaves out for their size. `docs/environments/hubs.md` says when they were last tried."""


def report_on(env_id: str) -> CheckReport:
    try:
        return asyncio.run(check(env_id, OPTIONS.get(env_id), TASKS.get(env_id)))
    except MissingDependency as missing:
        if find_spec(LARGE.get(env_id, "sys")) is None:
            pytest.skip(str(missing))
        if env_id in PROGRAMS and not any(map(shutil.which, PROGRAMS[env_id])):
            pytest.skip(str(missing))
        raise


@pytest.mark.parametrize("env_id", NATIVE)
def test_an_environment_keeps_its_contract(env_id: str) -> None:
    checks = report_on(env_id).checks
    assert {each.name for each in checks} >= set(TRIALS)
    assert [each for each in checks if not each.passed] == []


@pytest.mark.parametrize(
    "env_id",
    [
        "deepsearch",
        "household",
        "maze",
        "movie",
        "shop",
        "sql",
        "textarena",
        "textcraft",
        "todo",
        "weather",
        "wordle",
    ],
)
def test_an_environment_that_offers_tools_keeps_it_too(env_id: str) -> None:
    task_ids = [task.task_id for task in registry.tasks(env_id)[:200:50]]
    report = asyncio.run(check(env_id, {"format": "native"}, task_ids))
    assert [found for found in report.checks if not found.passed] == []
    skipped = [item.name for item in report.checks if item.skipped]
    assert "its tools are described" not in skipped


SPOKEN: dict[str, tuple[str, ...]] = {
    "academia": ("academia-000", "academia-001"),
    "babyai": ("1806",),
    "deepsearch": ("2wiki-003", "musique-003"),
    "household": tuple(f"household-{number:04d}" for number in range(6)),
    "maze": ("maze-001",),
    "movie": ("movie-000", "movie-001"),
    "sheet": ("sheet-000", "sheet-001"),
    "shop": ("shop-0001", "shop-0002"),
    "sql": ("cinema-0000", "clinic-0001", "school-0002"),
    "textcraft": ("oak_fence",),
    "todo": ("todo-000", "todo-001"),
    "weather": ("weather-000", "weather-001"),
    "webnav": ("write-review-0",),
    "wordle": ("wordle-007",),
}
"""Environments that are played in words, with tasks of every kind of action."""


@pytest.mark.parametrize("action_format", ["react", "plain", "function", "code"])
@pytest.mark.parametrize("env_id", SPOKEN)
async def test_an_environment_keeps_it_in_every_format(env_id: str, action_format: str) -> None:
    options = {"format": action_format, "style": "compact"}
    report = await check(env_id, options, SPOKEN[env_id])
    assert [found for found in report.checks if not found.passed] == []


OF_A_USER = ("mcp", "program", "transcripts")
"""Whoever writes their tasks divides them."""
WITHOUT_TRAIN = ("agentgym-academia", "agentgym-sheet")
"""AgentGym has test tasks alone."""
SHOP = Shop(style="compact")
GOALS: dict[str, Callable[[str], object]] = {
    "babyai": lambda task_id: int(task_id) // 40,
    "deepsearch": lambda task_id: load_questions().by_id[task_id].text.lower().rstrip("?"),
    "shop": lambda task_id: " ".join(sorted(SHOP.begin(task_id)[0].replace(",", "").split())),
}
"""What a task asks for, where several ask for the same; else its id says it."""


@pytest.mark.parametrize("env_id", [name for name in registry.names() if name not in OF_A_USER])
def test_no_goal_is_in_two_splits_and_each_split_has_tasks(env_id: str) -> None:
    try:
        tasks = registry.tasks(env_id, OPTIONS.get(env_id))
    except MissingDependency as missing:
        pytest.skip(str(missing))
    split_by_goal: dict[object, str] = {}
    goal = GOALS.get(env_id, str)
    for task in tasks:
        assert split_by_goal.setdefault(goal(task.task_id), task.split) == task.split, task
    assert {task.split for task in tasks} == (
        {"test"} if env_id in WITHOUT_TRAIN else {"train", "validation", "test"}
    )


def test_every_environment_of_the_package_is_registered() -> None:
    declared = re.compile(r'^    env_id\b.* = "([\w-]+)"', re.MULTILINE)
    named = {
        name
        for file in ENVS.rglob("*.py")
        for name in declared.findall(file.read_text(encoding="utf-8"))
    }
    assert len(named) >= 18
    assert named <= set(registry.names()), "a class without an entry point is never checked"


def test_an_environment_is_registered_under_its_own_id() -> None:
    for env_id in registry.names():
        assert registry.load(env_id).env_id == env_id
        assert registry.load(env_id).version


def test_a_served_environment_keeps_the_contract_too() -> None:
    async def scenario() -> CheckReport:
        async with server_of({"parity": {}}) as url:
            return await check("served", {"env": "parity", "url": f"{url}/parity"})

    report = asyncio.run(scenario())
    assert [found for found in report.checks if not found.passed] == []


def test_an_environment_behind_openenvs_protocol_keeps_the_contract_too() -> None:
    async def scenario() -> CheckReport:
        async with server_of({"parity": {}}) as url:
            return await check("openenv", {"url": f"{url}/parity", "action": "action", "tasks": 64})

    report = asyncio.run(scenario())
    assert [found for found in report.checks if not found.passed] == []
