import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horizonrl.common.errors import RunFailed
from horizonrl.common.types import DropReason, Kind
from horizonrl.learner.intake.accounts import TicketAccounts

ends = st.sampled_from(["train", "evaluate", "void", *DropReason])


def settle(accounts: TicketAccounts, number: int, end: str) -> None:
    match end:
        case "train":
            accounts.train(Kind.EVAL, number)
        case "evaluate":
            accounts.evaluate(number)
        case "void":
            accounts.void(Kind.EVAL, number)
        case DropReason() as reason:
            accounts.drop(Kind.EVAL, number, reason)


@given(st.permutations(range(30)), st.lists(ends, min_size=30, max_size=30), st.integers(0, 30))
def test_issued_is_settled_plus_outstanding_at_every_moment(order: list[int], kinds: list[str], count: int) -> None:
    """Of one kind; eval tickets are the ones that know every end."""
    accounts = TicketAccounts()
    for number, end in list(zip(order, kinds, strict=True))[:count]:
        settle(accounts, number, end)
    outstanding = [number for number in range(30) if not accounts.ended(Kind.EVAL, number)]
    assert accounts.outcomes()[Kind.EVAL].settled + len(outstanding) == 30
    assert accounts.lowest_unsettled()[Kind.EVAL] == min(outstanding, default=30)


@given(st.integers(0, 5), ends, ends)
def test_no_ticket_ends_twice(number: int, first: str, second: str) -> None:
    accounts = TicketAccounts()
    settle(accounts, number, first)
    with pytest.raises(RunFailed, match="twice"):
        settle(accounts, number, second)


@given(st.sets(st.integers(0, 40)), st.lists(ends, min_size=41, max_size=41))
def test_books_survive_a_checkpoint(numbers: set[int], kinds: list[str]) -> None:
    accounts = TicketAccounts()
    for number in numbers:
        settle(accounts, number, kinds[number])
    restored = TicketAccounts.restore(json.loads(json.dumps(accounts.dump())))
    assert restored.dump() == accounts.dump()
    assert restored.outcomes() == accounts.outcomes()


def test_books_of_a_checkpoint_from_before_there_were_evaluations_are_read() -> None:
    dumped = TicketAccounts().dump()
    for values in dumped.values():
        del values["evaluated"]
    assert TicketAccounts.restore(dumped).outcomes() == TicketAccounts().outcomes()
