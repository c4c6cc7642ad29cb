from pathlib import Path

import pytest

from tests.ops.report.runs import Scale, run_config, write_run


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 144 episodes."""
    return write_run(run_config(tmp_path_factory.mktemp("report")))


@pytest.fixture(scope="session")
def taught_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps of imitation and four of RL: 12 demonstrations, 96 episodes, and 9 held-out ones."""
    config = run_config(tmp_path_factory.mktemp("taught"), "--imitation.steps=2", "--rl.steps=4")
    return write_run(config, Scale(held_out=3))
