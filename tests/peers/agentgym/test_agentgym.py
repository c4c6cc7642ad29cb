"""The comparison with the real AgentGym: what needs no checkout, and the whole where its package is installed."""

import asyncio
import importlib.util
import json
import sqlite3
import sys
from pathlib import Path

import pytest

from horizonrl.envs.agentgym.dialects import DIALECTS
from horizonrl.envs.agentgym.doors import COUNTERPARTS
from horizonrl.ops.bench.case import Request
from tests.peers.agentgym import ours, speed
from tests.peers.agentgym.bird import write_bird
from tests.peers.agentgym.games import play, reply_of

AGENTENV = importlib.util.find_spec("agentenv")


def test_there_is_a_task_of_agentgyms_for_each_counterpart() -> None:
    assert set(ours.TASKS) == set(COUNTERPARTS)


@pytest.mark.parametrize(
    ("name", "action"),
    [
        ("textcraft", "get 1 oak logs"),
        ("sqlgym", "SELECT 1"),
        ("searchqa", "<search>who</search>"),
        ("webarena", "click [4]"),
        ("todo", 'Action: finish {"answer": "12"}'),
    ],
)
def test_a_reply_is_one_that_agentgyms_prompt_asks_for(name: str, action: str) -> None:
    sent = DIALECTS[name].read(reply_of(DIALECTS[name], action))
    assert isinstance(sent, str)
    assert action.removeprefix("Action: ").partition(" ")[0] in sent


def test_an_experts_game_is_compared_text_by_text() -> None:
    game = asyncio.run(play("textcraft", 3))
    assert game is not None
    texts = [game.first]
    for reply, step in zip(game.replies, game.answers, strict=True):
        texts += [reply, step.observation]
    messages = [{"content": text} for text in ("rules", "Ok.", *texts)]
    same = {"env": "textcraft", "number": 3, "seconds": 0.1, "conversation": messages, "reward": 1}
    assert ours._compare("textcraft", [game], [same]).whole == 1
    messages[4] = {"content": "something else"}
    differs = ours._compare("textcraft", [game], [same])
    assert (differs.whole, differs.solved) == (0, 1)
    assert "text 2: 'something else' and not" in differs.first_difference
    assert (
        "refused"
        in ours._compare("textcraft", [game], [{**same, "error": "refused"}]).first_difference
    )


def test_our_questions_are_written_as_birds(tmp_path: Path) -> None:
    problems = write_bird(tmp_path, 3)
    items = json.loads((tmp_path / "train" / "train.json").read_text())
    assert [item["question"] for item in items] == [problem.question for problem in problems]
    database = sqlite3.connect(tmp_path / "train" / "train_databases" / "db2" / "db2.sqlite")
    assert database.execute(problems[2].gold).fetchall()
    database.close()


@pytest.mark.process
@pytest.mark.skipif(AGENTENV is None, reason="AgentGym's package agentenv is not installed")
def test_the_real_package_plays_whole_episodes_on_our_server() -> None:
    assert AGENTENV is not None
    assert AGENTENV.origin is not None
    agentgym = Path(AGENTENV.origin).parents[2]
    driven = asyncio.run(ours.drive(agentgym, sys.executable, ["textcraft", "household", "sql"], 2))
    assert [each.whole for each in driven] == [2, 2, 2], [each.first_difference for each in driven]


@pytest.mark.process
def test_our_servers_are_measured_in_small_without_a_checkout(tmp_path: Path) -> None:
    out = tmp_path / "servers.json"
    assert speed.run(Request(small=True), None, sys.executable, out) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["what"].startswith("textcraft")
    assert row["ours"] > 0
