from pathlib import Path

import pytest

from tests.ops.report.runs import run_config, write_run


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 144 episodes."""
    return write_run(run_config(tmp_path_factory.mktemp("report")))
