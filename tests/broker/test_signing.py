from pathlib import Path

import pytest

from horizonrl.broker.signing import Seals
from horizonrl.common.errors import ConfigError, ForgedRecord
from horizonrl.common.types import PolicyVersion, Ticket
from tests.records import make_ticket

SEALS = Seals("run", b"k" * 32)
IMPOSSIBLE = [
    *("", "train-", "train-1", "train-000000001", "train--0000001", "Train-00000001", "train-00000001 "),
    *("train-٣٣٣٣٣٣٣٣", "train-" + "9" * 5_000, "train-9999999999999999", "else-00000001"),
]


def test_a_sealed_ticket_is_genuine_and_ends_under_its_end_id() -> None:
    ticket = SEALS.seal(make_ticket(7))
    SEALS.check(ticket)
    assert ticket.end_id.startswith("train-00000007.")
    assert SEALS.ended_by(ticket.end_id) == "train-00000007"
    assert SEALS.seal(ticket) == ticket


def test_a_ticket_issued_again_ends_under_the_same_id() -> None:
    later = make_ticket(7).model_copy(update={"issued": PolicyVersion(version=9)})
    assert SEALS.seal(make_ticket(7)).end_id == SEALS.seal(later).end_id


@pytest.mark.parametrize(
    "forged",
    [
        make_ticket(7),
        Seals("other", b"k" * 32).seal(make_ticket(7)),
        Seals("run", b"K" * 32).seal(make_ticket(7)),
        *(
            SEALS.seal(make_ticket(7)).model_copy(update=change)
            for change in ({"number": 8}, {"horizon_turns": 5}, {"group_size": 3}, {"announce_horizon": True})
        ),
    ],
)
def test_a_ticket_that_was_not_sealed_so_is_forged(forged: Ticket) -> None:
    with pytest.raises(ForgedRecord, match=r"train-0000000\d was not issued by this run's controller"):
        SEALS.check(forged)


@pytest.mark.parametrize("name", IMPOSSIBLE)
@pytest.mark.parametrize("seals", [SEALS, Seals("run")], ids=["sealed", "unsealed"])
def test_an_impossible_id_ends_nothing(seals: Seals, name: str) -> None:
    assert seals.ended_by(name) is None
    assert seals.ended_by(f"{name}.{'0' * 32}") is None


def test_without_a_key_every_ticket_is_believed() -> None:
    plain = Seals("run")
    assert plain.seal(make_ticket(7)).end_id == "train-00000007"
    plain.check(make_ticket(7))
    assert plain.ended_by("train-00000007") == "train-00000007"
    assert SEALS.ended_by("train-00000007") is None


def test_a_key_is_read_from_a_file_and_is_long_enough(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(ConfigError, match="there is no such file"):
        Seals.load("run", path)
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match="5 bytes, at least 32 are a key"):
        Seals.load("run", path)
    path.write_bytes(b"k" * 32 + b"\n")
    assert Seals.load("run", path) == SEALS
