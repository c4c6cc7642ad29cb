import asyncio
import re
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from horizonrl.actors.rollout import rollout as rollout_module
from horizonrl.actors.rollout.rollout import Rollout
from horizonrl.common.errors import EngineDead, PolicyFailure
from horizonrl.common.types import Episode, Kind, Sampling, StopReason, Task, Ticket
from horizonrl.envs.api import Environment, Observation, Step, TaskSpec
from horizonrl.envs.game import TurnEnvironment
from horizonrl.envs.text_limits import MAX_REPLY_CHARS
from tests.actors.players import Breaking, Echo, Hanging, SayingPolicy, make_chat

CHAT = make_chat()


def ticket(
    horizon_turns: int = 5,
    kind: Kind = Kind.TRAIN,
    announce: bool = False,
    max_turn_tokens: int = 16,
) -> Ticket:
    return Ticket(
        number=0,
        kind=kind,
        task=Task(env_id="echo", task_id="say"),
        group_size=1,
        horizon_turns=horizon_turns,
        announce_horizon=announce,
        sampling=Sampling(max_turn_tokens=max_turn_tokens),
    )


def play(
    environment: Environment,
    order: Ticket | None = None,
    policy: SayingPolicy | None = None,
    states: bool = False,
) -> Episode:
    rollout = Rollout(policy or SayingPolicy(CHAT), CHAT, None, step_timeout_s=0.05, states=states)
    return asyncio.run(rollout.episode(environment, order or ticket(), 0))


def test_what_the_policy_reads_is_what_it_wrote_and_the_rendered_observations_id_for_id() -> None:
    policy = SayingPolicy(CHAT)
    episode = play(Echo(last=3), policy=policy)
    read = episode.prompt_ids
    assert policy.asked[0] == read
    for turn, asked in zip(episode.turns, policy.asked[1:], strict=False):
        read = read + turn.output_ids + turn.observation_ids
        assert asked == read
    assert len(policy.asked) == 3


def test_an_episode_that_the_environment_ends_is_terminated_with_its_reward_on_the_last_turn() -> (
    None
):
    episode = play(Echo(last=3))
    assert (episode.stop, episode.success) == (StopReason.TERMINATED, True)
    assert [turn.reward for turn in episode.turns] == [0.0, 0.0, 1.0]
    assert episode.turns[-1].observation_ids == ()


def test_the_horizon_cuts_and_the_cut_is_truncated() -> None:
    episode = play(Echo(last=9), ticket(horizon_turns=4))
    assert (episode.stop, len(episode.turns), episode.success) == (StopReason.HORIZON, 4, False)


def test_a_turn_has_the_digest_of_the_state_that_it_was_taken_in_if_the_environment_names_one() -> (
    None
):
    class Counted(Echo):
        told = 0

        def state(self) -> str:
            return "even" if self.told % 2 == 0 else "odd"

        async def step(self, text: str) -> Step:
            self.told += 1
            return await super().step(text)

    first, second, third = (turn.state for turn in play(Counted(last=3), states=True).turns)
    assert first == third != second and len(first) == 16
    assert {turn.state for turn in play(Echo(last=3), states=True).turns} == {""}
    assert {turn.state for turn in play(Counted(last=3)).turns} == {""}, "not asked for"


def test_an_attribute_of_the_same_name_is_the_environments_own_business() -> None:
    class Stateful(Echo):
        state = "begun"

    assert play(Stateful(last=3), states=False).stop is StopReason.TERMINATED

    class Wrong(Echo):
        def state(self) -> dict[str, int]:
            return {"told": 0}

    assert play(Wrong(last=3)).stop is StopReason.TERMINATED
    broken = play(Wrong(last=3), states=True)
    assert (broken.stop, broken.error) == (
        StopReason.ENV_ERROR,
        "EnvironmentFailure: state() returned dict: return a text, such as its repr (echo task 'say')",
    )


def test_an_environment_that_ends_on_the_last_turn_is_terminated_rather_than_cut() -> None:
    assert play(Echo(last=4), ticket(horizon_turns=4)).stop is StopReason.TERMINATED


def test_a_turn_that_would_not_fit_into_the_context_is_not_begun() -> None:
    policy = SayingPolicy(CHAT, max_context_tokens=150)
    episode = play(Echo(last=99), ticket(horizon_turns=50), policy)
    assert episode.stop is StopReason.CONTEXT
    assert all(len(asked) + 16 <= 150 for asked in policy.asked)


def test_a_first_prompt_that_does_not_fit_is_a_broken_episode_that_says_so() -> None:
    episode = play(Echo(), policy=SayingPolicy(CHAT, max_context_tokens=20))
    assert (episode.stop, episode.valid) == (StopReason.UNFIT, False)
    assert "first prompt" in (episode.error or "")


def test_a_hanging_environment_is_a_broken_episode_and_not_a_zero() -> None:
    episode = play(Hanging())
    assert episode.stop is StopReason.ENV_TIMEOUT
    assert not episode.valid


def test_a_raising_environment_is_a_broken_episode_that_names_the_error() -> None:
    episode = play(Breaking())
    assert episode.stop is StopReason.ENV_ERROR
    # The line, the task and the action: its author finds the mistake.
    assert re.fullmatch(
        r"RuntimeError: the kitchen is on fire at players.py:\d+ in step \(echo task 'say' after 'go on'\)",
        episode.error,
    )


class Odd(Echo):
    """Gives what no record takes."""

    def __init__(self, first: str = "say something", step: Step | Exception | None = None) -> None:
        super().__init__()
        self.first, self.given = first, step

    async def reset(self, task_id: str) -> Observation:
        return Observation(self.first)

    async def step(self, text: str) -> Step:
        if isinstance(self.given, Exception):
            raise self.given
        return self.given or await super().step(text)


@pytest.mark.parametrize(
    "environment",
    [
        Odd(first="half a character: \ud83d"),
        Odd(step=RuntimeError("half a character: \ud83d")),
        Odd(step=Step("", reward=1.0, terminated=True, success=None)),  # type: ignore[arg-type]
    ],
    ids=["surrogate", "error", "success"],
)
def test_whatever_an_environment_gives_the_episode_breaks_and_not_the_actor(
    environment: Echo,
) -> None:
    rollout = Rollout(SayingPolicy(CHAT, max_context_tokens=10**6), CHAT, None, step_timeout_s=5.0)
    episode = asyncio.run(rollout_module.play(lambda: environment, rollout, ticket(), 0))
    assert (episode.stop, episode.valid, environment.closed) == (StopReason.ENV_ERROR, False, 1)
    assert episode.error


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (
            Odd(first="x" * 300_000),
            "Odd.reset gave an observation of 300,000 characters; by contract it is at most 262,144",
        ),
        (
            Odd(step=Step("y" * 10**7, 1.0, True)),
            "gave an observation of 10,000,000 characters; by contract",
        ),
        (
            Odd(step=Step("", float("nan"), True)),
            "Odd.step gave the reward nan; by contract it is a finite number",
        ),
        (
            Odd(step=Step("", "1.0", True)),
            "Odd.step gave a Step whose reward is a str; by contract it is a float",
        ),  # type: ignore[arg-type]
        (
            Odd(step=Step({"state": 3}, 1.0, True)),
            "gave an observation that is a dict; by contract it is a str",
        ),  # type: ignore[arg-type]
        (
            Odd(step=("", 1.0, True, False, {})),  # type: ignore[arg-type]
            "Odd.step returned a tuple; by contract it is a Step(observation, reward, terminated)",
        ),
        (
            Odd(step=Step("", 1.0, "yes")),
            "gave a Step whose terminated is a str; by contract it is a bool",
        ),  # type: ignore[arg-type]
        (
            Odd(step=Step("", 1.0, True, info={"a": [1]})),
            "gave info['a'], which is a list; by contract",
        ),  # type: ignore[dict-item]
    ],
)
def test_an_answer_of_another_form_breaks_the_episode_and_is_named(
    environment: Odd, said: str
) -> None:
    episode = play(environment, policy=SayingPolicy(CHAT, max_context_tokens=10**6))
    assert episode.stop is StopReason.ENV_ERROR
    assert said in (episode.error or "")
    assert re.search(r" at /.+/test_rollout\.py:\d+ \(echo task 'say'", episode.error or "")


class Silent(TurnEnvironment[str]):
    """A world that forgets to return what follows."""

    env_id = "echo"
    version = "1"

    def __init__(self) -> None:
        super().__init__("plain", max_observation_chars=100)

    @classmethod
    def tasks(cls) -> Sequence[TaskSpec]:
        return Echo.tasks()

    async def start(self, task_id: str) -> tuple[str, str]:
        return "say something", task_id

    def read(self, text: str) -> str:
        return text

    async def follow(self, game: str, action: str) -> Step:
        return None  # type: ignore[return-value]


class Unpacked(Echo):
    async def reset(self) -> Observation:  # type: ignore[override]
        return Observation("say something")


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (Silent(), r"Silent\.follow returned None; by contract it is a Step\(.*\.py:\d+"),
        (Unpacked(), r"TypeError: .*positional argument.* at /.+/test_rollout\.py:\d+"),
    ],
)
def test_a_defect_that_our_code_meets_has_the_line_of_the_method_or_the_class(
    environment: Environment, said: str
) -> None:
    assert re.search(said, play(environment).error or "")


def test_a_method_that_is_no_coroutine_is_named() -> None:
    class Sync(Echo):
        def step(self, text: str) -> Step:  # type: ignore[override]
            return Step("", 1.0, True)

    assert "Sync.step is no `async def`: it returned a horizonrl.envs.api.Step" in (
        play(Sync()).error or ""
    )


def test_numpys_numbers_become_pythons_own() -> None:
    episode = play(Odd(step=Step("done", np.float32(0.5), np.True_, success=np.True_)))  # type: ignore[arg-type]
    assert (episode.stop, episode.episode_return, episode.success) == (
        StopReason.TERMINATED,
        0.5,
        True,
    )


def test_a_deadline_names_the_line_that_waited() -> None:
    class Waits(Echo):
        async def step(self, text: str) -> Step:
            await asyncio.sleep(60)
            return Step("", 1.0, True)

    episode = asyncio.run(
        Rollout(SayingPolicy(CHAT), CHAT, None, step_timeout_s=0.05).episode(Waits(), ticket(), 0)
    )
    assert episode.stop is StopReason.ENV_TIMEOUT
    assert re.search(
        r"no answer within 0.05 s at test_rollout.py:\d+ in step \(echo task 'say' after",
        episode.error or "",
    )


def test_each_failure_is_logged_whole_once() -> None:
    rollout = Rollout(SayingPolicy(CHAT), CHAT, None, step_timeout_s=5.0)
    with capture_logs() as logs:
        for index in range(3):
            asyncio.run(rollout.episode(Breaking(), ticket(), index))
            asyncio.run(rollout.episode(Odd(first="x" * 300_000), ticket(), index))
    told = [line for line in logs if line["event"] == "environment_failed"]
    assert len(told) == 2
    assert "the kitchen is on fire" in told[0]["traceback"] and "players.py" in told[0]["traceback"]
    assert told[0]["reply"] == "go on" and told[0]["prompt"]


def test_a_tickets_seed_makes_another_one_of_each_request() -> None:
    policy, order = SayingPolicy(CHAT), ticket()
    rollout = Rollout(policy, CHAT, None, step_timeout_s=5.0)
    order = order.model_copy(update={"sampling": Sampling(max_turn_tokens=16, seed=5)})
    asyncio.run(rollout.episode(Echo(last=3), order, index=2))
    assert policy.seeds == [(5 + 2) * 4096 + turns for turns in range(3)]


def test_what_the_last_turn_was_answered_is_text_and_no_tokens_when_the_context_ends_the_episode() -> (
    None
):
    class Wordy(Echo):
        async def step(self, text: str) -> Step:
            return Step("word " * 300, reward=0.0, terminated=False)

    policy = SayingPolicy(CHAT, max_context_tokens=150)
    episode = play(Wordy(), ticket(horizon_turns=9), policy)
    assert (episode.stop, len(episode.turns)) == (StopReason.CONTEXT, 1)
    assert episode.turns[-1].observation_ids == ()
    assert episode.turns[-1].observation.startswith("word word")


def test_an_expert_that_hangs_is_a_broken_episode() -> None:
    release = threading.Event()

    class Stuck(Echo):
        def expert(self) -> Any:
            return SimpleNamespace(act=lambda _: release.wait(5) and "")

    try:
        episode = play(Stuck(), ticket(kind=Kind.DEMO))
    finally:
        release.set()
    assert (episode.stop, episode.valid) == (StopReason.ENV_TIMEOUT, False)


def test_experts_that_hang_take_no_thread_from_the_others() -> None:
    """`asyncio.to_thread`, which fetches the weights too, has a few more threads than the machine has cores."""
    release = threading.Event()

    class Stuck(Echo):
        def expert(self) -> Any:
            return SimpleNamespace(act=lambda _: release.wait(30) and "")

    async def scenario() -> None:
        rollout = Rollout(SayingPolicy(CHAT), CHAT, None, step_timeout_s=0.05)
        hanging = (rollout.episode(Stuck(), ticket(kind=Kind.DEMO), index) for index in range(40))
        episodes = await asyncio.gather(*hanging)
        assert {episode.stop for episode in episodes} == {StopReason.ENV_TIMEOUT}
        async with asyncio.timeout(5.0):
            assert await asyncio.to_thread(lambda: "runs") == "runs"

    try:
        asyncio.run(scenario())
    finally:
        release.set()


def test_a_failed_request_breaks_the_episode_and_a_dead_engine_ends_the_rollout() -> None:
    def fail() -> None:
        raise PolicyFailure("no room")

    def die() -> None:
        raise EngineDead("gone")

    assert play(Echo(), policy=SayingPolicy(CHAT, fail=fail)).stop is StopReason.POLICY_ERROR
    with pytest.raises(EngineDead):
        play(Echo(), policy=SayingPolicy(CHAT, fail=die))


def test_a_demonstration_is_played_by_the_expert_with_certain_logprobs() -> None:
    policy = SayingPolicy(CHAT)
    episode = play(Echo(last=2), ticket(kind=Kind.DEMO), policy)
    assert policy.asked == []
    assert [turn.text for turn in episode.turns] == ["yes", "yes"]
    assert {logprob for turn in episode.turns for logprob in turn.logprobs} == {0.0}


def test_the_agent_is_told_its_remaining_turns_only_where_the_ticket_says_so() -> None:
    policy = SayingPolicy(CHAT)
    episode = play(Echo(last=9), ticket(horizon_turns=3, announce=True), policy)
    assert episode.stop is StopReason.HORIZON
    for read, remaining in zip(policy.asked, (3, 2, 1), strict=True):
        assert CHAT.decode(read).count("turns left]") == 4 - remaining
        assert f"[{remaining} turns left]" in CHAT.decode(read)
    assert episode.prompt.endswith("[3 turns left]")
    assert episode.turns[0].observation.endswith("[2 turns left]")
    assert episode.turns[-1].observation == "you said go on", "nobody reads the last one"
    silent = SayingPolicy(CHAT)
    play(Echo(last=3), policy=silent)
    assert "turns left" not in CHAT.decode(silent.asked[-1])


def test_an_expert_reads_the_environments_own_words_and_the_policy_learns_from_the_announced_ones() -> (
    None
):
    heard: list[str] = []

    class Listening:
        def act(self, observation: str) -> str:
            heard.append(observation)
            return "yes"

    class Watched(Echo):
        def expert(self) -> Listening:  # type: ignore[override]
            return Listening()

    episode = play(Watched(last=2), ticket(kind=Kind.DEMO, horizon_turns=5, announce=True))
    assert heard == ["say something", "you said yes"]
    assert "[5 turns left]" in CHAT.decode(episode.prompt_ids)
    assert "[4 turns left]" in CHAT.decode(episode.turns[0].observation_ids)


@pytest.mark.parametrize(
    ("max_turn_tokens", "max_context_tokens", "reason"),
    [
        (
            3,
            512,
            r"a turn of the demonstration has 4 tokens and rollout.max_turn_tokens is 3: raise it",
        ),
        (16, 150, r"up to turn \d+ has"),
    ],
)
def test_a_demonstration_that_does_not_fit_is_no_episode_rather_than_a_shorter_one(
    max_turn_tokens: int, max_context_tokens: int, reason: str
) -> None:
    order = ticket(horizon_turns=50, kind=Kind.DEMO, max_turn_tokens=max_turn_tokens)
    episode = play(Echo(last=40), order, SayingPolicy(CHAT, max_context_tokens=max_context_tokens))
    assert (episode.stop, episode.valid) == (StopReason.UNFIT, False)
    assert re.search(reason, episode.error or "")


def test_an_environment_reads_no_more_of_a_reply_than_its_parsers_were_made_for() -> None:
    seen: list[int] = []

    class Measuring(Echo):
        async def step(self, text: str) -> Step:
            seen.append(len(text))
            return await super().step("x")

    long = "word " * 20_000
    policy = SayingPolicy(CHAT, text=long, max_context_tokens=1 << 20)
    episode = play(Measuring(last=1), ticket(max_turn_tokens=1 << 18), policy)
    assert episode.stop is StopReason.TERMINATED
    assert seen == [MAX_REPLY_CHARS]
    assert len(episode.turns[0].output_ids) > MAX_REPLY_CHARS / 5, (
        "what was sampled is trained whole"
    )
