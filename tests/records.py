"""Small valid records for tests."""

from collections.abc import Sequence

from horizonrl.common.types import (
    Branch,
    Episode,
    Group,
    Kind,
    PolicyVersion,
    Provenance,
    StopReason,
    Task,
    Ticket,
    Turn,
    VersionSpan,
)


def make_ticket(
    number: int = 0,
    kind: Kind = Kind.TRAIN,
    group_size: int = 2,
    version: int = 0,
    horizon_turns: int = 4,
) -> Ticket:
    return Ticket(
        number=number,
        kind=kind,
        task=Task(env_id="textcraft", task_id="stick"),
        group_size=group_size,
        horizon_turns=horizon_turns,
        issued_at_version=PolicyVersion(version=version),
    )


def make_turn(
    tokens: Sequence[int] = (5, 6),
    version: int = 0,
    reward: float = 0.0,
    answer: Sequence[int] = (),
    *,
    branch: int = 0,
    trained: bool = True,
) -> Turn:
    return Turn(
        output_ids=tuple(tokens),
        logprobs=(-0.5,) * len(tokens),
        spans=(VersionSpan(version=version, lineage=0, tokens=len(tokens)),),
        observation_ids=tuple(answer),
        reward=reward,
        branch=branch,
        trained=trained,
    )


def make_episode(
    index: int,
    *turns: Turn,
    stop: StopReason = StopReason.TERMINATED,
    branches: Sequence[Branch] = (),
) -> Episode:
    return Episode(
        index=index,
        prompt_ids=() if stop.broken and not turns else (1, 2, 3),
        turns=turns,
        stop=stop,
        success=sum(turn.reward for turn in turns) > 0,
        error="it broke" if stop.broken else None,
        branches=tuple(branches),
    )


def branched_episode(index: int, reward: float = 1.0, version: int = 0) -> Episode:
    """Return an episode of three branches: the main conversation, a sub-agent in between, and an edited history."""
    turns = (
        make_turn((5, 6), version, answer=(7,)),
        make_turn((8,), version, answer=(9,), branch=1),
        make_turn((10, 11, index), version, branch=1),
        make_turn((12,), version),
        make_turn((13, 14), version, reward, branch=2),
    )
    branches = (
        Branch(prompt_ids=(20, 21), prompt="sub"),
        Branch(prompt_ids=(1, 2, 3, 5, 6, 22), prompt="edited"),
    )
    return make_episode(index, *turns, branches=branches)


def half_trained_episode(index: int, reward: float = 1.0) -> Episode:
    """Return a single sequence whose first turn carries no loss."""
    return make_episode(
        index, make_turn((5, 6), answer=(7,), trained=False), make_turn((8,), reward=reward)
    )


def make_group(
    number: int = 0,
    rewards: Sequence[float | None] = (1.0, 0.0),
    version: int = 0,
    kind: Kind = Kind.TRAIN,
) -> Group:
    """Return a group with one episode a reward; None makes a broken episode."""
    episodes = [
        make_episode(index, stop=StopReason.ENV_ERROR)
        if reward is None
        else make_episode(
            index, make_turn((5, 6, index), version, answer=(7,)), make_turn((8,), version, reward)
        )
        for index, reward in enumerate(rewards)
    ]
    return Group(
        ticket=make_ticket(number, kind, len(episodes), version),
        episodes=tuple(episodes),
        provenance=Provenance(actor="test"),
    )
