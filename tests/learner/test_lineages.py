"""A version's number says little: after a resume another line of checkpoints may count it again."""

from pathlib import Path

from horizonrl.broker.memory import MemoryTransport
from horizonrl.common.types import Kind, PolicyVersion, VersionSpan
from horizonrl.learner.intake.collector import PendingBatch
from horizonrl.learner.loop.fence import Fence
from horizonrl.learner.loop.weights_publisher import WeightsPublisher
from tests.records import make_episode, make_group, make_turn


def test_weights_are_found_by_lineage_and_version(tmp_path: Path) -> None:
    transport = MemoryTransport()
    publisher = WeightsPublisher(transport, Fence(transport), tmp_path, share_files=True)
    judged, retrained = PolicyVersion(version=4, lineage=0), PolicyVersion(version=4, lineage=1)
    publisher.path_for(retrained).touch()
    assert publisher.find(judged) is None
    assert publisher.find(retrained) == publisher.path_for(retrained)


def test_a_pending_batch_tells_the_tokens_of_two_lineages_apart() -> None:
    turn = make_turn((1, 2, 3), 4, 1.0).model_copy(
        update={
            "spans": (
                VersionSpan(version=4, lineage=0, tokens=1),
                VersionSpan(version=4, lineage=1, tokens=2),
            )
        }
    )
    group = make_group(version=4).model_copy(update={"episodes": (make_episode(0, turn),)})
    (tokens,) = PendingBatch(admitted=[(1, group)]).sampled()
    assert tokens == {
        PolicyVersion(version=4, lineage=0): 1,
        PolicyVersion(version=4, lineage=1): 2,
    }


def test_no_trace_is_compared_in_which_two_lineages_share_the_newest_version() -> None:
    newest = PolicyVersion(version=4, lineage=1)
    mixed = tuple(VersionSpan(version=4, lineage=lineage, tokens=5) for lineage in (0, 1))
    pure = (
        VersionSpan(version=3, lineage=0, tokens=8),
        VersionSpan(version=4, lineage=1, tokens=2),
    )
    episodes = [
        make_episode(index, make_turn((1,) * 10, 4, 1.0).model_copy(update={"spans": spans}))
        for index, spans in enumerate((mixed, pure))
    ]
    both = PendingBatch(
        admitted=[(1, make_group(version=4).model_copy(update={"episodes": tuple(episodes)}))]
    )
    assert (both.newest_policy(), both.trace_index(newest)) == (newest, 1)
    only_mixed = PendingBatch(
        admitted=[(1, make_group(version=4).model_copy(update={"episodes": (episodes[0],)}))]
    )
    assert only_mixed.trace_index(newest) is None


def test_demonstrations_have_no_version_to_compare() -> None:
    pending = PendingBatch(admitted=[(1, make_group(kind=Kind.DEMO, rewards=(1.0,)))])
    assert pending.newest_policy() is None
