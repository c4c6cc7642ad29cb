"""The digest that tells an entry of the group log from another one; tests/learner/test_power_cut.py uses it."""

from horizonrl.broker.api import Message
from horizonrl.broker.log_continuity import entry_digest


def test_an_entry_has_the_digest_that_earlier_checkpoints_hold() -> None:
    """Computed when the id was still a header: a checkpoint of that time has to find its place in the log."""
    joined = Message(
        "groups.joined", b"data", 7, "train-00000000", {"Z": "z", "Horizon-Parts": "2"}
    )
    assert entry_digest(joined) == "5380ef2149c7192e"
    assert entry_digest(Message("groups.train", b"", 8)) == "1c037ca9f6c91ac6"
