import asyncio
import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from horizonrl.actors.engines.client import ATTEMPTS, SEEDS, Endpoint, EndpointSettings
from horizonrl.actors.engines.conversation import Conversation
from horizonrl.actors.rollout.rollout import Rollout
from horizonrl.common.errors import EngineDead, WeightsRejected
from horizonrl.common.types import Episode, Kind, PolicyVersion, Sampling, StopReason, Task, Ticket
from tests.actors.players import Breaking, Echo
from tests.completions import Completions, Fault, refusal, serving

KEY = "sk-very-secret"


@pytest.fixture
def server() -> Iterator[Completions]:
    with serving(Completions(says="go on", tokens=3)) as completions:
        yield completions


def play(
    server: Completions,
    environment: Echo | None = None,
    system: str | None = None,
    timeout_s: float = 5.0,
) -> Episode:
    settings = EndpointSettings(
        server.url, "big", SecretStr(KEY), timeout_s=timeout_s, first_wait_s=0.001
    )
    ticket = Ticket(
        number=0,
        kind=Kind.EVAL,
        task=Task(env_id="echo", task_id="say"),
        group_size=1,
        horizon_turns=5,
        sampling=Sampling(temperature=0.5, max_turn_tokens=16, seed=1 << 39),
    )

    async def run() -> Episode:
        async with Endpoint(settings) as endpoint:
            both = Conversation(endpoint)
            return await Rollout(both, both, system, step_timeout_s=5).episode(
                environment or Echo(), ticket, 0
            )

    return asyncio.run(run())


def test_an_episode_is_a_conversation_that_only_grows(server: Completions) -> None:
    episode = play(server, system="Be brief.")
    assert (episode.stop, episode.success, episode.episode_return) == (
        StopReason.TERMINATED,
        True,
        1.0,
    )
    assert [[message["role"] for message in body["messages"]] for body in server.bodies] == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
        ["system", "user", "assistant", "user", "assistant", "user"],
    ]
    assert [m["content"] for m in server.bodies[1]["messages"]] == [
        "Be brief.", "say something", "go on", "you said go on"
    ]  # fmt: skip
    assert [(turn.text, turn.observation) for turn in episode.turns] == [
        ("go on", "you said go on")
    ] * 3


def test_tokens_are_what_the_endpoint_counts_and_at_least_one_a_turn(server: Completions) -> None:
    assert play(server).generated_tokens == 3 * 3
    for unsaid in (0, None):
        server.tokens = unsaid
        assert play(server).generated_tokens == 3


def test_sampling_goes_along_and_each_turn_has_a_seed_of_its_own(server: Completions) -> None:
    play(server)
    assert {(body["model"], body["max_tokens"], body["temperature"]) for body in server.bodies} == {
        ("big", 16, 0.5)
    }
    seeds = [body["seed"] for body in server.bodies]
    assert len(set(seeds)) == 3
    assert all(0 <= seed < SEEDS for seed in seeds)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_passes_is_tried_again_within_the_episode(server: Completions, status: int) -> None:
    server.faults = [None, refusal(status), refusal(status)]
    episode = play(server)
    assert (episode.stop, len(server.bodies)) == (StopReason.TERMINATED, 5)


@pytest.mark.parametrize(
    "fault",
    [
        refusal(500),
        refusal(418),
        refusal(400, "temperature must be 1"),
        (302, {"Location": "/v2"}, ""),
        (200, {}, "<html>"),
        (200, {}, '{"choices": []}'),
        (200, {}, '{"choices": [{"message": {"content": null}}]}'),
        (
            200,
            {},
            '{"choices": [{"message": {"content": null}, "finish_reason": "stop"}], "usage": {}}',
        ),
        (200, {}, '{"error": "overloaded"}'),
        (200, {}, json.dumps({"choices": [{"message": {"content": "x" * 300_000}}]})),
    ],
    ids=lambda fault: str(fault)[:60],
)
def test_a_failure_of_the_endpoint_is_a_broken_episode_and_never_a_zero(
    server: Completions, fault: Fault
) -> None:
    server.faults = [None, *[fault] * ATTEMPTS]
    episode = play(server)
    assert (episode.stop, episode.valid, len(episode.turns)) == (StopReason.POLICY_ERROR, False, 1)
    assert server.url in (episode.error or "")


@pytest.mark.parametrize(
    "reply",
    [
        {"choices": [{"message": {"content": None}, "finish_reason": "length"}]},
        {"choices": [{"message": {"content": None}}], "usage": {"completion_tokens": 16}},
        {"choices": [{"message": {}, "finish_reason": "length"}]},
    ],
)
def test_a_reply_that_was_all_thought_is_an_empty_one(
    server: Completions, reply: dict[str, Any]
) -> None:
    server.faults = [(200, {"Content-Type": "application/json"}, json.dumps(reply))]
    episode = play(server)
    assert episode.stop is StopReason.TERMINATED
    assert [turn.text for turn in episode.turns][:2] == ["", "go on"]
    assert server.bodies[1]["messages"][1] == {"role": "assistant", "content": ""}


def test_an_endpoint_that_does_not_answer_in_time_breaks_the_episode(server: Completions) -> None:
    server.delay_s = 30.0
    episode = play(server, timeout_s=0.02)
    assert episode.stop is StopReason.POLICY_ERROR
    assert "no answer from" in (episode.error or "")


def test_a_port_that_nobody_listens_at_breaks_the_episode() -> None:
    assert play(Completions(url="http://127.0.0.1:9/v1")).stop is StopReason.POLICY_ERROR


async def reach(url: str) -> None:
    async with Endpoint(EndpointSettings(url, "big", SecretStr(KEY))) as endpoint:
        await endpoint.reach()


def test_whoever_answers_is_there_unless_the_key_is_refused(server: Completions) -> None:
    for status in (200, 404, 500):
        server.listing = status
        asyncio.run(reach(server.url))
    server.listing = 403
    with pytest.raises(EngineDead, match=r"answered 403: .*Check the key's environment variable"):
        asyncio.run(reach(server.url))


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9/v1", "http://no.such.host.invalid/v1", "127.0.0.1:9", "nonsense"]
)
def test_an_address_without_an_answer_is_told_at_once(url: str) -> None:
    with pytest.raises(EngineDead, match=rf"no answer from {url}/models .* is the server up"):
        asyncio.run(reach(url))


def test_retry_after_is_waited_for_in_seconds_and_as_a_date(server: Completions) -> None:
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)
    server.faults = [refusal(429, **{"Retry-After": "0.3"}), refusal(429, **{"Retry-After": later})]
    started = time.monotonic()
    assert play(server).stop is StopReason.TERMINATED
    assert time.monotonic() - started > 1.0


def test_an_endpoint_that_asks_for_an_hour_is_not_waited_for(server: Completions) -> None:
    server.faults = [refusal(429, **{"Retry-After": "3600"})]
    episode = play(server)
    assert (episode.stop, len(server.bodies)) == (StopReason.POLICY_ERROR, 1)


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refused_key_or_model_ends_everything(server: Completions, status: int) -> None:
    server.faults = [refusal(status, f"the key {KEY} is wrong")]
    with pytest.raises(EngineDead, match="environment variable") as raised:
        play(server)
    assert KEY not in str(raised.value)


def test_the_key_is_sent_and_told_to_nobody(
    server: Completions, caplog: pytest.LogCaptureFixture
) -> None:
    server.faults = [refusal(503, f"key {KEY}"), refusal(400, f"key {KEY}")]
    with caplog.at_level("DEBUG"):
        episode = play(server)
    assert server.keys == [f"Bearer {KEY}"] * 2
    assert "key ***" in (episode.error or "")
    assert KEY not in caplog.text + str(episode) + repr(EndpointSettings("u", "m", SecretStr(KEY)))


def test_a_full_context_is_a_cut_after_the_first_turn_and_unfit_before_it(
    server: Completions,
) -> None:
    full = refusal(400, "This model's maximum context length is 8192 tokens")
    server.faults = [None, full]
    episode = play(server)
    assert (episode.stop, episode.valid, len(episode.turns)) == (StopReason.CONTEXT, True, 1)
    server.faults = [full]
    assert play(server).stop is StopReason.UNFIT


def test_an_endpoint_that_wants_the_other_name_of_the_limit_gets_it(server: Completions) -> None:
    server.faults = [refusal(400, "Unsupported parameter: use 'max_completion_tokens' instead")]
    assert play(server).stop is StopReason.TERMINATED
    assert ["max_tokens" in body for body in server.bodies] == [True, False, False, False]
    assert server.bodies[1]["max_completion_tokens"] == 16


def test_an_environment_that_breaks_is_told_as_such(server: Completions) -> None:
    assert play(server, Breaking()).stop is StopReason.ENV_ERROR


def test_weights_are_the_endpoints_own(server: Completions) -> None:
    with pytest.raises(WeightsRejected, match="takes no weights"):
        asyncio.run(
            Conversation(Endpoint(EndpointSettings(server.url, "big"))).apply(
                Path("w"), PolicyVersion()
            )
        )
