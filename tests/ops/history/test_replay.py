import asyncio
from pathlib import Path
from typing import Any

import pytest

from horizonrl.broker.groups import GroupLog
from horizonrl.broker.memory import MemoryTransport
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import ConfigError
from horizonrl.learner.engine.backends.hash import HashEngine
from horizonrl.learner.engine.thread import EngineThread
from horizonrl.learner.loop.recovery import machine
from horizonrl.learner.records.replay import Replay
from horizonrl.ops.history.replay import _ranks, divide, reasons_to_differ
from horizonrl.ops.rundir.directory import write_config
from horizonrl.ops.rundir.lines import read_lines
from tests.learner.world import InlineExecutor, World


def test_a_replay_whose_digests_differ_names_the_other_machine() -> None:
    config = RunConfig.load([], ["--run.name=run"])
    here = machine(config.learner.threads)
    assert here["cpu"]
    elsewhere = here | {"cpu": "x86_64 sse"}
    lineages = [
        {"lineage": 0, "from_step": 0, "machine": here},
        {"lineage": 1, "from_step": 9, "machine": elsewhere},
        {"lineage": 2, "from_step": 9},
    ]
    (moved,) = reasons_to_differ(lineages, config)
    assert "from step 9 on" in moved and "x86_64 sse" in moved


CHANGED = ("--rl.lr=0.5", "--rl.groups_per_step=3", "--broker.max_deliver=6")
"""What the second start changes, which the third one keeps."""


def test_steps_are_replayed_with_the_config_that_they_were_trained_with(tmp_path: Path) -> None:
    async def scenario() -> None:
        worlds = [World(tmp_path)]
        await worlds[0].run()
        for overrides in [
            ("--rl.steps=9", *CHANGED),
            ("--rl.steps=13", "--rl.max_staleness=1", *CHANGED),
        ]:
            worlds.append(World(tmp_path, server=worlds[0].server, overrides=overrides))
            await worlds[-1].run()
        run_dir = worlds[0].config.run_dir
        write_config(worlds[-1].config)
        lineages = read_lines(run_dir / "lineages.jsonl")
        parts = divide(run_dir, (), worlds[0].ledger(), lineages)
        assert [(part.config.rl.lr, part.config.rl.groups_per_step, len(part.ledger)) for part in parts] == [
            (worlds[0].config.rl.lr, 2, 7), (0.5, 3, 4), (0.5, 3, 4),
        ]  # fmt: skip
        transport, start = MemoryTransport(worlds[0].server, "run"), None
        for number, (part, world) in enumerate(zip(parts, worlds, strict=True)):
            engine = EngineThread(HashEngine(), InlineExecutor())
            log, end_dir = GroupLog(transport), tmp_path / f"part-{number}"
            replay = Replay(
                part.config,
                transport,
                log,
                engine,
                world.rules,
                tmp_path / "frame",
                lineages,
                end_dir,
            )
            assert all([done.equal async for done in replay.steps(start, part.ledger)])
            start = replay.end

    asyncio.run(scenario())


def test_an_override_of_a_replay_goes_on_top_of_what_a_run_changed_and_ranks_that_changed_are_named(
    tmp_path: Path,
) -> None:
    config = RunConfig.load([], ["--run.name=run", f"--run.root={tmp_path}", "--learner.ranks=2"])
    write_config(config)
    ledger = [{"step": step, "lineage": step // 3} for step in range(1, 6)]
    changed = {"rl.lr": [0.25, 0.5], "model.name": ["gone", "here"], "loss.kl_max": [None, 1.0]}
    lineages: list[dict[str, Any]] = [
        {"lineage": 0, "from_step": 0},
        {"lineage": 1, "from_step": 2, "changed": changed},
    ]
    before, after = divide(config.run_dir, ("--rl.lr=0.125",), ledger, lineages)
    assert [before.config.rl.lr, after.config.rl.lr] == [0.125, 0.125]
    assert [len(before.ledger), len(after.ledger)] == [2, 3]
    assert before.config.loss.kl_max is None and before.config.model.name == after.config.model.name
    assert divide(config.run_dir, (), ledger, lineages)[0].config.rl.lr == 0.25
    changed["learner.ranks"] = [1, 2]
    apart = divide(config.run_dir, (), ledger, lineages)
    with pytest.raises(ConfigError, match=r"on 1 ranks up to step 2 and on 2 .*--to 2, .*--from 2"):
        _ranks(apart)
    assert _ranks(apart[1:]) == 2
