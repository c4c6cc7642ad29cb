"""Environment `program`, as recipes name it: functions, commands, graders, and what can be wrong with them."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from horizonrl.actors.rollout import programs
from horizonrl.actors.rollout.rollout import Rollout, play
from horizonrl.common.errors import ConfigError
from horizonrl.common.types import Episode, StopReason
from horizonrl.envs import registry
from horizonrl.envs.check import check
from horizonrl.envs.program import env as env_module
from horizonrl.envs.program.template import MODEL_VARIABLES
from tests.actors.gateway.served import CHAT, Remembering, gateway_of, ticket

AGENT = Path(__file__).with_name("agent.py")


@pytest.fixture
def tasks(tmp_path: Path) -> str:
    file = tmp_path / "tasks.jsonl"
    file.write_text(
        '{"id": "one", "question": "1 + 1?", "answer": "ok"}\n\n{"id": "two", "question": "?"}\n'
    )
    return str(file)


def played(options: dict[str, Any], horizon_turns: int = 4) -> Episode:
    async def scenario() -> Episode:
        async with gateway_of(Remembering(lambda read: "ok")) as served:
            rollout = Rollout(served.policy, CHAT, None, 5.0, gateway=served)
            return await play(
                lambda: registry.make("program", options), rollout, ticket(horizon_turns), 0
            )

    return asyncio.run(scenario())


@pytest.mark.parametrize("function", ["solve", "solve_later"])
def test_a_function_plays_its_task_and_another_grades_its_answer(tasks: str, function: str) -> None:
    episode = played({"program": f"{AGENT}:{function}", "tasks": tasks, "grader": f"{AGENT}:grade"})
    assert (episode.stop, episode.episode_return, episode.success) == (
        StopReason.TERMINATED,
        1.0,
        True,
    )
    assert episode.prompt == "1 + 1?"


def test_a_command_plays_its_task_and_a_command_grades_what_it_printed(tasks: str) -> None:
    script = "import json, os; print('so'); print(int(json.load(open(os.environ['ANSWER_FILE'])).endswith('ok\\n')))"
    command = ["python", str(AGENT)]
    episode = played({"program": command, "tasks": tasks, "grader": ["python", "-c", script]})
    assert (episode.stop, episode.episode_return) == (StopReason.TERMINATED, 1.0)
    broken = played(
        {
            "program": command,
            "tasks": tasks,
            "grader": f"{AGENT}:grade",
            "environment": {"CODE": "3"},
        }
    )
    assert (broken.stop, "exit code 3" in (broken.error or "")) == (StopReason.ENV_ERROR, True)


def test_a_program_may_write_its_reward_and_a_grader_may_say_what_success_is(tasks: str) -> None:
    episode = played({"program": f"{AGENT}:writes", "tasks": tasks})
    assert (episode.episode_return, episode.success) == (0.25, False)
    episode = played({"program": f"{AGENT}:solve", "tasks": tasks, "grader": f"{AGENT}:half"})
    assert (episode.episode_return, episode.success) == (0.5, True)


@pytest.mark.parametrize(
    ("options", "stop", "error"),
    [
        ({"program": f"{AGENT}:crash"}, StopReason.ENV_ERROR, "the kitchen is on fire"),
        (
            {"program": f"{AGENT}:unwritable"},
            StopReason.ENV_ERROR,
            "Object of type object is not JSON serializable",
        ),
        ({"program": f"{AGENT}:hang", "timeout_s": 5}, StopReason.ENV_TIMEOUT, "longer than 5 s"),
        ({"program": f"{AGENT}:silent"}, StopReason.ENV_ERROR, "without a call of the model"),
        (
            {"program": f"{AGENT}:solve", "grader": "reward.json"},
            StopReason.ENV_ERROR,
            "no verdict",
        ),
        (
            {"program": f"{AGENT}:solve", "grader": f"{AGENT}:nonsense"},
            StopReason.ENV_ERROR,
            "no verdict: write a number",
        ),
        ({"program": ["no-such-program"]}, StopReason.ENV_ERROR, "exit code 127"),
    ],
)
def test_what_is_not_the_agents_failure_is_broken(
    tasks: str, options: dict[str, Any], stop: StopReason, error: str
) -> None:
    episode = played({"tasks": tasks, "grader": f"{AGENT}:grade"} | options)
    assert (episode.stop, episode.valid) == (stop, False)
    assert error in (episode.error or "")


def test_a_recipe_may_grade_what_took_too_long(tasks: str) -> None:
    options = {
        "program": f"{AGENT}:hang",
        "tasks": tasks,
        "timeout_s": 5,
        "timeout_truncates": True,
    }
    episode = played(options)
    assert (episode.stop, episode.episode_return) == (StopReason.ENV_TRUNCATED, 0.0)


@pytest.mark.parametrize("grader", ["reward.json", f"{AGENT}:grade"])
def test_the_horizon_ends_the_process_and_what_there_is_is_graded(
    tasks: str, grader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "GRACE_S", 0.2)
    episode = played(
        {"program": f"{AGENT}:endless", "tasks": tasks, "grader": grader}, horizon_turns=2
    )
    assert (episode.stop, len(episode.turns), episode.episode_return) == (
        StopReason.HORIZON,
        2,
        0.0,
    )


def test_a_program_knows_its_endpoint_and_its_task_and_nothing_of_ours(
    tasks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HORIZONRL_BROKER__NATS__PASSWORD", "a secret of the broker")
    grader = tmp_path / "grader.py"
    seen = tmp_path / "seen.json"
    grader.write_text(
        "import json, os, pathlib\n"
        "def grade(task, answer):\n"
        f"    pathlib.Path({str(seen)!r}).write_text(json.dumps([answer, dict(os.environ)]))\n"
        "    return True\n"
    )
    episode = played({"program": f"{AGENT}:looks", "tasks": tasks, "grader": f"{grader}:grade"})
    assert episode.episode_return == 1.0
    (environment, place, files, task), graders = json.loads(seen.read_text())
    ours = {"PATH", "HOME", "TMPDIR", "LANG", "TASK_FILE"} | MODEL_VARIABLES
    assert set(environment) - {"LC_CTYPE"} == ours
    assert not MODEL_VARIABLES & set(graders)
    assert graders["PROGRAM_DIRECTORY"] == place
    assert "a secret of the broker" not in seen.read_text()
    assert environment["OPENAI_BASE_URL"].startswith("http://127.0.0.1:")
    assert files == ["output.txt", "task.json"]
    assert task["question"] == "1 + 1?"
    assert not Path(place).exists(), "the scratch directory ends with the episode"


def test_tasks_come_from_a_file_or_a_function_and_name_the_version(tasks: str) -> None:
    listed = registry.tasks("program", {"tasks": f"{AGENT}:listed", "program": ["unused"]})
    found = [(task.task_id, task.split, task.category) for task in listed]
    assert found == [("1", "train", "program"), ("b", "test", "hard")]
    versions = [
        asyncio.run(registry.versioned_id("program", {"program": program, "tasks": source}))
        for program, source in ((["f"], tasks), (["g"], tasks), (["f"], f"{AGENT}:listed"))
    ]
    assert len(set(versions)) == 3
    assert versions[0].startswith("program 1 sha256:")


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ("", "holds no task"),
        ("{", "no file with one JSON object per line"),
        ("[1]", "task 1"),
        ('{"question": "?"}', "task 1: id"),
        ('{"id": "a"}\n{"id": "a"}', "task 2: the id 'a' is taken"),
        ('{"id": "a", "split": "dev"}', "task 1: split"),
    ],
)
def test_a_wrong_file_of_tasks_is_told_with_its_line(
    tmp_path: Path, lines: str, error: str
) -> None:
    file = tmp_path / "wrong.jsonl"
    file.write_text(lines)
    with pytest.raises(ConfigError, match=error):
        registry.tasks("program", {"tasks": str(file)})


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, "which program"),
        ({"program": f"{AGENT}:solve"}, "which tasks"),
        ({"program": f"{AGENT}:solve", "tasks": "gone.jsonl"}, "no tasks at gone.jsonl"),
        ({"program": [], "tasks": "x"}, "program"),
        ({"program": ["x"], "tasks": "agent.py"}, "no tasks at agent.py"),
        ({"program": ["x"], "tasks": "no.such.module:f"}, "no module 'no.such.module'"),
        ({"program": ["x"], "tasks": f"{AGENT}:nothing"}, "no function 'nothing'"),
        ({"program": ["x"], "tasks": ":f"}, "names no function"),
        ({"program": "solve", "tasks": "x"}, "names no function"),
        (
            {"program": f"{AGENT}:solv", "tasks": "x"},
            r"agent.py has no function 'solv'; did you mean solve",
        ),
        ({"program": "agnt.py:solve", "tasks": "x"}, "no file .*agnt.py"),
        ({"program": "horizonrl.nowhere:solve", "tasks": "x"}, "no module 'horizonrl.nowhere'"),
        (
            {"program": "horizonrl.envs.program.env:solve", "tasks": "x"},
            "env.py has no function 'solve'",
        ),
        (
            {"program": f"{AGENT}:grade", "tasks": "x"},
            r"line \d+: grade\(task: .*\) is called with 1 argument: the task",
        ),
        (
            {"program": ["x"], "tasks": "x", "grader": f"{AGENT}:solve"},
            "is called with 2 arguments",
        ),
        ({"program": ["x"], "tasks": f"{AGENT}:for_ever"}, "lists more than 50 tasks: does it end"),
        (
            {"program": ["x"], "tasks": f"{AGENT}:listed", "hidden": ["qestion"]},
            "'qestion'; did you mean question",
        ),
    ],
)
def test_wrong_options_say_what_to_write(
    options: dict[str, Any], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env_module, "MOST_TASKS", 50)
    with pytest.raises(ConfigError, match=error):
        registry.make("program", options)
    if "program" in options and "tasks" in options:
        with pytest.raises(ConfigError, match=error):  # before anything starts
            registry.tasks("program", options)


def test_a_task_that_this_machine_does_not_have_is_told() -> None:
    env_module.load_tasks.cache_clear()
    options = {"program": f"{AGENT}:solve", "tasks": f"{AGENT}:listed"}
    episode = played(options)
    assert "has no task 'one'" in (episode.error or "")


def test_the_version_does_not_depend_on_the_folder(
    tasks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("def play(task): ...\ndef grade(task, answer): ...\n")
    monkeypatch.chdir(tmp_path)
    for program, grader in (
        ("mine.py:play", "mine.py:grade"),
        (["python", "mine.py"], ["mine.py"]),
    ):
        whole = json.loads(json.dumps([program, grader]).replace("mine.py", f"{tmp_path}/mine.py"))
        versions = [
            asyncio.run(
                registry.versioned_id("program", {"program": one, "grader": other, "tasks": tasks})
            )
            for one, other in ((program, grader), whole)
        ]
        assert versions[0] == versions[1]


@pytest.mark.parametrize(
    ("options", "passed", "detail"),
    [
        (
            {"program": f"{AGENT}:solve", "grader": f"{AGENT}:grade"},
            True,
            "reward 0 without an answer",
        ),
        (
            {"program": ["python", "x"], "grader": f"{AGENT}:half"},
            True,
            "reward 0.5 without an answer",
        ),
        ({"program": f"{AGENT}:solve"}, True, "reward 0 without an answer"),
        ({"program": ["no-such-program"]}, False, "there is no command 'no-such-program'"),
        (
            {"program": f"{AGENT}:solve", "grader": f"{AGENT}:nonsense"},
            False,
            "says '\"good\"', which is no verdict",
        ),
        ({"program": "BROKEN:play"}, False, "importing the program ended with exit code 1"),
    ],
)
def test_envs_check_tries_what_needs_no_model(
    tasks: str, tmp_path: Path, options: dict[str, Any], passed: bool, detail: str
) -> None:
    (tmp_path / "broken.py").write_text("import no_such_package\ndef play(task): ...\n")
    if options["program"] == "BROKEN:play":
        options = options | {"program": f"{tmp_path}/broken.py:play"}
    report = asyncio.run(check("program", options | {"tasks": tasks}))
    assert [item.passed for item in report.checks] == [True, passed]
    assert report.checks[0].detail.startswith("2 tasks: 2 train, 0 validation, 0 test; without")
    assert detail in report.checks[1].detail


def test_a_word_of_a_command_may_be_a_long_script(tasks: str) -> None:
    script = f"{sys.executable} {AGENT} {' ' * 5000}"
    assert registry.make(
        "program", {"program": ["bash", "-c", script], "tasks": tasks, "grader": f"{AGENT}:grade"}
    )


def test_a_line_of_tasks_ends_at_a_newline_alone(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"id": "one", "question": "a\u2028b\x85c"}\n{"id": "two"}\n', encoding="utf-8")
    assert [task.task_id for task in registry.tasks("program", {"tasks": str(file)})] == [
        "one",
        "two",
    ]
