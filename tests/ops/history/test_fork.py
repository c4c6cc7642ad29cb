"""Runs that go on from another one: with its log, without some groups of it, and with new groups and another recipe."""

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from horizonrl.broker.codec import decode, encode
from horizonrl.common.types import Group, Void
from horizonrl.learner.records.checkpoint import CheckpointStore
from horizonrl.ops.cli.main import main
from horizonrl.ops.history.fork import ForkRequest, _begin, matches
from horizonrl.ops.rundir.directory import read_config
from horizonrl.ops.rundir.lines import read_lines
from tests.learner.world import MortalTransport, World
from tests.ops.history.runs import IMITATION, RECORDED, Twin, forget_loop, record, world

START = 6


@pytest.fixture(scope="module", params=["drop", "wait"])
def first(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp(f"forked-{request.param}")
    keys = (f"--rl.stale={request.param}", "--learner.keep_checkpoints=9", "--rl.max_staleness=3")
    return record(root, *keys, hand=3)


def history(run: World, verb: str, *words: str) -> int:
    forget_loop(run.server)
    return main(["history", verb, str(run.config.run_dir), *words])


def go_on(first: World, name: str, steps: int = RECORDED, *, alone: bool = True) -> World:
    """Train a fork: the learner alone on its log, or all roles."""
    config = read_config(first.config.run_dir.parent / name)
    keys = (f"--run.name={name}", f"--rl.steps={steps - IMITATION}", f"--rl.lr={config.rl.lr}")
    stale = (f"--rl.stale={config.rl.stale}", "--rl.max_staleness=3")
    run = world(first.run_root, first.server, *keys, *stale)

    async def learn() -> None:
        await (run.learn(MortalTransport(first.server, run=name)) if alone else run.run())

    forget_loop(first.server)
    asyncio.run(asyncio.wait_for(learn(), 30))
    return run


def digests(run_dir: Path) -> list[tuple[Any, ...]]:
    keys = ("step", "data_digest", "weights_digest")
    return [tuple(line[key] for key in keys) for line in read_lines(run_dir / "ledger.jsonl")]


def test_a_fork_with_the_same_groups_makes_the_same_versions(
    first: World, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, before = first.config.run_dir, digests(first.config.run_dir)
    assert history(first, "fork", f"--at={START}", "--same-groups", "--name=same") == 0
    assert "horizonrl train" in capsys.readouterr().out
    fork = run_dir.parent / "same"
    assert len(digests(fork)) == START
    weights = f"checkpoints/step-{START:06d}/weights.safetensors"
    assert (fork / weights).samefile(run_dir / weights)
    assert digests(go_on(first, "same").config.run_dir) == before == digests(run_dir)
    capsys.readouterr()
    assert main(["history", "diff", str(run_dir), str(fork)]) == 0


def test_some_checkpoint_of_the_run_that_waits_holds_groups_for_later(first: World) -> None:
    store = CheckpointStore(first.config.run_dir / "checkpoints", 9)
    held = [checkpoint.held for checkpoint in store.all()]
    assert any(held) == (first.config.rl.stale == "wait")


def test_a_fork_at_any_checkpoint_makes_the_same_versions(first: World) -> None:
    before = digests(first.config.run_dir)
    for step in (0, *range(2, RECORDED, 2)):
        name = f"any-{step}"
        assert history(first, "fork", f"--at={step}", "--same-groups", f"--name={name}") == 0
        assert digests(go_on(first, name).config.run_dir) == before, step


def test_a_fork_with_another_recipe_plays_new_groups_and_says_what_has_changed(
    first: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert history(first, "fork", f"--at={START}", "--name=new", "--rl.lr=0.5") == 0
    fork = go_on(first, "new", alone=False).config.run_dir
    assert digests(fork)[:START] == digests(first.config.run_dir)[:START]
    assert [step for step, *_ in digests(fork)] == list(range(1, RECORDED + 1))
    changed = read_lines(fork / "lineages.jsonl")[-1]["changed"]
    assert changed["run.name"] == ["run", "new"] and changed["rl.lr"][1] == 0.5
    trained = [
        ticket for line in read_lines(fork / "ledger.jsonl") for _, ticket in line["trained"]
    ]
    assert len(set(trained)) == len(trained)
    capsys.readouterr()
    assert main(["history", "diff", str(first.config.run_dir), str(fork)]) == 1
    said, *causes = capsys.readouterr().out.splitlines()
    assert f"step {START + 1} is the first that differs" in said
    assert any("recipe  rl.lr" in cause for cause in causes)


def test_a_reverted_run_equals_one_that_never_saw_the_groups(
    first: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sequence, ticket = first.ledger()[START + 1]["trained"][1]
    assert history(first, "revert", "--groups", f"ticket={ticket}", "--name=clean") == 0
    shown = capsys.readouterr().out
    cursors = {line["step"]: line["cursor"] for line in first.ledger()}
    start = max(step for step in range(0, RECORDED, 2) if cursors.get(step, 0) < sequence)
    assert f"goes on from step {start} of" in shown and "1 of them as void" in shown
    steps = RECORDED - 2
    reverted = go_on(first, "clean", steps).config.run_dir
    twin = Twin(first, tmp_path / f"never-{first.config.rl.stale}", 0)
    message = twin.messages[sequence]
    void = Void(ticket=decode(message.data, Group).ticket, reason="never came", actor="a")
    twin.messages[sequence] = replace(message, subject="groups.void", data=encode(void))
    keys = [f"--rl.stale={first.config.rl.stale}", "--rl.max_staleness=3"]
    twin.learn([f"--rl.steps={steps - IMITATION}", *keys])
    assert digests(reverted) == digests(twin.run_dir) != digests(first.config.run_dir)[:steps]
    assert ticket not in str(read_lines(reverted / "ledger.jsonl")[START + 1]["trained"])


def test_a_fork_that_is_not_possible_says_what_is(
    first: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert history(first, "fork", "--at=5") == 1
    assert "no checkpoint of step 5: choose --at among 0, 2, 4, 6" in capsys.readouterr().err
    assert history(first, "fork", "--at=4", "--name=run") == 2
    assert "is there already: choose another --name" in capsys.readouterr().err
    assert history(first, "revert", "--groups", "tocket=a") == 2
    assert "did you mean ticket?" in capsys.readouterr().err
    assert history(first, "revert", "--groups", "text=*never said*") == 2
    assert "has text=*never said*" in capsys.readouterr().err


@pytest.mark.parametrize(("folder", "own"), [("nats/jetstream", True), ("nats/server-0", False)])
def test_a_fork_has_a_broker_of_its_own_unless_a_cluster_serves_the_run(
    folder: str, own: bool, first: World
) -> None:
    run_dir = first.config.run_dir
    (run_dir / folder).mkdir(parents=True)
    config = _begin(ForkRequest(run_dir, "served", ()), START).config
    shutil.rmtree(run_dir / "nats")
    assert config.broker.url == (None if own else first.config.broker.url)


def test_a_fork_on_a_cluster_has_as_many_copies_as_there_are_servers(
    first: World, tmp_path: Path
) -> None:
    run_dir = shutil.copytree(first.config.run_dir, tmp_path / "run")
    servers = ",".join(f"nats://server-{number}:4222" for number in range(3))
    for url, copies in ((servers, 3), ("nats://server-0:4222", None)):
        request = ForkRequest(run_dir, "copied", [f"--broker.url={url}"])
        assert _begin(request, START).config.broker.nats.replicas == copies
    chosen = [f"--broker.url={servers}", "--broker.nats.replicas=1"]
    assert _begin(ForkRequest(run_dir, "copied", chosen), START).config.broker.nats.replicas == 1


def test_a_group_is_matched_by_all_that_is_asked(first: World) -> None:
    sequence, ticket = first.ledger()[START]["trained"][0]
    messages = next(
        stream.messages for stream in first.server.runs["run"].streams.values()
        if sequence in stream.messages and stream.messages[sequence].subject.startswith("groups.")
    )  # fmt: skip
    group = decode(messages[sequence].data, Group)
    assert matches(group, {"ticket": ticket, "env": "text*", "actor": "test"})
    assert matches(group, {"text": f"{group.episodes[-1].turns[-1].text[:1]}*"})
    assert not matches(group, {"ticket": ticket, "env": "coin"})
