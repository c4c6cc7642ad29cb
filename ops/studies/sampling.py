"""`horizonrl study sampling`: what other ways of sampling groups would have cost, from the groups that a run consumed.

Place in the flow: `episodes/` of finished runs → **rules applied to recorded groups** → a table. Nothing is trained. A
group of G episodes is informative if its returns differ; one whose returns are all equal has no advantage and is
dropped. Three rules are tried:

- `smaller`: g episodes per group instead of G.
- `screen`: k episodes first, and the other G - k only if the returns of the first k differ (SPEED, arXiv 2506.09016).
- `stop`: all G at once, ended as soon as the first k to finish have equal returns.

Which of a group's episodes come first is arbitrary under the first two, so their chances are exact, over all subsets.
Under `stop` the shortest episodes finish first: who finishes early is decided by what the policy did.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import comb
from pathlib import Path
from statistics import pvariance

from horizonrl.common.errors import ConfigError
from horizonrl.common.types import Kind
from horizonrl.ops.bench.origin import commit_of_program, describe_machine
from horizonrl.ops.rundir.directory import read_config
from horizonrl.ops.rundir.episodes import EpisodeFiles


@dataclass(frozen=True, slots=True)
class PlayedGroup:
    """The returns of a train ticket's episodes and their lengths in turns, which are its environment steps."""

    returns: tuple[float, ...]
    turns: tuple[int, ...]

    @property
    def informative(self) -> bool:
        return len(set(self.returns)) > 1

    @property
    def spread(self) -> float:
        """Variance of the returns: with successes alone p (1 - p), largest where half of the episodes succeed."""
        return pvariance(self.returns)


@dataclass(frozen=True, slots=True)
class Yielded:
    """What a rule leaves of one group, in expectation."""

    steps: float
    informative: float
    """Chance that the group is trained: it is informative, and the rule does not end it."""
    episodes: float
    """Expected number of trained episodes."""


@dataclass(frozen=True, slots=True)
class RuleCost:
    """A rule over all groups, against the groups as they were played."""

    rule: str
    steps_per_group: float | None
    """Environment steps for each trained group, as a share of those of the run; None if it trains none."""
    steps_per_episode: float | None
    """Environment steps for each trained episode, as a share of those of the run; None if it trains none."""
    lost: float
    """Share of the informative groups that the rule loses."""
    spread: float
    """Mean variance of the returns of the informative groups that it loses, as a share of that of all of them."""


Rule = Callable[[PlayedGroup], Yielded]


def as_played(group: PlayedGroup) -> Yielded:
    trained = float(group.informative)
    return Yielded(sum(group.turns), trained, trained * len(group.returns))


def smaller(count: int) -> Rule:
    """Return the rule that plays `count` episodes of each group."""

    def rule(group: PlayedGroup) -> Yielded:
        trained = 1 - all_equal(group.returns, count)
        return Yielded(sum(group.turns) * count / len(group.turns), trained, trained * count)

    return rule


def screen(count: int) -> Rule:
    """Return the rule that plays `count` episodes first, and the others only if the returns of those differ."""

    def rule(group: PlayedGroup) -> Yielded:
        size, kept = len(group.returns), 1 - all_equal(group.returns, count)
        # What is saved: the turns of the others, for each value that all of the first may have.
        saved = 0.0
        for value, times in Counter(group.returns).items():
            episode_turns = [
                turns
                for turns, sample in zip(group.turns, group.returns, strict=True)
                if sample == value
            ]
            chance = comb(times, count) / comb(size, count)
            saved += chance * (sum(group.turns) - count * sum(episode_turns) / times)
        return Yielded(sum(group.turns) - saved, kept, kept * size)

    return rule


def stop(count: int) -> Rule:
    """Return the rule that ends a group once the first `count` episodes to finish have equal returns.

    Episodes take turns side by side. Those that finish in the same turn as the deciding one are counted whole.
    """

    def rule(group: PlayedGroup) -> Yielded:
        order = sorted(range(len(group.turns)), key=group.turns.__getitem__)
        if len({group.returns[index] for index in order[:count]}) > 1:
            return as_played(group)
        last = group.turns[order[count - 1]]
        return Yielded(sum(min(turns, last) for turns in group.turns), 0.0, 0.0)

    return rule


def all_equal(returns: Sequence[float], count: int) -> float:
    """Return the chance that `count` of the returns, drawn without replacement, are all equal."""
    return sum(comb(times, count) for times in Counter(returns).values()) / comb(
        len(returns), count
    )


def costs(groups: Sequence[PlayedGroup]) -> list[RuleCost]:
    """Return what each rule would have cost. Raises ConfigError if no group was informative, or if sizes differ."""
    sizes = sorted({len(group.returns) for group in groups})
    if len(sizes) > 1:
        rule_costs = ", ".join(map(str, sizes))
        raise ConfigError(
            f"the groups have {rule_costs} episodes: compare runs of one rollout.group_size"
        )
    size = sizes[0] if sizes else 0
    played = [as_played(group) for group in groups]
    if not any(sample.informative for sample in played):
        raise ConfigError(
            f"none of the {len(groups)} groups has returns that differ: there is nothing to compare"
        )
    rules: dict[str, Rule] = {}
    for count in sorted({size // 2, 3 * size // 4} - {0, 1, size}):
        rules[f"smaller-{count}"], rules[f"screen-{count}"], rules[f"stop-{count}"] = (
            make(count) for make in (smaller, screen, stop)
        )
    return [
        _cost(name, [rule(group) for group in groups], played, groups)
        for name, rule in sorted(rules.items())
    ]


def _cost(
    name: str, kept: Sequence[Yielded], played: Sequence[Yielded], groups: Sequence[PlayedGroup]
) -> RuleCost:
    steps, before = (sum(sample.steps for sample in some) for some in (kept, played))
    trained, episodes = (
        [sum(getattr(sample, what) for sample in some) for some in (kept, played)]
        for what in ("informative", "episodes")
    )
    gone = [was.informative - now.informative for was, now in zip(played, kept, strict=True)]
    spread = (
        sum(sample.informative * group.spread for sample, group in zip(played, groups, strict=True))
        / trained[1]
    )
    lost_spread = sum(
        share * group.spread for share, group in zip(gone, groups, strict=True)
    ) / max(sum(gone), 1e-12)
    return RuleCost(
        name,
        steps_per_group=_ratio(steps, trained[0], before / trained[1]),
        steps_per_episode=_ratio(steps, episodes[0], before / episodes[1]),
        lost=sum(gone) / trained[1],
        spread=lost_spread / spread,
    )


def _ratio(steps: float, count: float, before: float) -> float | None:
    return steps / count / before if count else None


def read_groups(run_dir: Path) -> Iterator[PlayedGroup]:
    """Yield the whole train groups that a run consumed, in order. Raises ConfigError if it kept no episodes."""
    source = EpisodeFiles(run_dir)
    if not source.files:
        raise ConfigError(
            f"{run_dir} has no episodes/step-*.jsonl: give the directory of a run that has trained"
        )
    for _, ticket, records in source.groups():
        if ticket.startswith(f"{Kind.TRAIN}-") and all(
            record["error"] is None for record in records
        ):
            returns = tuple(float(record["return"]) for record in records)
            yield PlayedGroup(returns, tuple(len(record["turns"]) for record in records))


def run(run_dirs: Sequence[Path], json_file: Path | None = None) -> int:
    """Print what each rule would have cost over the groups of some runs together; write it as JSON too if asked to."""
    groups = [group for run_dir in run_dirs for group in read_groups(run_dir)]
    rule_costs = costs(groups)
    informative = sum(group.informative for group in groups)
    print(
        f"{len(groups):,} groups of {len(run_dirs)} runs, {informative / len(groups):.0%} of them informative"
    )
    print(f"{'rule':<10}  steps/group  steps/episode  informative lost  spread of the lost")
    for sample in rule_costs:
        group, episode = (
            "-" if cost is None else f"{cost:.2f}"
            for cost in (sample.steps_per_group, sample.steps_per_episode)
        )
        print(
            f"{sample.rule:<10}  {group:>11}  {episode:>13}  {sample.lost:>16.0%}  {sample.spread:>18.2f}"
        )
    if json_file is not None:
        facts = {
            "command": f"horizonrl study sampling {' '.join(run_dir.name for run_dir in run_dirs)}",
            "seeds": ", ".join(str(read_config(run_dir).run.seed) for run_dir in run_dirs),
            "commit": commit_of_program(),
            "machine": describe_machine(),
            "groups": len(groups),
            "informative": informative / len(groups),
        }
        rules = {sample.rule: asdict(sample) for sample in rule_costs}
        json_file.write_text(
            json.dumps({**facts, "rules": rules}, indent=1) + "\n", encoding="utf-8"
        )
    return 0
