from pathlib import Path

import pytest

from horizonrl.broker.signing import TicketSigner
from horizonrl.common.errors import ConfigError, ForgedRecord
from horizonrl.common.types import PolicyVersion, Ticket
from tests.records import make_ticket

SIGNER = TicketSigner("run", b"k" * 32)
IMPOSSIBLE = [
    *(
        "",
        "train-",
        "train-1",
        "train-000000001",
        "train--0000001",
        "Train-00000001",
        "train-00000001 ",
    ),
    *("train-٣٣٣٣٣٣٣٣", "train-" + "9" * 5_000, "train-9999999999999999", "else-00000001"),
]


def test_a_signed_ticket_is_genuine_and_ends_under_its_end_id() -> None:
    ticket = SIGNER.sign(make_ticket(7))
    SIGNER.verify(ticket)
    assert ticket.end_id.startswith("train-00000007.")
    assert SIGNER.ended_by(ticket.end_id) == "train-00000007"
    assert SIGNER.sign(ticket) == ticket


def test_a_ticket_issued_again_ends_under_the_same_id() -> None:
    later = make_ticket(7).model_copy(update={"issued": PolicyVersion(version=9)})
    assert SIGNER.sign(make_ticket(7)).end_id == SIGNER.sign(later).end_id


@pytest.mark.parametrize(
    "forged",
    [
        make_ticket(7),
        TicketSigner("other", b"k" * 32).sign(make_ticket(7)),
        TicketSigner("run", b"K" * 32).sign(make_ticket(7)),
        *(
            SIGNER.sign(make_ticket(7)).model_copy(update=change)
            for change in (
                {"number": 8},
                {"horizon_turns": 5},
                {"group_size": 3},
                {"announce_horizon": True},
            )
        ),
    ],
)
def test_a_ticket_that_was_not_signed_so_is_forged(forged: Ticket) -> None:
    with pytest.raises(
        ForgedRecord, match=r"train-0000000\d was not issued by this run's controller"
    ):
        SIGNER.verify(forged)


@pytest.mark.parametrize("name", IMPOSSIBLE)
@pytest.mark.parametrize("signer", [SIGNER, TicketSigner("run")], ids=["signed", "unsigned"])
def test_an_impossible_id_ends_nothing(signer: TicketSigner, name: str) -> None:
    assert signer.ended_by(name) is None
    assert signer.ended_by(f"{name}.{'0' * 32}") is None


def test_without_a_key_every_ticket_is_believed() -> None:
    plain = TicketSigner("run")
    assert plain.sign(make_ticket(7)).end_id == "train-00000007"
    plain.verify(make_ticket(7))
    assert plain.ended_by("train-00000007") == "train-00000007"
    assert SIGNER.ended_by("train-00000007") is None


def test_a_key_is_read_from_a_file_and_is_long_enough(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(ConfigError, match="there is no such file"):
        TicketSigner.load("run", path)
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match="5 bytes, a key has at least 32"):
        TicketSigner.load("run", path)
    path.write_bytes(b"k" * 32 + b"\n")
    assert TicketSigner.load("run", path) == SIGNER
