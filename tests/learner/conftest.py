"""One tiny model for all of the learner's tests."""

from pathlib import Path

import pytest

from horizonrl.ops.models.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny-model"))
