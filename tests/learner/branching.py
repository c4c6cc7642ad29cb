"""Random episodes of several branches, as an agent that forks, delegates and edits its history would make them."""

from collections.abc import Sequence

import numpy as np

from horizonrl.common.types import Branch, Episode, Group, Provenance, StopReason, Turn, VersionSpan
from tests.records import make_ticket

PROMPT = (1, 2, 3)
VOCABULARY = 100


def branching_episode(
    rng: np.random.Generator,
    index: int = 0,
    version: int = 1,
    *,
    fork: float = 0.4,
    trained: float = 0.85,
) -> Episode:
    """Return an episode of one to six turns, each of which opens a branch with chance `fork`."""
    ids, turns, branches = [list(PROMPT)], list[Turn](), list[Branch]()
    last: dict[int, int] = {}
    for place in range(int(rng.integers(1, 7))):
        branch = int(rng.integers(len(ids)))
        if place and rng.random() < fork:
            # A fork copies what it continues: sampled ids stand in its prompt, where they are no more trained.
            copied = ids[branch][: int(rng.integers(len(ids[branch]) + 1))]
            prompt = (*copied, *_drawn(rng, 1, 4))
            branches.append(Branch(prompt_ids=prompt, prompt=f"branch {len(ids)}"))
            branch = len(ids)
            ids.append(list(prompt))
        elif branch in last:
            answer = _drawn(rng, 1, 4)
            turns[last[branch]] = turns[last[branch]].model_copy(update={"observation_ids": answer})
            ids[branch] += answer
        turns.append(_turn(rng, branch, version, trained=rng.random() < trained))
        last[branch] = place
        ids[branch] += turns[-1].output_ids
    if not any(turn.trained for turn in turns):
        turns[0] = turns[0].model_copy(update={"trained": True})
    return _episode(index, turns, branches)


def _turn(rng: np.random.Generator, branch: int, version: int, *, trained: bool) -> Turn:
    output = _drawn(rng, 1, 5)
    cut = int(rng.integers(1, len(output) + 1))
    spans = [VersionSpan(version=version - 1, lineage=0, tokens=cut)]
    if cut < len(output):
        spans.append(VersionSpan(version=version, lineage=0, tokens=len(output) - cut))
    return Turn(
        output_ids=output,
        logprobs=tuple(float(np.float32(logprob)) for logprob in rng.uniform(-2, 0, len(output))),
        spans=tuple(spans),
        reward=float(rng.integers(-2, 3)),
        branch=branch,
        trained=trained,
    )


def straightened(episode: Episode) -> Episode:
    """Return the episode with the same turns in a single branch, all of them trained."""
    turns = [
        turn.model_copy(
            update={"branch": 0, "trained": True, "observation_ids": (9,) if place else (8, 9)}
        )
        for place, turn in enumerate(episode.turns)
    ]
    return _episode(episode.index, turns, [])


def branching_group(seed: int, number: int = 0, group_size: int = 4, version: int = 1) -> Group:
    """Return a group whose episodes branch, each in its own way."""
    rng = np.random.default_rng(seed)
    episodes = tuple(branching_episode(rng, index, version) for index in range(group_size))
    ticket = make_ticket(number, group_size=group_size, version=version, horizon_turns=6)
    return Group(ticket=ticket, episodes=episodes, provenance=Provenance(actor="test"))


def fan_out(index: int, reward: float, subagents: int, version: int = 1) -> Episode:
    """Return an episode that asks some sub-agents and then answers."""
    rng = np.random.default_rng((index, subagents))
    turns = [_turn(rng, 0, version, trained=True)]
    turns[0] = turns[0].model_copy(update={"observation_ids": (4,)})
    turns += [_turn(rng, branch, version, trained=True) for branch in range(1, subagents + 1)]
    turns.append(_turn(rng, 0, version, trained=True))
    turns = [turn.model_copy(update={"reward": 0.0}) for turn in turns[:-1]] + [
        turns[-1].model_copy(update={"reward": reward})
    ]
    return _episode(
        index, turns, [Branch(prompt_ids=(30 + branch,)) for branch in range(subagents)]
    )


def _episode(index: int, turns: Sequence[Turn], branches: Sequence[Branch]) -> Episode:
    return Episode(
        index=index,
        prompt_ids=PROMPT,
        turns=tuple(turns),
        branches=tuple(branches),
        stop=StopReason.HORIZON,
    )


def _drawn(rng: np.random.Generator, least: int, below: int) -> tuple[int, ...]:
    return tuple(int(token) for token in rng.integers(0, VOCABULARY, rng.integers(least, below)))
