"""Runs that differ in one thing: the first step that differs is named, and why."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from horizonrl.broker.codec import decode, encode
from horizonrl.broker.memory import SERVERS
from horizonrl.common.types import Group
from horizonrl.ops.cli.main import main
from horizonrl.ops.rundir.lines import read_lines
from tests.learner.world import World
from tests.ops.history.runs import RECORDED, STEPS, Twin, record

PAIRS = 13
"""Of each kind of difference."""
KEYS = {"rl.lr": 0.5, "loss.low": 0.1, "learner.weight_decay": 0.5, "learner.max_grad_norm": 3.0}
Expected = tuple[int, str, str]
"""The step that is named, and a cause: its kind and its words."""


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> World:
    return record(tmp_path_factory.mktemp("first"))


def swapped_groups(twin: Twin) -> Expected:
    one, other = twin.draw_group(), twin.draw_group()
    while one == other:
        other = twin.draw_group()
    (step, low, ticket), (_, high, _) = sorted([one, other])
    twin.messages[low], twin.messages[high] = (
        replace(twin.messages[high], sequence=low),
        replace(twin.messages[low], sequence=high),
    )
    twin.learn()
    return step, "data", f"{ticket} (run: "


def changed_token(twin: Twin) -> Expected:
    step, sequence, ticket = twin.draw_group()
    group = decode(twin.messages[sequence].data, Group)
    episode = twin.dice.choice(group.valid_episodes)
    number = twin.dice.randrange(len(episode.turns))
    turn = episode.turns[number]
    token = twin.dice.randrange(len(turn.logprobs))
    logprobs = [*turn.logprobs]
    logprobs[token] -= 0.25
    turns = [*episode.turns]
    turns[number] = turn.model_copy(update={"logprobs": tuple(logprobs)})
    episodes = [*group.episodes]
    episodes[episode.index] = episode.model_copy(update={"turns": tuple(turns)})
    data = encode(group.model_copy(update={"episodes": tuple(episodes)}))
    twin.messages[sequence] = replace(twin.messages[sequence], data=data)
    twin.learn()
    where = f"{ticket}, episode {episode.index}, turn {number}, logprob of token {token}: "
    return step, "data", f"{where}{turn.logprobs[token]} → {logprobs[token]}"


def changed_seed(twin: Twin) -> Expected:
    step = twin.draw_step()
    twin.change_from(step, "--run.seed=7")
    return step, "recipe", "run.seed: 0 → 7"


def changed_ranks(twin: Twin) -> Expected:
    step = twin.draw_step()
    twin.change_from(step, "--learner.ranks=2")
    return step, "recipe", "learner.ranks: 1 → 2"


def changed_key(twin: Twin) -> Expected:
    step, (key, value) = twin.draw_step(), twin.dice.choice([*KEYS.items()])
    twin.change_from(step, f"--{key}={value}")
    return step, "recipe", f"{key}: "


def changed_code(twin: Twin) -> Expected:
    step = twin.draw_step()
    twin.change_from(step)
    twin.rewrite("lineages.jsonl", lambda number, line: (
        line | {"machine": line["machine"] | {"code": "f" * 16}} if number else line
    ))  # fmt: skip
    return step, "code", f" → {'f' * 16}"


def changed_bits(twin: Twin) -> Expected:
    step = twin.draw_step()
    twin.learn()
    twin.rewrite("ledger.jsonl", lambda _, line: (
        line | {"weights_digest": "f" * 32} if line["step"] >= step else line
    ))  # fmt: skip
    return step, "bits", f" → {'f' * 32}"


KINDS = (
    swapped_groups,
    changed_token,
    changed_seed,
    changed_ranks,
    changed_key,
    changed_code,
    changed_bits,
)


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_the_first_step_that_differs_is_named_with_its_cause(
    make: Callable[[Twin], Expected],
    first: World,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for seed in range(PAIRS):
        twin = Twin(first, tmp_path / f"{make.__name__.replace('_', '-')}-{seed}", seed)
        step, kind, words = make(twin)
        capsys.readouterr()  # what the learners have logged
        assert main(["history", "diff", str(first.config.run_dir), str(twin.run_dir)]) == 1
        said, *causes = capsys.readouterr().out.splitlines()
        assert said.startswith(f"step {step} is the first that differs"), (seed, said)
        assert any(line.split()[0] == kind and words in line for line in causes), (seed, causes)


def test_a_run_in_four_parts_is_no_different_from_the_uncut_one(
    first: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twin, report = Twin(first, tmp_path / "cut", 0), tmp_path / "report.json"
    twin.learn(*([f"--rl.steps={steps}"] for steps in (0, 2, 3, 5)))
    assert {line["lineage"] for line in read_lines(twin.run_dir / "ledger.jsonl")} == {0, 1, 2, 3}
    dirs = [str(first.config.run_dir), str(twin.run_dir)]
    capsys.readouterr()
    assert main(["history", "diff", *dirs, "--json", str(report)]) == 0
    assert (
        capsys.readouterr().out == f"no difference up to step {STEPS}; one of them has {RECORDED}\n"
    )
    assert json.loads(report.read_text())["equal"]


def test_without_the_logs_a_token_is_found_in_the_episodes_and_without_both_that_is_said(
    first: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twin = Twin(first, tmp_path / "alone", 1)
    step, _, words = changed_token(twin)
    SERVERS.pop("alone")
    dirs = [str(first.config.run_dir), str(twin.run_dir)]
    assert main(["history", "diff", *dirs]) == 1
    assert words.partition(": ")[0] in capsys.readouterr().out
    (twin.run_dir / "episodes" / f"step-{step:06d}.jsonl").unlink()
    assert main(["history", "diff", *dirs]) == 1
    shown = capsys.readouterr().out
    assert "data    data_digest: " in shown and f"not compared: tokens of step {step}" in shown


def test_two_steps_are_compared_and_misuse_is_told(
    first: World, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = str(first.config.run_dir)
    assert main(["history", "diff", run_dir, "--at", "4", "4"]) == 0
    assert main(["history", "diff", run_dir, "--at", "4", "6"]) == 1
    shown = capsys.readouterr().out
    ((_, ticket), *_), ((_, later), *_) = (first.ledger()[step]["trained"] for step in (3, 5))
    assert f"{ticket} (run: trained into version 4) → {later} (run: trained" in shown
    assert main(["history", "diff", run_dir]) == 2
    assert "--at STEP STEP" in capsys.readouterr().err
    assert main(["history", "diff", run_dir, "--at", "4", "12"]) == 2
    assert f"it holds 1 to {RECORDED}" in capsys.readouterr().err
