"""What a run's training episodes cost, by the horizon that they were given: turns of solved and of unsolved ones.

Place in the flow: `episodes/` of a run directory → **played** → `outcome.py`. It says why one horizon learns from
fewer tokens than another, which no success curve shows.
"""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path

from horizonrl.common.types import Kind, StopReason
from horizonrl.ops.rundir.episodes import EpisodeFiles


@dataclass(frozen=True, slots=True)
class Played:
    """The valid episodes of one horizon that a run's RL steps consumed."""

    horizon: int
    episodes: int
    solved: int
    truncated: int
    """Cut by the horizon, the context, or the environment's own limit."""
    turns_solved: int
    turns_unsolved: int
    repeated: int
    """Turns of unsolved episodes that said what an earlier turn of the same episode had said."""
    by_context: int | None = None
    """Cut by the context, so that the horizon was not reached; None in results of a release that did not count it."""

    def shares(self) -> dict[str, float | None]:
        """Return what a report shows of the counts; None is a share or a mean of nothing."""
        unsolved = self.episodes - self.solved
        return {
            "solved_share": _ratio(self.solved, self.episodes),
            "truncated_share": _ratio(self.truncated, self.episodes),
            "context_share": None
            if self.by_context is None
            else _ratio(self.by_context, self.episodes),
            "turns_per_solved": _ratio(self.turns_solved, self.solved),
            "turns_per_unsolved": _ratio(self.turns_unsolved, unsolved),
            "repeated_share": _ratio(self.repeated, self.turns_unsolved),
        }


def read_played(run_dir: Path) -> tuple[Played, ...]:
    """Read the episodes that the run directory still keeps; the shortest horizon comes first."""
    return add_up(
        _count(
            int(record["horizon"]),
            record["stop"],
            bool(record["success"]),
            [turn["text"] for turn in turns],
        )
        for _, ticket, records in EpisodeFiles(run_dir).groups()
        if ticket.startswith(Kind.TRAIN.value)
        for record in records
        if (turns := record["turns"]) and not StopReason(record["stop"]).broken
    )


def add_up(parts: Iterable[Played]) -> tuple[Played, ...]:
    """Add up what belongs to the same horizon."""
    by_horizon: dict[int, list[Played]] = {}
    for part in parts:
        by_horizon.setdefault(part.horizon, []).append(part)
    return tuple(_sum(horizon, entries) for horizon, entries in sorted(by_horizon.items()))


def _sum(horizon: int, parts: Sequence[Played]) -> Played:
    counts = (sum(column) for column in zip(*(astuple(part)[1:-1] for part in parts), strict=True))
    by_context = [part.by_context for part in parts if part.by_context is not None]
    complete = len(by_context) == len(parts)
    return replace(Played(horizon, *counts), by_context=sum(by_context) if complete else None)


def _count(horizon: int, stop: str, success: bool, texts: list[str]) -> Played:
    return Played(
        horizon,
        episodes=1,
        solved=int(success),
        truncated=int(StopReason(stop).truncated),
        turns_solved=len(texts) if success else 0,
        turns_unsolved=0 if success else len(texts),
        repeated=0 if success else len(texts) - len(set(texts)),
        by_context=int(stop == StopReason.CONTEXT),
    )


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
