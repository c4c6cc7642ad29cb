"""A run that was recorded once replays to its digests ever after.

`recorded/` holds the log, the ledger and a checkpoint of a run of `world.py`, with signed tickets and evaluations.
"""

import base64
import json
import shutil
from pathlib import Path

import pytest

from horizonrl.broker.groups import GroupLog
from horizonrl.broker.memory import MemoryServer, MemoryTransport
from horizonrl.common.types import Kind
from horizonrl.learner.engine.thread import EngineThread
from horizonrl.learner.records.checkpoint import CheckpointStore
from horizonrl.learner.records.evaluation import Rounds
from horizonrl.learner.records.replay import Replay
from horizonrl.ops.rundir.lines import read_lines
from tests.learner.world import EVAL_TASKS, EVALUATING, HashEngine, InlineExecutor, World

RECORDED = Path(__file__).with_name("recorded")
LOG = json.loads((RECORDED / "log.json").read_text())


@pytest.mark.parametrize("resumed", [False, True])
async def test_a_recorded_run_replays_to_the_same_digests(tmp_path: Path, resumed: bool) -> None:
    key = tmp_path / "ticket.key"
    key.write_bytes(b"k" * 32)
    world = World(tmp_path, overrides=(*EVALUATING, f"--broker.ticket_key={key}"))
    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(RECORDED / "step-000006", checkpoints / "step-000006")
    start = CheckpointStore(checkpoints, keep=2).newest() if resumed else None
    ledger = [
        line for line in read_lines(RECORDED / "ledger.jsonl") if not resumed or line["step"] > 6
    ]

    transport = MemoryTransport(MemoryServer(), "run")
    for message in LOG:
        data = base64.b64decode(message["data"])
        await transport.publish(message["subject"], data, message_id=message["id"])
    engine = EngineThread(HashEngine(), InlineExecutor())
    log, frame = GroupLog(transport), tmp_path / "frame"
    replay = Replay(world.config, transport, log, engine, world.rules, frame)
    replayed = [step async for step in replay.steps(start, ledger)]
    assert [step.step for step in replayed] == [line["step"] for line in ledger]
    assert all(step.equal for step in replayed)


def test_a_recorded_checkpoint_knows_what_was_settled(tmp_path: Path) -> None:
    shutil.copytree(RECORDED / "step-000006", tmp_path / "step-000006")
    checkpoint = CheckpointStore(tmp_path, keep=2).newest()
    assert checkpoint is not None
    assert checkpoint.state["accounts"][Kind.TRAIN]["trained"] == 8
    assert Rounds(EVAL_TASKS, checkpoint.state["rounds"]).dump() == checkpoint.state["rounds"]
