"""The environment's contract, against every environment that is registered."""

import asyncio
import shutil
from functools import cache
from pathlib import Path

import pytest

from horizonrl.common.errors import MissingDependency
from horizonrl.envs import registry
from horizonrl.envs.check import TRIALS, CheckReport, check

HERE = [name for name in registry.names() if name != "served" and not name.startswith("agentgym-")]
"""What a server plays has a contract of its own: tests/envs/agentgym."""
OPTIONS = {"transcripts": {"path": Path(__file__).with_name("transcripts.jsonl")}}


TASKS = {"miniwob": ("click-test-0", "enter-text-1", "choose-list-2", "click-tab-3")}
"""Where an episode costs a second, not the twenty tasks that `check` would take."""
OPTIONAL = {"miniwob": "chromium"}
"""What an environment needs that no package index has."""


@cache
def report_on(env_id: str) -> CheckReport:
    try:
        return asyncio.run(check(env_id, OPTIONS.get(env_id), TASKS.get(env_id)))
    except MissingDependency as missing:
        if env_id in OPTIONAL and shutil.which(OPTIONAL[env_id]) is None:
            pytest.skip(str(missing))
        raise


@pytest.mark.parametrize("name", TRIALS)
@pytest.mark.parametrize("env_id", HERE)
def test_an_environment_keeps_its_contract(env_id: str, name: str) -> None:
    found = next(found for found in report_on(env_id).checks if found.name == name)
    assert found.passed, found.detail


@pytest.mark.parametrize("env_id", registry.names())
def test_an_environment_is_registered_under_its_own_id(env_id: str) -> None:
    assert registry.load(env_id).env_id == env_id
    assert registry.load(env_id).version
