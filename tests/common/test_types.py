import pytest
from pydantic import ValidationError

from horizonrl.common.types import (
    Branch,
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
    return Episode(
        index=index,
        prompt_ids=(1, 2),
        turns=turns,
        stop=stop,
        error="gone" if stop.broken else None,
    )


def group(*episodes: Episode, horizon_turns: int = 3) -> Group:
    return Group(
        ticket=ticket(len(episodes), horizon_turns),
        episodes=episodes,
        provenance=Provenance(actor="a"),
    )


def test_every_stop_reason_is_exactly_one_of_terminated_truncated_and_broken() -> None:
    for reason in StopReason:
        assert [reason.terminated, reason.truncated, reason.broken].count(True) == 1


def test_a_horizon_cut_is_truncated_and_never_terminated() -> None:
    assert StopReason.HORIZON.truncated
    assert not StopReason.HORIZON.terminated


def test_each_generated_token_has_a_logprob_and_a_version() -> None:
    with pytest.raises(ValidationError, match="1 logprobs for 2"):
        Turn(
            output_ids=(1, 2),
            logprobs=(-1.0,),
            spans=(VersionSpan(version=0, lineage=0, tokens=2),),
        )
    with pytest.raises(ValidationError, match="cover 1 of 2"):
        Turn(
            output_ids=(1, 2),
            logprobs=(-1.0, -1.0),
            spans=(VersionSpan(version=0, lineage=0, tokens=1),),
        )


@pytest.mark.parametrize("logprob", [0.1, float("nan"), float("-inf")])
def test_a_logprob_is_finite_and_not_above_zero(logprob: float) -> None:
    with pytest.raises(ValidationError):
        Turn(
            output_ids=(1,),
            logprobs=(logprob,),
            spans=(VersionSpan(version=0, lineage=0, tokens=1),),
        )


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


def in_branch(branch: int, *, answered: bool = False, trained: bool = True) -> Turn:
    return turn().model_copy(
        update={"branch": branch, "observation_ids": (7,) if answered else (), "trained": trained}
    )


def branched(*turns: Turn, branches: int, stop: StopReason = StopReason.HORIZON) -> Episode:
    forks = tuple(Branch(prompt_ids=(3, index)) for index in range(branches))
    error = "gone" if stop.broken else None
    return Episode(index=0, prompt_ids=(1, 2), turns=turns, stop=stop, branches=forks, error=error)


def test_turns_keep_their_place_in_time_over_all_branches() -> None:
    main, sub, back = in_branch(0, answered=True), in_branch(1), in_branch(0)
    made = branched(main, sub, back, branches=1)
    assert made.by_branch() == [((1, 2), [(0, main), (2, back)]), ((3, 0), [(1, sub)])]
    assert made.generated_tokens == 6
    assert not made.linear


def test_an_episode_of_one_sequence_is_linear_unless_a_turn_is_left_out() -> None:
    assert episode(0, turn(), turn()).linear
    assert episode(0, turn()).by_branch() == [((1, 2), [(0, turn())])]
    assert not episode(0, in_branch(0, trained=False), turn()).linear


def test_each_branch_has_a_turn_and_each_turn_a_branch() -> None:
    with pytest.raises(ValidationError, match="branch 1 has no turn"):
        branched(in_branch(0), in_branch(2), branches=2)
    with pytest.raises(ValidationError, match="branch 0 has no turn"):
        branched(in_branch(1), branches=1)
    with pytest.raises(ValidationError, match="a turn of branch 2, and the last branch is 1"):
        branched(in_branch(0), in_branch(1), in_branch(2), branches=1)
    with pytest.raises(ValidationError, match="begins with a prompt"):
        Branch(prompt_ids=())
    with pytest.raises(ValidationError):
        branched(*(in_branch(branch) for branch in range(256)), branches=256)
    assert (
        len(branched(*(in_branch(branch) for branch in range(256)), branches=255).branches) == 255
    )


def test_nobody_has_read_what_answers_the_last_turn_of_a_branch() -> None:
    with pytest.raises(ValidationError, match="the last turn of branch 0 has observation ids"):
        branched(in_branch(0, answered=True), in_branch(1), branches=1)


def test_an_episode_of_which_nothing_is_trained_is_broken() -> None:
    with pytest.raises(ValidationError, match="a turn that is trained"):
        episode(0, in_branch(0, trained=False))
    assert episode(0, in_branch(0, trained=False), stop=StopReason.ENV_ERROR).turns


def test_a_horizon_counts_the_turns_of_all_branches() -> None:
    with pytest.raises(ValidationError, match="2 turns under a horizon of 1"):
        group(branched(in_branch(0), in_branch(1), branches=1), horizon_turns=1)
