import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console

from horizonrl.actors.engines.scripted import ScriptedPolicy
from horizonrl.actors.rollout.rollout import Rollout
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import ConfigError, EngineDead, RunFailed
from horizonrl.common.run_dir import TESTS
from horizonrl.common.statistics import pass_at_k, wilson
from horizonrl.common.types import StopReason
from horizonrl.ops.cli.main import main
from horizonrl.ops.evaluation.journal import FILE, EvaluationJournal, Line, TurnRecord
from horizonrl.ops.evaluation.plan import ALL, TABLE, Choice, make_plan
from horizonrl.ops.evaluation.report import blocks_of, cells, header
from horizonrl.ops.evaluation.run import BROKEN_LIMIT, STOPPED, carry_out, play_missing, settings_of
from horizonrl.ops.evaluation.subjects import (
    MakeRollout,
    OptionsById,
    RunVersion,
    Subject,
    SubjectRequest,
    ticket_subject,
)
from horizonrl.ops.rundir.directory import write_config
from horizonrl.ops.rundir.files import Files
from horizonrl.ops.rundir.lines import read_lines
from horizonrl.ops.rundir.view import RunView
from tests.actors.players import make_chat
from tests.completions import Completions, refusal, serving
from tests.engine import Played

CONFIG = RunConfig.load()
TERMINAL = Console(stderr=True)
PARITY = Choice(env_ids=("parity",))
TASKS = 16
"""Of parity's test split."""


@pytest.fixture
def server() -> Iterator[Completions]:
    with serving(Completions()) as completions:
        yield completions


def evaluate(
    server: Completions, out: Path, choice: Choice = PARITY, *overrides: str
) -> dict[str, Any]:
    """Evaluate the server's model; return the results."""
    out.mkdir(exist_ok=True)
    asked = SubjectRequest(None, server.url, "big", overrides=("--actor.slots=8", *overrides))
    with ticket_subject(asked) as subject:
        plan = make_plan(subject.config, choice, own_envs=False)
        assert carry_out(subject, plan, settings_of(subject, plan), out, TERMINAL) == 0
    results: dict[str, Any] = json.loads((out / "results.json").read_text())
    return results


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / FILE).read_text().splitlines()[1:]]


# The plan


def test_the_table_has_the_papers_27_tasks_and_each_is_played_on_tasks_that_exist() -> None:
    plan = make_plan(CONFIG, Choice(table=True), own_envs=False)
    assert [part.env.id for part in plan.parts] == [
        "webnav",
        "deepsearch",
        "textcraft",
        "babyai",
        "sciworld",
    ]
    assert [len(part.rows) - 1 for part in plan.parts] == [4, 7, 4, 6, 5]
    assert sum(len(scenario.rows) for scenario in TABLE) + 1 == 27
    assert [len(part.tasks) for part in plan.parts] == [50, 400, 100, 90, 200]
    for part in plan.parts:
        found = Counter(each.category for each in part.tasks)
        assert all(
            found[category] for label, category in part.rows.items() if category and label != ALL
        )
    assert [part.turns for part in plan.parts] == [(15,), (10,), (30,), (20,), (30,)]


def test_tasks_are_those_of_each_category_whatever_else_is_asked_for() -> None:
    choice = Choice(table=True, env_ids=("babyai", "textcraft"), tasks=3)
    plan = make_plan(CONFIG, choice, own_envs=False)
    assert [len(part.tasks) for part in plan.parts] == [4 * 3, 6 * 3]
    fewer = make_plan(
        CONFIG, Choice(env_ids=("textcraft",), categories=("depth2",), tasks=2), own_envs=False
    )
    assert set(fewer.parts[0].tasks) < set(plan.parts[0].tasks)
    assert fewer.parts[0].rows == {"depth2": "depth2"}


def test_an_episodes_seed_is_its_own_and_does_not_depend_on_what_else_is_played() -> None:
    many = make_plan(
        CONFIG, Choice(env_ids=("parity", "textcraft"), samples=(1, 4)), own_envs=False
    )
    seeds = {each.key: each.ticket.sampling.seed for each in many.plays}
    assert len(set(seeds.values())) == len(seeds) == (TASKS + 100) * 4
    few = make_plan(CONFIG, Choice(env_ids=("parity",), tasks=5), own_envs=False)
    assert all(each.ticket.sampling.seed == seeds[each.key] for each in few.plays)
    other = make_plan(RunConfig.load([], ["--run.seed=1"]), PARITY, own_envs=False)
    assert all(each.ticket.sampling.seed != seeds[each.key] for each in other.plays)


def test_a_runs_own_environments_are_evaluated_as_they_are_trained() -> None:
    envs = [
        {
            "id": "textcraft",
            "categories": ["depth1"],
            "options": {"style": "compact"},
            "horizons": [3, 7],
        },
        {"id": "parity", "kinds": ["demo", "train"]},
    ]
    config = RunConfig.load([], ["--envs", json.dumps(envs)])
    (part,) = make_plan(config, Choice(options={"format": "plain"}), own_envs=True).parts
    assert part.env.options == {"style": "compact", "format": "plain"}
    assert (part.turns, {each.category for each in part.tasks}) == ((7,), {"depth1"})


# The lines


def line(stop: StopReason, turns: int, success: bool = False) -> Line:
    sentences = tuple(
        TurnRecord(text="a", observation="b", reward=0.5, tokens=3) for _ in range(turns)
    )
    shown: dict[str, Any] = {"env": "e", "task": "t", "category": "c", "sample": 0, "prompt": "p"}
    return Line(
        **shown,
        stop=stop,
        success=success,
        error=None,
        generate_s=0.0,
        environment_s=0.0,
        turns=sentences,
    )


def test_an_episode_under_fewer_turns_is_the_begin_of_one_under_more() -> None:
    won = line(StopReason.TERMINATED, 4, success=True)
    whole, cut = won.within(4), won.within(3)
    assert whole is not None and (whole.success, whole.turns, whole.truncated, whole.tokens) == (
        True,
        4,
        False,
        12,
    )
    assert cut is not None and (cut.success, cut.turns, cut.truncated, cut.tokens) == (
        False,
        3,
        True,
        9,
    )
    assert (whole.episode_return, cut.episode_return) == (2.0, 1.5)


def test_an_episode_that_broke_is_valid_under_as_many_turns_as_it_took() -> None:
    broken = line(StopReason.POLICY_ERROR, 3)
    assert broken.within(4) is None
    cut = broken.within(3)
    assert cut is not None and (cut.truncated, cut.turns) == (True, 3)


# From the model to the table


def test_every_task_is_played_and_the_table_says_how_well(
    server: Completions, tmp_path: Path
) -> None:
    results = evaluate(server, tmp_path)
    assert len(server.bodies) == TASKS * 4
    (block,) = results["blocks"]
    (row,) = block["rows"]
    assert (row["scenario"], row["task"], row["tasks"], row["episodes"], row["success_rate"]) == (
        *("parity", "all", TASKS, TASKS),
        1.0,
    )
    assert (row["low"], row["high"]) == wilson(TASKS, TASKS)
    assert (row["turns_mean"], row["tokens_mean"], row["broken_share"]) == (4.0, 4 * 3, 0.0)
    assert (results["model"], results["settings"]["seed"]) == ("big", 0)
    table = (tmp_path / "table.md").read_text()
    assert "| parity | all | 16 | 100 % (81-100 %) | 2.00 | 4.0 | 12 | 0 % |" in table


def test_a_finished_evaluation_plays_nothing_again_and_more_samples_go_on(
    server: Completions, tmp_path: Path
) -> None:
    evaluate(server, tmp_path)
    evaluate(server, tmp_path)
    assert len(server.bodies) == TASKS * 4
    results = evaluate(server, tmp_path, Choice(env_ids=("parity",), samples=(1, 2, 4)))
    assert len(server.bodies) == TASKS * 4 * 4
    keys = [(each["task"], each["sample"]) for each in lines_of(tmp_path)]
    assert len(keys) == len(set(keys)) == TASKS * 4
    row = results["blocks"][0]["rows"][0]
    assert header((1, 2, 4))[4:7] == ["pass@1", "pass@2", "pass@4"]
    assert cells(row, (1, 2, 4))[4:7] == ["100 %"] * 3


def test_a_file_of_other_settings_is_refused_by_what_differs(
    server: Completions, tmp_path: Path
) -> None:
    evaluate(server, tmp_path)
    asked = len(server.bodies)
    for overrides, message in {
        ("--run.seed=3",): "seed was 0 and is 3",
        ("--eval.temperature=0.5",): "temperature was 1.0 and is 0.5",
        ("--rollout.max_turn_tokens=9",): "max_turn_tokens was 512 and is 9",
    }.items():
        with pytest.raises(ConfigError, match=message):
            evaluate(server, tmp_path, PARITY, *overrides)
    with pytest.raises(ConfigError, match=r"environments\.parity\.turns was 30 and is 7"):
        evaluate(server, tmp_path, Choice(env_ids=("parity",), turns=(7,)))
    with serving(Completions()) as other, pytest.raises(ConfigError, match=r"model\.endpoint was"):
        evaluate(other, tmp_path)
    assert len(server.bodies) == asked


def test_two_evaluations_do_not_write_one_file(server: Completions, tmp_path: Path) -> None:
    with (
        EvaluationJournal.open(tmp_path, {}),
        pytest.raises(ConfigError, match="another evaluation writes"),
    ):
        evaluate(server, tmp_path)


def test_a_line_that_a_kill_cut_off_is_played_again(server: Completions, tmp_path: Path) -> None:
    evaluate(server, tmp_path)
    whole = (tmp_path / FILE).read_bytes()
    for cut in (20, len(whole.splitlines(keepends=True)[-1]) + 20, len(whole) - 5):
        (tmp_path / FILE).write_bytes(whole[:-cut])
        evaluate(server, tmp_path)
        assert sorted((each["task"], each["sample"]) for each in lines_of(tmp_path)) == sorted(
            (f"round-{number:02d}", 0) for number in range(3, 64, 4)
        )


def test_what_broke_is_counted_apart_and_played_again(server: Completions, tmp_path: Path) -> None:
    server.faults = [None, None, refusal(400), refusal(400)]
    row = evaluate(server, tmp_path)["blocks"][0]["rows"][0]
    assert (row["episodes"], row["broken"], row["success_rate"]) == (TASKS - 2, 2, 1.0)
    assert row["broken_share"] == 2 / TASKS
    row = evaluate(server, tmp_path)["blocks"][0]["rows"][0]
    assert (row["episodes"], row["broken"]) == (TASKS, 0)
    assert len(lines_of(tmp_path)) == TASKS + 2


def test_when_nothing_works_it_ends_rather_than_break_everything(
    server: Completions, tmp_path: Path
) -> None:
    server.faults = [refusal(400)] * 200
    with pytest.raises(
        RunFailed, match=f"{BROKEN_LIMIT} episodes of parity broke in a row.*answered 400"
    ):
        evaluate(server, tmp_path, Choice(env_ids=("parity",), samples=(4,)))
    server.faults = [refusal(401)] * 16
    with pytest.raises(EngineDead, match="answered 401"):
        evaluate(server, tmp_path, Choice(env_ids=("parity",), samples=(4,)))
    server.faults = []
    row = evaluate(server, tmp_path, Choice(env_ids=("parity",), samples=(4,)))["blocks"][0][
        "rows"
    ][0]
    assert (row["episodes"], row["broken"]) == (TASKS * 4, 0)


def test_an_endpoint_that_is_not_there_is_an_error_before_any_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = [
        "eval",
        "--endpoint",
        "http://127.0.0.1:9/v1",
        "--model-name",
        "m",
        "--env",
        "parity",
        "--tasks",
        "2",
    ]
    assert main(asked) == 1
    assert (
        "error: no answer from http://127.0.0.1:9/v1/models (ClientConnectorError"
        in capsys.readouterr().err
    )
    assert lines_of(tmp_path / "evaluation") == []


def test_an_evaluation_of_which_every_episode_broke_has_failed(
    server: Completions, tmp_path: Path
) -> None:
    server.faults = [refusal(400)] * 2
    with pytest.raises(
        RunFailed, match=r"all 2 episodes of parity broke, the last with: .*answered 400"
    ):
        evaluate(server, tmp_path, Choice(env_ids=("parity",), tasks=2))
    assert (tmp_path / "results.json").exists()
    assert (
        evaluate(server, tmp_path, Choice(env_ids=("parity",), tasks=2))["blocks"][0]["rows"][0][
            "episodes"
        ]
        == 2
    )


def test_the_key_is_written_nowhere(
    server: Completions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    server.faults = [refusal(400, "sk-very-secret is no key")]
    evaluate(server, tmp_path)
    assert set(server.keys) == {"Bearer sk-very-secret"}
    assert all(b"sk-very-secret" not in path.read_bytes() for path in tmp_path.iterdir())


def test_a_sweep_of_turns_is_a_block_a_value_from_one_set_of_episodes(
    server: Completions, tmp_path: Path
) -> None:
    results = evaluate(server, tmp_path, Choice(env_ids=("parity",), turns=(8, 2, 4), samples=(2,)))
    assert len(server.bodies) == TASKS * 2 * 4
    assert [block["turns"]["parity"] for block in results["blocks"]] == [2, 4, 8]
    rows = [block["rows"][0] for block in results["blocks"]]
    found = [(row["success_rate"], row["turns_mean"], row["truncated_share"]) for row in rows]
    assert found == [(0.0, 2.0, 1.0), (1.0, 4.0, 0.0), (1.0, 4.0, 0.0)]
    assert (tmp_path / "table.md").read_text().count("At most") == 3


# The policy


def scripted(answers: dict[str, str], default: str) -> Subject:
    """Return a subject that answers by what it has read, on ScriptedPolicy."""
    chat = make_chat()

    def answer(read: str) -> str:
        return next((sentences for words, sentences in answers.items() if words in read), default)

    @asynccontextmanager
    async def start(config: RunConfig, environments: OptionsById) -> AsyncIterator[MakeRollout]:
        policy = ScriptedPolicy(
            lambda ids: chat.encode_turn(answer(chat.decode(ids))), max_context_tokens=1024
        )
        yield lambda env: Rollout(policy, chat, None, env.step_timeout_s)

    return Subject("script", {"name": "script"}, CONFIG, False, start)


def test_pass_at_k_comes_from_the_samples_of_each_task(tmp_path: Path) -> None:
    subject = scripted({"round-03": "odd", "round-07": "odd"}, "even")
    plan = make_plan(CONFIG, Choice(env_ids=("parity",), samples=(1, 3)), own_envs=False)
    assert carry_out(subject, plan, settings_of(subject, plan), tmp_path, TERMINAL) == 0
    row = json.loads((tmp_path / "results.json").read_text())["blocks"][0]["rows"][0]
    assert row["success_rate"] == (TASKS - 2) / TASKS
    assert row["pass_at"]["3"] == pytest.approx((TASKS - 2) / TASKS * pass_at_k(3, 3, 3))


def test_two_evaluations_of_one_policy_are_the_same(tmp_path: Path) -> None:
    sentences = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        subject = scripted({}, "even")
        plan = make_plan(CONFIG, Choice(env_ids=("textcraft",), tasks=1), own_envs=False)
        carry_out(subject, plan, settings_of(subject, plan), tmp_path / name, TERMINAL)
        sentences.append(
            sorted((each["task"], json.dumps(each["turns"])) for each in lines_of(tmp_path / name))
        )
    assert sentences[0] == sentences[1]


def test_an_interrupt_while_the_file_opens_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(EvaluationJournal, "open", Mock(side_effect=KeyboardInterrupt))
    subject, shown = scripted({}, "even"), StringIO()
    plan = make_plan(CONFIG, Choice(env_ids=("parity",)), own_envs=False)
    assert carry_out(subject, plan, {}, tmp_path, Console(file=shown)) == 130
    assert shown.getvalue().strip() == STOPPED


@pytest.mark.process
def test_the_real_engine_is_evaluated_by_the_same_code(vllm_engine: Played, tmp_path: Path) -> None:
    chat = make_chat()

    @asynccontextmanager
    async def start(config: RunConfig, environments: OptionsById) -> AsyncIterator[MakeRollout]:
        yield lambda env: Rollout(vllm_engine.policy, chat, None, env.step_timeout_s)

    config = RunConfig.load([], ["--rollout.max_turn_tokens=4"])
    plan = make_plan(config, Choice(env_ids=("parity",), tasks=3, samples=(2,)), own_envs=False)
    with EvaluationJournal.open(tmp_path, {}) as journal:
        vllm_engine.run(
            play_missing(plan, Subject("tiny", {}, config, False, start), journal, TERMINAL)
        )
        (block,) = blocks_of(plan, journal.lines)
    assert (block["rows"][0]["episodes"], block["rows"][0]["broken"]) == (6, 0)
    assert all(0 < turn.tokens <= 4 for line in journal.lines.values() for turn in line.turns)


# What a run remembers of it


def recorded(scripted: Subject, run_dir: Path, out: Path, **choice: Any) -> list[dict[str, Any]]:
    """Evaluate a version of a run; return the lines of its file of plays of test tasks."""
    out.mkdir(exist_ok=True)
    subject = replace(scripted, version=RunVersion(run_dir, 12))
    plan = make_plan(CONFIG, Choice(env_ids=("parity", "maze"), **choice), own_envs=False)
    assert carry_out(subject, plan, settings_of(subject, plan), out, TERMINAL) == 0
    return read_lines(run_dir / TESTS)


def test_a_run_keeps_by_which_command_its_test_tasks_were_played(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/horizonrl", "eval", "runs/a run", "--tasks", "4"])
    run_dir, subject = tmp_path / "run", scripted({"round-03": "odd"}, "even")
    run_dir.mkdir()
    assert recorded(subject, run_dir, tmp_path / "chosen", split="validation", tasks=4) == []
    (line,) = recorded(subject, run_dir, tmp_path / "out", tasks=4)
    assert line["command"] == "horizonrl eval 'runs/a run' --tasks 4"
    assert (line["split"], line["version"]) == ("test", 12)
    assert datetime.fromisoformat(line["time"]).utcoffset() == timedelta(0)
    # Parity has one category, of which four were asked for; maze has three.
    assert {env: measured["tasks"] for env, measured in line["environments"].items()} == {
        "parity": 4,
        "maze": 12,
    }
    assert line["environments"]["maze"]["success_rate"] == 0.0
    assert len(recorded(subject, run_dir, tmp_path / "out", tasks=4)) == 1, "nothing was played"
    assert len(recorded(subject, run_dir, tmp_path / "out", tasks=5, split="all")) == 2
    assert RunView("r", files=Files.read(run_dir)).tests == 2


# The subject


def test_a_run_is_evaluated_by_its_newest_or_best_weights_and_its_own_config(
    tmp_path: Path, tiny_models: tuple[Path, Path]
) -> None:
    envs = '[{"id": "parity"}]'
    config = RunConfig.load(
        [],
        [
            f"--run.root={tmp_path}",
            f"--model.name={tiny_models[0]}",
            "--envs",
            envs,
            "--rollout.max_turn_tokens=7",
        ],
    )
    write_config(config)
    place = config.run_dir / "checkpoints" / "step-000003"
    place.mkdir(parents=True)
    (place / "weights.safetensors").write_bytes((tiny_models[1] / "model.safetensors").read_bytes())
    with ticket_subject(SubjectRequest(str(place))) as subject:
        assert (subject.own_envs, subject.config.rollout.max_turn_tokens) == (True, 7)
        assert subject.version == RunVersion(config.run_dir, 3)
        of_checkpoint = subject.facts["weights"]
    with ticket_subject(SubjectRequest(str(tiny_models[1]))) as subject:
        assert subject.facts["weights"] == of_checkpoint
        assert subject.config.model.max_context_tokens == 1024  # the model's own
        assert (subject.own_envs, subject.version) == (False, None)
    best = config.run_dir / "best"
    best.mkdir()
    (best / "v2.safetensors").write_bytes((tiny_models[0] / "model.safetensors").read_bytes())
    shown = {
        "weights": "v2.safetensors",
        "step": 2,
        "lineage": 0,
        "success_rate": 0.5,
        "low": 0.1,
        "high": 0.9,
    }
    (best / "eval.json").write_text(json.dumps(shown))
    with ticket_subject(SubjectRequest(str(config.run_dir))) as subject:
        assert subject.facts["weights"] != of_checkpoint
        assert subject.version == RunVersion(config.run_dir, 2)


# The program


def program(server: Completions, out: Path, *more: str) -> subprocess.Popen[str]:
    return start(
        "--endpoint",
        server.url,
        "--model-name",
        "big",
        "--out",
        str(out),
        "--samples",
        "1",
        "4",
        *more,
    )


def start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "horizonrl.ops.cli.main", "eval", *words, "--env", "parity"],
        env=os.environ | {"COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_evaluation_goes_on_where_it_was(
    server: Completions, tmp_path: Path, number: signal.Signals
) -> None:
    server.delay_s = 0.1
    first = program(server, tmp_path, "--actor.slots", "2")
    deadline = time.monotonic() + 120
    while not (tmp_path / FILE).exists() or len(lines_of(tmp_path)) < 5:
        assert time.monotonic() < deadline and first.poll() is None, first.communicate()[0]
        time.sleep(0.05)
    first.send_signal(number)
    shown = first.communicate(timeout=60)[0]
    assert first.returncode == (130 if number is signal.SIGINT else -number), shown
    done, asked, server.delay_s = len(lines_of(tmp_path)), len(server.bodies), 0.0
    second = program(server, tmp_path)
    shown = second.communicate(timeout=120)[0]
    assert second.returncode == 0, shown
    keys = [(each["task"], each["sample"]) for each in lines_of(tmp_path)]
    assert len(keys) == len(set(keys)) == TASKS * 4
    assert len(server.bodies) - asked == (TASKS * 4 - done) * 4
    assert "100 % (94-100 %)" in shown


@pytest.mark.process
@pytest.mark.parametrize("after_s", [0.0, 2.0])
def test_an_evaluation_whose_engine_starts_ends_at_once(
    tiny_models: list[Path], tmp_path: Path, after_s: float
) -> None:
    asked = start(str(tiny_models[0]), "--out", str(tmp_path))
    deadline = time.monotonic() + 120
    while not (tmp_path / FILE).exists():
        assert time.monotonic() < deadline and asked.poll() is None, asked.communicate()[0]
        time.sleep(0.05)
    time.sleep(after_s)
    asked.send_signal(signal.SIGINT)
    shown = asked.communicate(timeout=5)[0]
    assert (asked.returncode, shown.strip()) == (130, STOPPED)
