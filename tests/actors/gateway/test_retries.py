"""Retries, clients that hang up, engines that fail, and what is in flight when an episode ends."""

import asyncio
import json
from typing import Any

import pytest
from openai import APIStatusError, AsyncOpenAI, InternalServerError

from horizonrl.actors.gateway import server
from horizonrl.actors.gateway.calls import CallRefused
from horizonrl.actors.gateway.chat_completions import parse
from horizonrl.actors.policy import Generation
from horizonrl.common.errors import EngineDead, PolicyFailure
from horizonrl.common.types import StopReason
from tests.actors.gateway.served import (
    HELLO,
    Remembering,
    client,
    client_of,
    gateway_of,
    session_of,
    ticket,
)


class Gated(Remembering):
    """Answers when the gate is open, and says that somebody waits."""

    def __init__(self) -> None:
        super().__init__(lambda read: "here it is")
        self.gate, self.asked = asyncio.Event(), asyncio.Event()
        self.begun = 0

    async def generate(self, ids: Any, **options: Any) -> Generation:  # type: ignore[override]
        self.begun += 1
        self.asked.set()
        await self.gate.wait()
        return await super().generate(ids, **options)


RETRY = {"x-stainless-retry-count": "1"}


async def test_a_retry_joins_the_call_of_a_client_that_has_gone_and_never_that_of_another() -> None:
    policy = Gated()
    async with client(policy) as (openai, session):

        async def ask(**headers: str) -> str:
            reply = await openai.chat.completions.create(
                model="m", messages=HELLO, extra_headers=headers
            )
            return reply.id

        async def begun(calls: int) -> None:
            while policy.begun < calls:
                await asyncio.sleep(0.01)

        waiting, lost = asyncio.create_task(ask()), asyncio.create_task(ask())
        await begun(2)
        lost.cancel()
        await asyncio.sleep(0.1)  # the server, in this loop too, sees that the client has gone
        # Two retries of equal bodies: one was lost, the other had got 503.
        retries = [asyncio.create_task(ask(**RETRY)) for _ in range(2)]
        await begun(3)
        while session.metrics.value("gateway_calls_total", reason="replayed") == 0:
            await asyncio.sleep(0.01)
        policy.gate.set()
        replies = {await waiting, *[await retry for retry in retries]}
        assert (len(replies), len(policy.answered)) == (3, 3)
        assert await ask(**RETRY) not in replies, "all of them were delivered"
        assert await ask() not in replies
        assert (len(policy.answered), session.answered) == (5, 5)


async def hang_up(openai: AsyncOpenAI, policy: Gated) -> None:
    """Ask, and leave before the answer."""
    asking = asyncio.create_task(openai.chat.completions.create(model="m", messages=HELLO))
    await policy.asked.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await asyncio.sleep(0.1)  # the server, in this loop too, sees that the client has gone


async def test_an_answer_that_could_not_be_delivered_is_repeated() -> None:
    policy = Gated()
    async with client(policy) as (openai, session):
        await hang_up(openai, policy)
        policy.gate.set()
        while not policy.answered:
            await asyncio.sleep(0.01)
        await openai.chat.completions.create(model="m", messages=HELLO, extra_headers=RETRY)
        assert (len(policy.answered), session.answered) == (1, 1)


async def test_a_client_that_closes_its_side_has_gone_and_its_reply_is_not_trained() -> None:
    """Nobody can tell it from one that has closed the connection: what it retries would be sampled twice."""

    policy = Gated()
    async with session_of(policy) as (gateway, session):
        body = json.dumps({"messages": HELLO})
        lines = (
            "POST /v1/chat/completions HTTP/1.1",
            "Host: gateway",
            f"Authorization: Bearer {session.key}",
            f"Content-Length: {len(body)}",
            "",
            body,
        )
        for number in (1, 2):
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write("\r\n".join(lines).encode())
            while policy.begun < number:
                await asyncio.sleep(0.01)
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()
        policy.gate.set()
        while len(policy.answered) < 2:
            await asyncio.sleep(0.01)
        assert session.answered == 0
        episode = session.graph.episode(0, StopReason.ENV_ERROR, error="no answer was read")
        assert [turn.trained for turn in episode.turns] == [False, False]


async def test_a_client_that_hangs_up_gets_its_answer_when_it_retries() -> None:
    policy = Gated()
    # OpenAI's client hangs up after its timeout, and numbers its retries.
    async with client(policy, timeout=0.2, max_retries=1000) as (openai, session):
        asking = asyncio.create_task(openai.chat.completions.create(model="m", messages=HELLO))
        await policy.asked.wait()
        while session.metrics.value("gateway_calls_total", reason="replayed") == 0:
            await asyncio.sleep(0.01)
        policy.gate.set()
        assert (await asking).choices[0].message.content == "here it is"
        assert (len(policy.answered), session.answered) == (1, 1)


async def test_an_answer_that_nobody_waits_for_is_counted_and_not_trained() -> None:
    policy = Gated()
    async with client(policy) as (openai, session):
        await hang_up(openai, policy)
        policy.gate.set()
        await openai.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "again"}]
        )
    episode = session.graph.episode(0, StopReason.TERMINATED)
    assert [turn.trained for turn in episode.turns] == [False, True]


async def test_a_call_can_be_kept_out_of_the_loss() -> None:
    async with client(Remembering(lambda read: "ok")) as (openai, session):
        await openai.chat.completions.create(
            model="m", messages=HELLO, extra_headers={"X-Train": "0"}
        )
        await openai.chat.completions.create(model="m", messages=HELLO)
    turns = session.graph.episode(0, StopReason.TERMINATED).turns
    assert [turn.trained for turn in turns] == [False, True]


class Failing(Remembering):
    def __init__(self, *failures: Exception) -> None:
        super().__init__(lambda read: "ok")
        self.failures = list(failures)

    async def generate(self, ids: Any, **options: Any) -> Generation:  # type: ignore[override]
        if self.failures:
            raise self.failures.pop(0)
        return await super().generate(ids, **options)


async def test_an_engines_failure_is_503_costs_no_call_and_is_forgotten_after_a_success() -> None:
    async with client(Failing(PolicyFailure("aborted")), ticket(horizon_turns=1)) as (
        openai,
        session,
    ):
        with pytest.raises(InternalServerError) as failed:
            await openai.chat.completions.create(model="m", messages=HELLO)
        assert (failed.value.status_code, failed.value.code) == (503, "engine_failed")
        assert session.failure is not None
        # The client's own retries succeed.
        await openai.with_options(max_retries=2).chat.completions.create(model="m", messages=HELLO)
        assert session.failure is None


async def test_without_an_engine_every_call_is_503() -> None:
    async with client(Failing(EngineDead("gone"))) as (openai, session):
        for _ in range(2):
            with pytest.raises(InternalServerError):
                await openai.chat.completions.create(model="m", messages=HELLO)
        assert session.over.is_set()


async def test_the_end_of_an_episode_answers_what_is_in_flight() -> None:
    policy = Gated()
    async with gateway_of(policy) as gateway:
        async with (
            gateway.session(ticket(), 0) as session,
            client_of(gateway, session) as openai,
        ):
            waiting = asyncio.create_task(openai.chat.completions.create(model="m", messages=HELLO))
            await asyncio.sleep(0.2)
            await session.close()
            with pytest.raises(APIStatusError) as over:
                await waiting
        assert over.value.status_code == 409
        assert policy.answered == []


async def test_a_call_that_begins_in_the_moment_of_the_end_is_answered() -> None:
    async with session_of(Remembering()) as (_, session):
        call = session.begin(parse({"messages": HELLO}), b"", None, retried=False, trained=True)
        await session.close()
        refused = call.answered.result()
        assert isinstance(refused, CallRefused)
        assert refused.status == 409


async def test_a_stream_without_a_client_is_not_kept_alive(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 0.01)
    stream = server.Gateway._stream

    policy, ended = Gated(), asyncio.Event()

    async def noted(gateway: server.Gateway, *arguments: Any) -> Any:
        try:
            return await stream(gateway, *arguments)
        finally:
            ended.set()

    monkeypatch.setattr(server.Gateway, "_stream", noted)
    async with client(policy) as (openai, _):
        asking = asyncio.create_task(
            openai.chat.completions.create(model="m", messages=HELLO, stream=True)
        )
        await policy.asked.wait()
        asking.cancel()
        async with asyncio.timeout(5):
            await ended.wait()
    assert caplog.records == []
