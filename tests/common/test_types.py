import pytest
from pydantic import ValidationError

from horizonrl.common.types import (
    Episode,
    Group,
    Kind,
    Provenance,
    StopReason,
    Task,
    Ticket,
    Turn,
    VersionSpan,
)


def turn(tokens: int = 2, version: int = 0, reward: float = 0.0) -> Turn:
    return Turn(
        output_ids=tuple(range(tokens)),
        logprobs=(-0.5,) * tokens,
        spans=(VersionSpan(version=version, lineage=0, tokens=tokens),),
        reward=reward,
    )


def ticket(group_size: int = 2, horizon_turns: int = 3) -> Ticket:
    return Ticket(
        number=7,
        kind=Kind.TRAIN,
        task=Task(env_id="textcraft", task_id="stick"),
        group_size=group_size,
        horizon_turns=horizon_turns,
    )


def episode(index: int, *turns: Turn, stop: StopReason = StopReason.HORIZON) -> Episode:
    return Episode(index=index, prompt_ids=(1, 2), turns=turns, stop=stop, error="gone" if stop.broken else None)


def group(*episodes: Episode, horizon_turns: int = 3) -> Group:
    return Group(ticket=ticket(len(episodes), horizon_turns), episodes=episodes, provenance=Provenance(actor="a"))


def test_every_stop_reason_is_exactly_one_of_terminated_truncated_and_broken() -> None:
    for reason in StopReason:
        assert [reason.terminated, reason.truncated, reason.broken].count(True) == 1


def test_a_horizon_cut_is_truncated_and_never_terminated() -> None:
    assert StopReason.HORIZON.truncated
    assert not StopReason.HORIZON.terminated


def test_each_generated_token_has_a_logprob_and_a_version() -> None:
    with pytest.raises(ValidationError, match="1 logprobs for 2"):
        Turn(output_ids=(1, 2), logprobs=(-1.0,), spans=(VersionSpan(version=0, lineage=0, tokens=2),))
    with pytest.raises(ValidationError, match="cover 1 of 2"):
        Turn(output_ids=(1, 2), logprobs=(-1.0, -1.0), spans=(VersionSpan(version=0, lineage=0, tokens=1),))


@pytest.mark.parametrize("logprob", [0.1, float("nan"), float("-inf")])
def test_a_logprob_is_finite_and_not_above_zero(logprob: float) -> None:
    with pytest.raises(ValidationError):
        Turn(output_ids=(1,), logprobs=(logprob,), spans=(VersionSpan(version=0, lineage=0, tokens=1),))


def test_a_broken_episode_says_what_broke() -> None:
    with pytest.raises(ValidationError, match="must say what broke"):
        Episode(index=0, prompt_ids=(), turns=(), stop=StopReason.ENV_ERROR)


def test_a_group_is_what_its_ticket_ordered() -> None:
    with pytest.raises(ValidationError, match="1 episodes for a ticket of 2"):
        Group(ticket=ticket(2), episodes=(episode(0, turn()),), provenance=Provenance(actor="a"))
    with pytest.raises(ValidationError, match="indexes"):
        group(episode(1, turn()), episode(0, turn()))
    with pytest.raises(ValidationError, match="2 turns under a horizon of 1"):
        group(episode(0, turn(), turn()), horizon_turns=1)


def test_a_groups_age_is_that_of_its_oldest_valid_token() -> None:
    made = group(
        episode(0, turn(version=5), turn(version=7)),
        episode(1, turn(version=6)),
        episode(2, turn(version=1), stop=StopReason.POLICY_ERROR),
    )
    assert (made.oldest_version, made.newest_version) == (5, 7)


def test_the_ticket_id_is_made_of_kind_and_number_alone() -> None:
    assert ticket().ticket_id == "train-00000007"
    assert ticket(group_size=4).ticket_id == "train-00000007"
