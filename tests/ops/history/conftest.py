import pytest

from horizonrl.ops.models.tiny_model import make_tiny_model
from tests.ops.history.bandit import BanditWorld, record_hack


@pytest.fixture(scope="package")
def hacked(tmp_path_factory: pytest.TempPathFactory) -> BanditWorld:
    """A run that has learned to work, and then to hack."""
    root = tmp_path_factory.mktemp("hacked")
    return record_hack(root, make_tiny_model(tmp_path_factory.mktemp("bandit")))
