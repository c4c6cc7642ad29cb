"""A version's number says little: after a resume another line of checkpoints may count it again."""

from pathlib import Path

from horizonrl.broker.memory import MemoryTransport
from horizonrl.common.types import PolicyVersion, VersionSpan
from horizonrl.learner.fence import Fence
from horizonrl.learner.intake.collector import PendingBatch
from horizonrl.learner.weights import WeightsPublisher
from tests.records import make_episode, make_group, make_turn


def test_weights_are_found_by_lineage_and_version(tmp_path: Path) -> None:
    transport = MemoryTransport()
    publisher = WeightsPublisher(transport, Fence(transport), tmp_path, share_files=True)
    judged, retrained = PolicyVersion(version=4, lineage=0), PolicyVersion(version=4, lineage=1)
    publisher.path_for(retrained).touch()
    assert publisher.find(judged) is None
    assert publisher.find(retrained) == publisher.path_for(retrained)


def test_a_draft_tells_the_tokens_of_two_lineages_apart() -> None:
    turn = make_turn((1, 2, 3), 4, 1.0).model_copy(
        update={"spans": (VersionSpan(version=4, lineage=0, tokens=1), VersionSpan(version=4, lineage=1, tokens=2))}
    )
    group = make_group(version=4).model_copy(update={"episodes": (make_episode(0, turn),)})
    (tokens,) = PendingBatch(admitted=[(1, group)]).sampled()
    assert tokens == {PolicyVersion(version=4, lineage=0): 1, PolicyVersion(version=4, lineage=1): 2}
