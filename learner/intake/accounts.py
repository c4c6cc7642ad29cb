"""The accounts of the run: which tickets have ended, and how (docs/invariants.md: conservation).

A ticket ends once. A second end is a defect and raises. The accounts are part of every checkpoint, so that a resumed
learner recognises a repeated group.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from horizonrl.common.errors import RunFailed
from horizonrl.common.state import Outcomes
from horizonrl.common.types import DropReason, Kind


class TicketNumbers:
    """A set of ticket numbers as ascending ranges, however many numbers there are.

    Tickets end almost in order, so the ranges are at most one more than the tickets that are outstanding between them.
    To add or to find a number takes the logarithm of that.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        pairs = sorted(ranges)
        self._firsts = [first for first, _ in pairs]
        self._lasts = [last for _, last in pairs]

    def __contains__(self, number: int) -> bool:
        index = bisect_right(self._firsts, number) - 1
        return index >= 0 and number <= self._lasts[index]

    @property
    def lowest_missing(self) -> int:
        return self._lasts[0] + 1 if self._firsts and self._firsts[0] == 0 else 0

    def add(self, number: int) -> None:
        """Add a number that is not in the set."""
        index = bisect_right(self._firsts, number)
        follows = index > 0 and self._lasts[index - 1] == number - 1
        precedes = index < len(self._firsts) and self._firsts[index] == number + 1
        if follows and precedes:  # it closes a gap: two ranges become one
            self._lasts[index - 1] = self._lasts.pop(index)
            del self._firsts[index]
        elif follows:
            self._lasts[index - 1] = number
        elif precedes:
            self._firsts[index] = number
        else:
            self._firsts.insert(index, number)
            self._lasts.insert(index, number)

    def missing_below(self, number: int) -> int:
        """Return how many numbers below `number` are not in the set."""
        return number - sum(
            min(last + 1, number) - first for first, last in self.ranges() if first < number
        )

    def after_missing(self, count: int) -> int:
        """Return the lowest number below which `count` numbers are missing."""
        held = 0
        for first, last in self.ranges():
            if first - held >= count:
                break
            held += last - first + 1
        return held + count

    def ranges(self, start: int = 0, limit: int | None = None) -> tuple[tuple[int, int], ...]:
        """Return the ranges (first, last), both inclusive, of the numbers from `start` on; the lowest `limit` ones."""
        index = max(0, bisect_right(self._firsts, start) - 1)
        # The range at `place` may lie below `start`
        stop = None if limit is None else index + limit + 1
        pairs = zip(self._firsts[index:stop], self._lasts[index:stop], strict=True)
        return tuple((max(first, start), last) for first, last in pairs if last >= start)[:limit]


@dataclass
class KindAccounts:
    """The ended tickets of one kind."""

    trained: int = 0
    evaluated: int = 0
    void: int = 0
    dropped: Counter[DropReason] = field(default_factory=Counter)
    numbers: TicketNumbers = field(default_factory=TicketNumbers)

    def end(self, number: int) -> None:
        if number in self.numbers:
            raise RunFailed(
                f"ticket number {number} was settled twice: this is a defect, please report it"
            )
        self.numbers.add(number)


class TicketAccounts:
    def __init__(self) -> None:
        self._kinds = {kind: KindAccounts() for kind in Kind}

    def ended(self, kind: Kind, number: int) -> bool:
        return number in self._kinds[kind].numbers

    def train(self, kind: Kind, number: int) -> None:
        self._kinds[kind].end(number)
        self._kinds[kind].trained += 1

    def evaluate(self, number: int) -> None:
        """End an eval ticket by its group."""
        self._kinds[Kind.EVAL].end(number)
        self._kinds[Kind.EVAL].evaluated += 1

    def drop(self, kind: Kind, number: int, reason: DropReason) -> None:
        self._kinds[kind].end(number)
        self._kinds[kind].dropped[reason] += 1

    def void(self, kind: Kind, number: int) -> None:
        self._kinds[kind].end(number)
        self._kinds[kind].void += 1

    def outcomes(self) -> dict[Kind, Outcomes]:
        return {
            kind: Outcomes(
                trained=accounts.trained,
                evaluated=accounts.evaluated,
                dropped=dict(accounts.dropped),
                void=accounts.void,
            )
            for kind, accounts in self._kinds.items()
        }

    def unsettled_below(self, kind: Kind, number: int) -> int:
        """Return how many tickets of a kind with a number below `number` have not ended."""
        return self._kinds[kind].numbers.missing_below(number)

    def after_unsettled(self, kind: Kind, count: int) -> int:
        """Return the lowest number below which `count` tickets of a kind have not ended."""
        return self._kinds[kind].numbers.after_missing(count)

    def lowest_unsettled(self) -> dict[Kind, int]:
        return {kind: accounts.numbers.lowest_missing for kind, accounts in self._kinds.items()}

    def ended_ranges(self) -> dict[Kind, tuple[tuple[int, int], ...]]:
        """Return, by kind, the ranges (first, last) of the numbers that have ended."""
        return {kind: accounts.numbers.ranges() for kind, accounts in self._kinds.items()}

    def dump(self) -> dict[str, Any]:
        """Return the accounts as JSON-able values."""
        return {
            kind.value: {
                "trained": accounts.trained,
                "evaluated": accounts.evaluated,
                "void": accounts.void,
                "dropped": {
                    reason.value: count for reason, count in sorted(accounts.dropped.items())
                },
                "ended": [list(pair) for pair in accounts.numbers.ranges()],
            }
            for kind, accounts in self._kinds.items()
        }

    @classmethod
    def restore(cls, dumped: dict[str, Any]) -> "TicketAccounts":
        accounts = cls()
        for kind, values in dumped.items():
            accounts._kinds[Kind(kind)] = KindAccounts(
                trained=values["trained"],
                evaluated=values["evaluated"],
                void=values["void"],
                dropped=Counter(
                    {DropReason(reason): count for reason, count in values["dropped"].items()}
                ),
                numbers=TicketNumbers(values["ended"]),
            )
        return accounts
