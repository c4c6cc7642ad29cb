import base64
import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from horizonrl.ops.report.episodes import Episodes, action_begins, collect, tell_outcome
from horizonrl.ops.report.tokens import TokenTexts
from horizonrl.ops.rundir.episodes import EpisodeFiles
from tests.ops.report.runs import THOUGHT


def bodies(episodes: Episodes) -> list[dict[str, Any]]:
    return [
        body
        for chunk in episodes.chunks
        for body in json.loads(gzip.decompress(base64.b64decode(chunk)))
    ]


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("get 2 logs", "get 2 logs"),
        ("Thought: wood.\nAction: get 2 logs", "Action: get 2 logs"),
        ('{"thought": "wood", "function_name": "get"}', '"function_name": "get"}'),
        ("```python\n# wood, then\n# more\nget(item='logs')\n```", "get(item='logs')\n```"),
        ("<think>Action: maybe not</think>\nget 2 logs", "get 2 logs"),
    ],
)
def test_a_reply_is_parted_into_thought_and_action(text: str, action: str) -> None:
    assert text[action_begins(text) :] == action


@pytest.mark.parametrize(
    ("stop", "success", "outcome"),
    [
        ("horizon", True, "success"),
        ("terminated", False, "failure"),
        ("horizon", False, "truncated: horizon"),
        ("env_truncated", False, "truncated: environment"),
        ("env_timeout", False, "broken: env_timeout"),
    ],
)
def test_a_truncated_and_a_broken_episode_are_no_failures(
    stop: str, success: bool, outcome: str
) -> None:
    assert tell_outcome({"stop": stop, "success": success}) == outcome


def test_every_episode_is_where_the_index_says(run_dir: Path) -> None:
    episodes = collect(run_dir, {}, TokenTexts.find(run_dir.parent / "model"))
    assert len(episodes.rows) == len(bodies(episodes)) == 144
    for row, body in zip(episodes.rows, bodies(episodes), strict=True):
        assert row[4] == len(body["turns"])
        for turn in body["turns"]:
            assert sum(turn["lengths"]) == len(turn["text"].encode("utf-16-le")) // 2
            assert (
                len(turn["lengths"])
                == len(turn["surprise"])
                == sum(count for _, count in turn["versions"])
            )
            if THOUGHT in turn["text"]:
                assert (
                    turn["text"]
                    .encode("utf-16-le")[2 * turn["action"] :]
                    .decode("utf-16-le")
                    .startswith("Action:")
                )
    assert episodes.undecoded == 0


def test_a_long_run_keeps_every_second_group(run_dir: Path) -> None:
    size = sum(file.stat().st_size for file in (run_dir / "episodes").iterdir())
    episodes = collect(run_dir, {}, None, max_bytes=size // 2 + 1)
    assert (episodes.stride, len(episodes.rows)) == (2, 72)


def test_episodes_that_the_learner_has_removed_are_left_out(run_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(run_dir / "episodes", tmp_path / "episodes")
    source = EpisodeFiles(tmp_path)
    steps = [step for step, _, _ in EpisodeFiles(run_dir).groups()]
    source.files[0].unlink()  # since it was listed
    assert source.size_bytes == sum(file.stat().st_size for file in source.files[1:])
    assert [step for step, _, _ in source.groups()] == [step for step in steps if step > steps[0]]
    assert {row[4] for row in collect(tmp_path, {}, None).groups} == {*steps} - {steps[0]}


def test_a_line_that_a_crash_cut_short_is_left_out_and_counted(
    run_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "episodes").mkdir()
    text = (run_dir / "episodes" / "step-000001.jsonl").read_text()
    (tmp_path / "episodes" / "step-000001.jsonl").write_text(text[:-40])
    episodes = collect(tmp_path, {}, None)
    assert (len(episodes.rows), episodes.unreadable) == (23, 1)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("stop", "</script>"),
        ("stop", ["horizon"]),
        ("return", "1.0"),
        ("env", None),
        ("turns", 5),
        ("turns", [{"spans": [[1, 2]]}]),
    ],
)
def test_an_episode_that_is_none_is_left_out_and_counted(
    key: str, value: object, run_dir: Path, tmp_path: Path
) -> None:
    """As in a run directory that somebody else has made."""
    file = tmp_path / "episodes" / "step-000001.jsonl"
    file.parent.mkdir()
    first, rest = (run_dir / "episodes" / file.name).read_text().split("\n", 1)
    file.write_text(f"{json.dumps(json.loads(first) | {key: value})}\n{rest}")
    episodes = collect(tmp_path, {}, None)
    assert (len(episodes.rows), episodes.unreadable) == (23, 1)
