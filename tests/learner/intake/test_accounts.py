import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horizonrl.common.errors import RunFailed
from horizonrl.common.types import DropReason, Kind
from horizonrl.learner.intake.accounts import TicketAccounts, TicketNumbers

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
def test_issued_is_settled_plus_outstanding_at_every_moment(
    order: list[int], kinds: list[str], count: int
) -> None:
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


@given(st.lists(st.integers(0, 60), unique=True), st.integers(0, 60), st.integers(1, 8))
def test_ticket_numbers_are_a_set_that_is_kept_as_ranges(
    order: list[int], start: int, limit: int
) -> None:
    numbers, plain = TicketNumbers(), set[int]()
    for number in order:
        assert number not in numbers
        numbers.add(number)
        plain.add(number)
        assert numbers.lowest_missing == next(each for each in range(62) if each not in plain)
    ranges = numbers.ranges()
    assert {each for first, last in ranges for each in range(first, last + 1)} == plain
    assert all(before[1] + 1 < after[0] for before, after in itertools.pairwise(ranges))
    assert {number for number in range(61) if number in numbers} == plain
    above = {each for first, last in numbers.ranges(start) for each in range(first, last + 1)}
    assert above == {each for each in plain if each >= start}
    assert numbers.ranges(start, limit) == numbers.ranges(start)[:limit]
    assert TicketNumbers(ranges).ranges() == ranges
