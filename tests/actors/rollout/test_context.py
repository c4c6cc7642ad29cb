"""A context that is full before the horizon is: the episode stops, or goes on in a shorter branch."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horizonrl.actors.engines.scripted import ScriptedPolicy
from horizonrl.actors.policy import Generation
from horizonrl.actors.rollout.context import SUMMARY_REQUEST, Exchange, window
from horizonrl.actors.rollout.rollout import Rollout
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import ConfigError
from horizonrl.common.state import ContextRule
from horizonrl.common.types import MAX_BRANCHES, Episode, Kind, Sampling, StopReason, Task, Ticket
from horizonrl.envs.api import Observation, Step
from tests.actors.players import Echo, make_chat

CHAT = make_chat()
TURN_TOKENS = 8
SHORTENED = [ContextRule.WINDOW, ContextRule.SUMMARISE]


class Telling(Echo):
    """Tells as many words as it is asked to, one number after the other; never over."""

    def __init__(self, words: Sequence[int], task: str = "count on") -> None:
        super().__init__(last=10**6)
        self.words = itertools.cycle(words)
        self.task = task

    async def reset(self, task_id: str) -> Observation:
        self.turns = 0
        return Observation(self.task)

    async def step(self, text: str) -> Step:
        self.turns += 1
        return Step(f"{self.turns}: " + "word " * next(self.words), reward=1.0, terminated=False)


@dataclass
class Asked(ScriptedPolicy):
    """Draws random ids, and remembers what it was asked."""

    limit: int = 200
    asked: list[tuple[int, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(vocabulary=200, max_context_tokens=self.limit, seed=7)

    async def generate(self, ids: Sequence[int], **options: Any) -> Generation:
        self.asked.append(tuple(ids))
        return await super().generate(ids, **options)


def order(horizon_turns: int = 30, kind: Kind = Kind.TRAIN, announce: bool = False) -> Ticket:
    return Ticket(
        number=0,
        kind=kind,
        task=Task(env_id="echo", task_id="say"),
        group_size=1,
        horizon_turns=horizon_turns,
        announce_horizon=announce,
        sampling=Sampling(max_turn_tokens=TURN_TOKENS, seed=3),
    )


def play(
    rule: ContextRule, policy: Asked, environment: Telling, ticket: Ticket | None = None
) -> Episode:
    rollout = Rollout(policy, CHAT, "be brief", step_timeout_s=5.0, context=rule)
    return asyncio.run(rollout.episode(environment, ticket or order(), 0))


def contexts(episode: Episode) -> list[tuple[int, ...]]:
    """Return what each turn read, in order of time, as the episode has it."""
    read: dict[int, tuple[int, ...]] = {}
    for prompt, turns in episode.by_branch():
        ids = prompt
        for place, turn in turns:
            read[place] = ids
            ids += turn.output_ids + turn.observation_ids
    return [read[place] for place in range(len(episode.turns))]


def text_of(ids: Sequence[int]) -> str:
    return CHAT.decode(ids)


@pytest.mark.parametrize("rule", ContextRule)
@settings(max_examples=30)
@given(
    words=st.lists(st.integers(0, 30), min_size=1, max_size=6),
    limit=st.integers(120, 400),
    horizon_turns=st.integers(1, 40),
)
def test_each_turn_stands_in_one_branch_after_what_it_read_and_no_context_is_exceeded(
    rule: ContextRule, words: list[int], limit: int, horizon_turns: int
) -> None:
    policy = Asked(limit=limit)
    episode = play(rule, policy, Telling(words), order(horizon_turns))
    if episode.stop is StopReason.UNFIT:
        return
    assert contexts(episode) == policy.asked
    assert all(len(asked) + TURN_TOKENS <= limit for asked in policy.asked)
    assert episode.stop in (StopReason.HORIZON, StopReason.CONTEXT)
    assert len(episode.turns) <= horizon_turns
    assert (episode.stop is StopReason.HORIZON) == (len(episode.turns) == horizon_turns)
    assert all(turn.trained for turn in episode.turns)
    # A branch goes on where the one before it ended: never back and forth.
    assert [turn.branch for turn in episode.turns] == sorted(turn.branch for turn in episode.turns)
    if rule is ContextRule.STOP:
        assert episode.linear


def test_stop_ends_the_episode_where_the_others_reach_the_horizon() -> None:
    ended = {rule: play(rule, Asked(limit=250), Telling([6])) for rule in ContextRule}
    assert ended[ContextRule.STOP].stop is StopReason.CONTEXT
    assert len(ended[ContextRule.STOP].turns) < 15
    for rule in SHORTENED:
        assert (ended[rule].stop, len(ended[rule].turns)) == (StopReason.HORIZON, 30)
        assert 2 <= len(ended[rule].branches) <= 15


@pytest.mark.parametrize("rule", SHORTENED)
def test_until_the_context_is_full_nothing_differs(rule: ContextRule) -> None:
    """An episode that fits is the same, id for id, under every rule."""
    episodes = [
        play(each, Asked(limit=2_000), Telling([3]), order(10)) for each in (ContextRule.STOP, rule)
    ]
    timeless = [
        episode.model_copy(update={"generate_s": 0.0, "environment_s": 0.0}) for episode in episodes
    ]
    assert timeless[0] == timeless[1]
    assert episodes[0].linear


def test_a_window_keeps_the_task_and_the_newest_turns_id_for_id_and_marks_the_gap() -> None:
    episode = play(ContextRule.WINDOW, Asked(limit=250), Telling([4]))
    played = 0
    for number, branch in enumerate(episode.branches, 1):
        played += len(episode.by_branch()[number - 1][1])
        text = text_of(branch.prompt_ids)
        assert "be brief" in text and "count on" in text
        assert len(branch.prompt_ids) <= (250 - TURN_TOKENS) // 2
        dropped = int(text.partition("[")[2].partition(" ")[0])
        mark = f"[{dropped} earlier turn{'s' if dropped > 1 else ''} left out]"
        kept = episode.turns[dropped:played]
        tail = branch.prompt_ids
        for turn in reversed(kept):
            answer = CHAT.delta(turn.output_ids, turn.observation)
            assert tail[-len(answer) :] == answer
            tail = tail[: -len(answer)]
            assert tail[-len(turn.output_ids) :] == turn.output_ids
            tail = tail[: -len(turn.output_ids)]
        assert tail == CHAT.open(
            "be brief", f"count on\n\n{mark}\n\n{episode.turns[dropped - 1].observation}"
        )


def test_a_summary_is_a_turn_of_the_policy_and_what_follows_begins_with_the_task_and_it() -> None:
    episode = play(ContextRule.SUMMARISE, Asked(limit=300), Telling([6]))
    sequences = episode.by_branch()
    assert len(sequences) > 2
    observed = 0
    for number, branch in enumerate(episode.branches, 1):
        turns = sequences[number - 1][1]
        place, said = turns[-1]
        request = turns[-2][1]
        assert request.observation == SUMMARY_REQUEST
        assert request.observation_ids == CHAT.delta(request.output_ids, SUMMARY_REQUEST)
        assert (said.reward, said.observation_ids, said.trained) == (0.0, (), True)
        assert len(said.output_ids) <= TURN_TOKENS
        # The environment's last observation was not read in the old branch: it stands at the new one's end.
        observed += len(turns) - 1
        message = (
            f"count on\n\n[Your summary of {place} earlier turns]\n{said.text.strip()}\n\n{observed}: "
            + "word " * 6
        )
        assert branch.prompt == message
        assert branch.prompt_ids == CHAT.open("be brief", message)
    # The horizon counts model calls, so each summary takes a turn; the environment has answered all the others.
    assert episode.episode_return == len(episode.turns) - len(episode.branches)


@pytest.mark.parametrize("rule", SHORTENED)
def test_an_announced_horizon_is_right_in_every_branch(rule: ContextRule) -> None:
    policy = Asked(limit=300)
    episode = play(rule, policy, Telling([4]), order(announce=True))
    assert episode.branches
    firsts = {turn.branch: place for place, turn in reversed(list(enumerate(episode.turns)))}
    for number, branch in enumerate(episode.branches, 1):
        assert branch.prompt.rstrip().endswith(f"[{30 - firsts[number]} turns left]")
        assert f"[{30} turns left]" not in branch.prompt


def test_the_last_turn_of_a_horizon_is_no_summary() -> None:
    for horizon_turns in range(2, 31):
        episode = play(ContextRule.SUMMARISE, Asked(limit=300), Telling([6]), order(horizon_turns))
        assert episode.turns[-1].reward == 1.0, horizon_turns


@pytest.mark.parametrize("rule", SHORTENED)
def test_an_observation_that_fits_nowhere_ends_the_episode_as_truncated(rule: ContextRule) -> None:
    episode = play(rule, Asked(limit=150), Telling([1, 500]))
    assert (episode.stop, episode.error) == (StopReason.CONTEXT, None)
    assert episode.stop.truncated
    assert len(episode.turns) - len(episode.branches) <= 3


@pytest.mark.parametrize("rule", SHORTENED)
def test_a_first_prompt_without_room_for_a_turn_is_unfit_and_a_demonstration_is_never_shortened(
    rule: ContextRule,
) -> None:
    assert play(rule, Asked(limit=20), Telling([1])).stop is StopReason.UNFIT
    demo = play(rule, Asked(limit=150), Telling([20]), order(kind=Kind.DEMO))
    assert demo.stop is StopReason.UNFIT
    assert demo.branches == ()


def test_an_episode_has_a_bounded_number_of_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horizonrl.actors.rollout.rollout.MAX_BRANCHES", 3)
    episode = play(ContextRule.WINDOW, Asked(limit=250), Telling([6]), order(60))
    assert (episode.stop, len(episode.branches)) == (StopReason.CONTEXT, 2)
    assert MAX_BRANCHES == 256


def test_a_window_without_room_for_a_turn_keeps_the_last_observation_alone() -> None:
    def render(message: str) -> tuple[int, ...]:
        return tuple(range(len(message.split())))

    turns = [Exchange((1,) * 30, (2,) * 30, "said", "seen " * words) for words in (5, 20)]
    opening = window(render, "the task", turns, 50)
    assert opening is not None
    assert opening.text == "the task\n\n[2 earlier turns left out]\n\n" + "seen " * 20
    assert window(render, "the task", turns, 20) is None


@pytest.mark.parametrize("kind", ["gae", "vtrace"])
def test_an_advantage_along_one_sequence_refuses_a_context_that_is_shortened(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"set rollout\.context to stop"):
        RunConfig.load([], [f"--advantage.kind={kind}", "--rollout.context=window"])


def test_the_run_tells_its_actors_the_rule() -> None:
    config = RunConfig.load([], ["--rollout.context=summarise"])
    assert config.settings.context is ContextRule.SUMMARISE
    assert RunConfig.load([], []).settings.context is ContextRule.STOP
    # Dr. GRPO divides by the most tokens of an episode, which a shortened context does not bound.
    assert config.longest_episode_tokens == 30 * config.rollout.max_turn_tokens
