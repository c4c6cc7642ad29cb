"""What a run directory records of its config."""

import json
from pathlib import Path

import pytest

from horizonrl.common.config.schema import RunConfig
from horizonrl.ops.rundir.directory import write_config

RECIPE = """
[[envs]]
id = "program"

[envs.options]
program = "agent.py:play"
grader = ["bash", "tools/grade.sh", "maze", "gone.txt"]
tasks = "tasks.jsonl"
memory_mib = 64
"""


def test_a_run_records_whole_paths_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tools").mkdir()
    for name in ("agent.py", "tools/grade.sh", "tasks.jsonl", "maze", "bash"):
        (tmp_path / name).write_text("")
    (tmp_path / "recipe.toml").write_text(RECIPE)
    config = RunConfig.load([Path("recipe.toml")], [f"--run.root={tmp_path}/runs"])
    recorded = RunConfig.load([write_config(config)], [], recorded=True)
    (env,) = recorded.envs
    assert json.loads(json.dumps(env.options)) == {
        "program": f"{tmp_path}/agent.py:play",
        "grader": ["bash", f"{tmp_path}/tools/grade.sh", "maze", "gone.txt"],
        "tasks": f"{tmp_path}/tasks.jsonl",
        "memory_mib": 64,
    }
    assert config.envs[0].options["program"] == "agent.py:play", (
        "the run itself goes on as it was told"
    )
