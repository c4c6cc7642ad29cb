import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from horizonrl.envs.check import TASKS_TRIED, TRIALS, check
from horizonrl.envs.odd_texts import odd_texts

Install = Callable[..., None]

WORLDS = Path(__file__).with_name("worlds.py").read_text()
BREAKS = {
    "tasks are listed in a stable order with unique ids": "ListsATaskTwice",
    "an unknown task is a ConfigError": "AcceptsAnyTask",
    "the expert solves the tasks": "NeverSucceeds",
    "a task is the same episode in every instance": "CountsItsResets",
    "an episode ends once": "PaysTwice",
    "no text raises": "Chokes",
    "a cancelled step leaves it usable": "BreaksWhenCancelled",
    "close is idempotent": "ClosesOnce",
    "observations are bounded": "TalksAtLength",
}


@pytest.mark.parametrize("name", TRIALS)
def test_each_check_finds_what_breaks_it(name: str, install: Install) -> None:
    install("flawed", WORLDS, BREAKS[name])
    report = asyncio.run(check("flawed", {"max_observation_chars": 100}))
    assert not report.passed
    assert name in {found.name for found in report.checks if not found.passed}
    assert all(found.detail for found in report.checks)


def test_an_environment_that_keeps_its_contract_passes(install: Install) -> None:
    install("small", WORLDS)
    report = asyncio.run(check("small"))
    assert [found for found in report.checks if not found.passed] == []
    assert (report.env_id, report.version, report.passed) == ("small", "1", True)


def test_tasks_are_tried_from_all_over_the_list() -> None:
    solved = asyncio.run(check("textcraft")).checks[list(TRIALS).index("the expert solves the tasks")]
    assert solved.detail.startswith(f"{TASKS_TRIED} tasks in ")


def test_named_tasks_are_tried_instead() -> None:
    report = asyncio.run(check("textcraft", task_ids=["chest"]))
    assert report.passed
    assert any(found.detail.startswith("1 tasks in 4.0 turns") for found in report.checks)


def test_the_odd_texts_are_the_same_every_time_and_encodable() -> None:
    assert odd_texts("Action: look") == odd_texts("Action: look")
    assert all(text.encode("utf-8").decode("utf-8") == text for text in odd_texts("Action: look"))
