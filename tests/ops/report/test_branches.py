"""Episodes of several branches in the report's reader and in the dataset."""

import base64
import gzip
import json
from pathlib import Path

import pytest

from horizonrl.ops.publish.dataset import write_dataset
from horizonrl.ops.publish.rows import EpisodeRow
from horizonrl.ops.report.episodes import collect
from tests.ops.report.runs import HOSTILE, write_branched_run


@pytest.fixture(scope="module")
def branched_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_branched_run(tmp_path_factory.mktemp("branched"))


def test_the_page_knows_the_branch_of_each_turn(branched_run: Path) -> None:
    chunks = collect(branched_run, {}, None).chunks
    bodies = [
        body for chunk in chunks for body in json.loads(gzip.decompress(base64.b64decode(chunk)))
    ]
    forked, half = bodies[-2:]
    assert forked["branches"] == [HOSTILE, HOSTILE]
    assert [turn["branch"] for turn in forked["turns"]] == [0, 1, 1, 0, 2]
    assert [turn["trained"] for turn in half["turns"]] == [False, True]
    assert (half["refused"], half["refusal"], "refused" in forked) == (2, HOSTILE, False)
    assert "branches" not in bodies[0] and "branch" not in bodies[0]["turns"][0]


def test_the_dataset_has_branches_and_says_what_was_trained(
    branched_run: Path, tmp_path: Path
) -> None:
    write_dataset(branched_run, tmp_path / "out")
    lines = [
        line
        for file in sorted((tmp_path / "out" / "data").iterdir())
        for line in file.read_text().splitlines()
    ]
    *linear, forked, half = [EpisodeRow.model_validate_json(line) for line in lines]
    assert forked.branches == [HOSTILE, HOSTILE]
    assert [turn.branch for turn in forked.turns] == [0, 1, 1, 0, 2]
    assert [turn.trained for turn in half.turns] == [False, True]
    assert all(
        not row.branches and all(turn.trained and turn.branch == 0 for turn in row.turns)
        for row in linear
    )
