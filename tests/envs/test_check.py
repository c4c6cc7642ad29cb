import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import ConfigError, EnvironmentFailure
from horizonrl.envs import check as check_module
from horizonrl.envs import registry
from horizonrl.envs.api import make_expert
from horizonrl.envs.check import TASKS_TRIED, TRIALS, Check, check
from horizonrl.envs.odd_texts import odd_texts
from horizonrl.learner.controller.curriculum import sources_of

Install = Callable[..., None]

WORLDS = Path(__file__).with_name("worlds.py").read_text()
BREAKS = {
    "its id is that of its entry point": "HasAnotherId",
    "tasks are listed in a stable order with unique ids": "ListsATaskTwice",
    "an unknown task is a ConfigError": "AcceptsAnyTask",
    "the expert solves the tasks": "NeverSucceeds",
    "a task is the same episode in every instance": "CountsItsResets",
    "an episode ends once": "PaysTwice",
    "its tools are described": "DescribesNoTool",
    "no text raises": "Chokes",
    "a cancelled step leaves it usable": "BreaksWhenCancelled",
    "close is idempotent": "ClosesOnce",
    "observations are bounded": "TalksAtLength",
    "steps have Python's own types": "AnswersNumpys",
}


@pytest.mark.parametrize("name", TRIALS)
def test_each_check_finds_what_breaks_it(name: str, install: Install) -> None:
    install("small", WORLDS, BREAKS[name])
    report = asyncio.run(check("small", {"max_observation_chars": 100}))
    assert not report.passed
    assert name in {found.name for found in report.checks if not found.passed}
    assert all(found.detail for found in report.checks)


@pytest.mark.parametrize(
    ("name", "check_name", "function", "call"),
    [
        ("Chokes", "no text raises", "Chokes.step", "step("),
        ("PaysTwice", "an episode ends once", "PaysTwice.step", "step('look')"),
        (
            "AcceptsAnyTask",
            "an unknown task is a ConfigError",
            "AcceptsAnyTask.reset",
            "reset('no such task ☃')",
        ),
        ("TalksAtLength", "observations are bounded", "TalksAtLength.step", "after step("),
        (
            "AnswersNumpys",
            "steps have Python's own types",
            "AnswersNumpys.step",
            "reward is a numpy.float32, after",
        ),
        ("UnguidedChokes", "no text raises", "UnguidedChokes.step", "step('\\x00')"),
    ],
)
def test_a_failed_check_names_the_line_and_the_text(
    install: Install, name: str, check_name: str, function: str, call: str
) -> None:
    install("flawed", WORLDS, name)
    report = asyncio.run(check("flawed", {"max_observation_chars": 100}))
    found = next(found for found in report.checks if found.name == check_name)
    place = re.fullmatch(r"(\S+):(\d+), (\S+)", found.source)
    assert place is not None, found.source
    assert function.endswith(place[3])
    source = Path(place[1]).read_text()
    assert source == WORLDS
    own = source.splitlines()[: int(place[2])]
    assert next(line for line in reversed(own) if line.startswith("class")).startswith(
        f"class {name}("
    )
    assert call in f"{found.detail} after {found.last_call}"


def failed(name: str, install: Install) -> dict[str, Check]:
    install("small", WORLDS, name)
    return {found.name: found for found in asyncio.run(check("small")).checks if not found.passed}


def test_an_id_that_is_not_the_entry_points_is_named_with_its_class(install: Install) -> None:
    [found] = failed("HasAnotherId", install).values()
    assert found.detail == "HasAnotherId.env_id is 'another', and its entry point is 'small'"
    assert re.fullmatch(r"\S+\.py:\d+, HasAnotherId", found.source)


@pytest.mark.parametrize(("name", "reward"), [("PaysNaN", "nan"), ("PaysInfinity", "inf")])
def test_a_reward_that_is_not_finite_is_called_so(name: str, reward: str, install: Install) -> None:
    found = failed(name, install)
    assert {*found} >= {
        "the expert solves the tasks",
        "a task is the same episode in every instance",
    }
    assert {each.detail for each in found.values()} == {
        f"{name}.step gave the reward {reward}; by contract it is a finite number"
    }


def test_an_environment_that_exits_fails_checks_and_ends_none(install: Install) -> None:
    found = failed("Exits", install)
    assert len(found) >= 4
    for each in found.values():
        assert each.detail == "RuntimeError: SystemExit(3) would end the actor"
        assert each.source.endswith(", step")


@pytest.mark.parametrize(
    ("name", "said", "method"),
    [
        (
            "AnswersATuple",
            "AnswersATuple.step returned a tuple; by contract it is a Step(observation, reward, terminated)",
            "step",
        ),
        (
            "StepsWithoutAsync",
            "StepsWithoutAsync.step is no `async def`: it returned a horizonrl.envs.api.Step, which cannot be awaited",
            "step",
        ),
        (
            "BeginsWithAText",
            "BeginsWithAText.reset returned a str; by contract it is an Observation(text)",
            "reset",
        ),
    ],
)
def test_a_beginners_mistake_is_named_once_with_its_line(
    name: str, said: str, method: str, install: Install
) -> None:
    found = failed(name, install)
    assert {each.detail for each in found.values()} == {said}
    assert all(each.source.endswith(f", {name}.{method}") for each in found.values())


def test_an_environment_without_tasks_is_told_so_and_no_more(install: Install) -> None:
    found = failed("HasNoTasks", install)
    assert {name: each.detail for name, each in found.items()} == {
        "tasks are listed in a stable order with unique ids": "0 tasks with 0 different ids; repeated: none",
        "the other checks": "not tried: mend this first",
    }


def test_a_task_in_two_splits_is_refused_with_both(install: Install) -> None:
    found = failed("ListsATaskInTwoSplits", install)
    detail = found["tasks are listed in a stable order with unique ids"].detail
    assert detail == "3 tasks with 2 different ids; repeated: 'a' (train, test)"


def test_an_environment_without_validation_passes_and_is_told_what_follows(
    install: Install,
) -> None:
    install("small", WORLDS, "World")
    listed = asyncio.run(check("small")).checks[1]
    assert listed.passed
    assert listed.detail == (
        "2 tasks: 2 train, 0 validation, 0 test; without validation, eval.split has to be test"
    )


def test_an_environment_that_hangs_is_waited_for_once_and_its_line_named(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_module, "CHECK_S", 0.2)
    found = failed("Hangs", install)
    assert [*found] == ["the expert solves the tasks", "the other checks"]
    hung = found["the expert solves the tasks"]
    assert hung.detail == "took longer than 0 s" and hung.source.endswith(", step")


def test_an_environment_that_blocks_ends_the_check_with_its_line(
    install: Install, tmp_path: Path
) -> None:
    install("blocks", WORLDS, "Blocks")
    source = (
        "import asyncio\n"
        "from horizonrl.envs import check\n"
        "check.CHECK_S = check.BLOCKED_S = 0.5\n"
        "asyncio.run(check.check('blocks'))\n"
    )
    paths = os.pathsep.join(map(str, filter(None, sys.path)))
    ended = subprocess.run(
        [sys.executable, "-c", source],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
        check=False,
    )
    assert ended.returncode == os.EX_SOFTWARE
    assert "blocks blocks the event loop" in ended.stderr
    assert "in step\n    time.sleep(60)" in ended.stderr


def test_an_expert_is_optional(install: Install) -> None:
    install("unguided", WORLDS, "Unguided")
    report = asyncio.run(check("unguided"))
    assert [found for found in report.checks if not found.passed] == []
    details = {found.name: found.detail for found in report.checks}
    assert details["the expert solves the tasks"].startswith("without an expert")
    assert {item.name for item in report.checks if item.skipped} == {
        "the expert solves the tasks",
        "its tools are described",
    }
    assert details["an episode ends once"] == (
        "a step before reset is refused; no episode ended here, so a step after the end was not tried"
    )


@pytest.mark.parametrize(
    ("name", "check_name"),
    [
        ("UnguidedForgets", "a task is the same episode in every instance"),
        ("UnguidedChokes", "no text raises"),
    ],
)
def test_what_breaks_an_environment_without_an_expert_is_found(
    install: Install, name: str, check_name: str
) -> None:
    install("flawed", WORLDS, name)
    assert check_name in {
        found.name for found in asyncio.run(check("flawed")).checks if not found.passed
    }


def test_a_run_that_wants_demonstrations_of_an_environment_without_an_expert_is_refused(
    install: Install,
) -> None:
    install("unguided", WORLDS, "Unguided")
    envs = RunConfig.load([], ["--envs", '[{"id": "unguided"}]']).envs
    with pytest.raises(
        ConfigError,
        match=r"unguided has no expert .* set imitation\.steps and rl\.demos_per_step to 0",
    ):
        sources_of(envs, demonstrations=True)
    assert sources_of(envs, demonstrations=False)
    with pytest.raises(EnvironmentFailure, match="unguided has no expert"):
        make_expert(registry.make("unguided"))


def test_an_environment_that_keeps_its_contract_passes(install: Install) -> None:
    install("small", WORLDS)
    report = asyncio.run(check("small"))
    assert [found for found in report.checks if not found.passed] == []
    assert (report.env_id, report.version, report.passed) == ("small", "1", True)


def test_an_environment_that_offers_tools_passes(install: Install) -> None:
    install("small", WORLDS, "OffersATool")
    report = asyncio.run(check("small"))
    assert [found for found in report.checks if not found.passed] == []
    assert "1 tools" in [found.detail for found in report.checks]


def test_tasks_are_tried_from_all_over_the_list() -> None:
    solved = asyncio.run(check("textcraft")).checks[
        list(TRIALS).index("the expert solves the tasks")
    ]
    assert solved.detail.startswith(f"{TASKS_TRIED} tasks in ")


def test_named_tasks_are_tried_instead() -> None:
    report = asyncio.run(check("textcraft", task_ids=["chest"]))
    assert report.passed
    assert any(found.detail.startswith("1 tasks in 4.0 turns") for found in report.checks)


def test_the_odd_texts_are_the_same_every_time_and_encodable() -> None:
    assert odd_texts("Action: look") == odd_texts("Action: look")
    assert all(text.encode("utf-8").decode("utf-8") == text for text in odd_texts("Action: look"))
