"""What weights need of every transport: frames and changes in one stream, read from any place, purged in front."""

from pathlib import Path

import pytest

from horizonrl.common.types import PolicyVersion
from tests.brokers import Broker
from tests.weights import RandomLearner, ShadowHost, shrink


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)


async def test_versions_arrive_as_changes_on_every_transport(
    broker: Broker, tmp_path: Path
) -> None:
    async with broker.open() as sender, broker.open() as receiver:
        learner, host = (
            RandomLearner(sender, tmp_path / "weights"),
            ShadowHost(receiver, tmp_path / "shadow"),
        )
        for _ in range(10):
            manifest = await learner.step()
            assert await host.load(manifest) == learner.images[manifest.policy]
        assert host.received("frame") == manifest.weights_bytes, (
            "one key frame, then changes, key frames or not"
        )
        assert 0 < host.received("changes") < manifest.weights_bytes
        late = ShadowHost(receiver, tmp_path / "late")
        assert await late.load(manifest) == learner.images[manifest.policy]
        assert manifest.key_policy == PolicyVersion(version=7)
        assert late.received("changes") < host.received("changes")
