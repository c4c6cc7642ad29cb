"""The accounts of the run: which tickets have ended, and how (docs/invariants.md: conservation).

A ticket ends once. A second end is a defect and raises. The accounts are part of every checkpoint, so that a resumed
learner recognises a repeated group.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from horizonrl.common.errors import RunFailed
from horizonrl.common.state import Outcomes
from horizonrl.common.types import DropReason, Kind


@dataclass
class KindAccounts:
    """The ended tickets of one kind. All numbers below `floor` have ended; `above` has those that ended beyond it."""

    trained: int = 0
    evaluated: int = 0
    void: int = 0
    dropped: Counter[DropReason] = field(default_factory=Counter)
    floor: int = 0
    above: set[int] = field(default_factory=set)

    def ended(self, number: int) -> bool:
        return number < self.floor or number in self.above

    def end(self, number: int) -> None:
        if self.ended(number):
            raise RunFailed(f"ticket number {number} was settled twice: this is a defect, please report it")
        self.above.add(number)
        # Numbers below the floor need no entry: `progress` carries the others, and every actor may follow that key.
        while self.floor in self.above:
            self.above.remove(self.floor)
            self.floor += 1


class TicketAccounts:
    def __init__(self) -> None:
        self._kinds = {kind: KindAccounts() for kind in Kind}

    def ended(self, kind: Kind, number: int) -> bool:
        return self._kinds[kind].ended(number)

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

    def lowest_unsettled(self) -> dict[Kind, int]:
        return {kind: accounts.floor for kind, accounts in self._kinds.items()}

    def above(self) -> dict[Kind, set[int]]:
        """Return, by kind, the numbers beyond the lowest unsettled one that have ended."""
        return {kind: set(accounts.above) for kind, accounts in self._kinds.items()}

    def dump(self) -> dict[str, Any]:
        """Return the accounts as JSON-able values."""
        return {
            kind.value: {
                "trained": accounts.trained,
                "evaluated": accounts.evaluated,
                "void": accounts.void,
                "dropped": {reason.value: count for reason, count in sorted(accounts.dropped.items())},
                "floor": accounts.floor,
                "above": sorted(accounts.above),
            }
            for kind, accounts in self._kinds.items()
        }

    @classmethod
    def restore(cls, dumped: dict[str, Any]) -> "TicketAccounts":
        accounts = cls()
        for kind, values in dumped.items():
            accounts._kinds[Kind(kind)] = KindAccounts(
                trained=values["trained"],
                evaluated=values.get("evaluated", 0),  # older checkpoints know no evaluations
                void=values["void"],
                dropped=Counter({DropReason(reason): count for reason, count in values["dropped"].items()}),
                floor=values["floor"],
                above=set(values["above"]),
            )
        return accounts


def ranges(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return the numbers as ascending ranges (first, last), both inclusive."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        first = found.pop()[0] if found and found[-1][1] == number - 1 else number
        found.append((first, number))
    return tuple(found)
