"""The policy on a server that samples: what it asks for, and what it takes for an answer."""

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from horizonrl.actors.engines.endpoint import UNSHAPED, start
from horizonrl.actors.engines.vllm_arguments import EXTENSION
from horizonrl.actors.policy import Generation, InferenceSettings, Policy
from horizonrl.actors.rollout.rollout import Rollout
from horizonrl.common.errors import ConfigError, ContextFull, EngineDead, PolicyFailure
from horizonrl.common.types import Episode, Kind, Sampling, StopReason, Task, Ticket
from tests.actors.players import Echo, make_chat
from tests.completions import Completions, serving

PROMPT = (11, 12, 13, 14)


@pytest.fixture
def server() -> Iterator[Completions]:
    with serving(Completions()) as completions:
        yield completions


@asynccontextmanager
async def started(url: str | None, max_context_tokens: int = 256) -> AsyncIterator[Policy]:
    policy = await start(InferenceSettings(Path("nowhere"), max_context_tokens, endpoint=url))
    try:
        yield policy
    finally:
        await policy.close()


def ask(url: str, prompt: tuple[int, ...] = PROMPT, **asked: int) -> Generation:
    async def run() -> Generation:
        async with started(url) as policy:
            return await policy.generate(
                prompt, max_tokens=16, temperature=0.5, stop_ids=(3,), seed=asked.get("seed", 7)
            )

    return asyncio.run(run())


def test_a_request_asks_for_ids_and_logprobs_of_the_unshaped_distribution(
    server: Completions,
) -> None:
    ask(server.url, seed=1 << 40)
    (body,) = server.bodies
    assert body.pop("seed") < 1 << 31
    assert body == {
        "prompt": list(PROMPT),
        "max_tokens": 16,
        "temperature": 0.5,
        "stop_token_ids": [3],
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
        **UNSHAPED,
    }


@pytest.mark.parametrize(
    "choice",
    [
        {"text": "a server that knows no ids"},
        {"token_ids": [5], "logprobs": None, "finish_reason": "stop"},
        {"token_ids": [5], "logprobs": {"token_logprobs": [-0.1, -0.2]}, "finish_reason": "stop"},
        {"token_ids": [5], "logprobs": {"token_logprobs": [-0.1]}, "finish_reason": "abort"},
        {"token_ids": [-5], "logprobs": {"token_logprobs": [-0.1]}, "finish_reason": "stop"},
        {"token_ids": [], "logprobs": {"token_logprobs": []}, "finish_reason": "stop"},
    ],
    ids=str,
)
def test_an_answer_that_is_not_token_exact_is_a_failed_request(
    server: Completions, choice: dict[str, object]
) -> None:
    server.faults = [(200, {}, json.dumps({"choices": [choice]}))]
    with pytest.raises(PolicyFailure, match=server.url):
        ask(server.url)


def test_an_infinite_logprob_is_a_failed_request(server: Completions) -> None:
    server.faults = [
        (200, {}, '{"choices": [{"token_ids": [5], "logprobs": {"token_logprobs": [-1e999]}}]}')
    ]
    with pytest.raises(PolicyFailure):
        ask(server.url)


def test_a_prompt_that_the_server_has_no_room_for_is_a_full_context(server: Completions) -> None:
    with pytest.raises(ContextFull, match="maximum context length"):
        ask(server.url, prompt=PROMPT * 100)


def test_a_cancelled_request_is_freed_on_the_server(server: Completions) -> None:
    async def run() -> None:
        async with started(server.url) as policy:
            request = policy.generate(
                PROMPT, max_tokens=200, temperature=1.0, stop_ids=(), seed=None
            )
            running = asyncio.create_task(request)
            await asyncio.sleep(0.1)
            running.cancel()
            async with asyncio.timeout(10):
                while not server.cancelled:
                    await asyncio.sleep(0.01)

    asyncio.run(run())


def test_an_episode_holds_the_ids_and_logprobs_that_the_server_sampled(server: Completions) -> None:
    ticket = Ticket(
        number=0,
        kind=Kind.EVAL,
        task=Task(env_id="echo", task_id="say"),
        group_size=1,
        horizon_turns=5,
        sampling=Sampling(max_turn_tokens=8, seed=1),
    )

    async def run() -> Episode:
        async with started(server.url) as policy:
            return await Rollout(policy, make_chat(), None, step_timeout_s=5).episode(
                Echo(last=2), ticket, 0
            )

    episode = asyncio.run(run())
    assert (episode.stop, len(episode.turns)) == (StopReason.TERMINATED, 2)
    first, second = episode.turns
    assert server.bodies[1]["prompt"] == [
        *episode.prompt_ids,
        *first.output_ids,
        *first.observation_ids,
    ]
    assert all(logprob < 0 for turn in (first, second) for logprob in turn.logprobs)


def test_a_server_that_is_not_there_is_named_before_the_first_episode() -> None:
    with pytest.raises(EngineDead, match=r"no answer from http://127\.0\.0\.1:9/v1/models"):
        ask("http://127.0.0.1:9/v1")


def test_an_endpoint_without_a_url_is_a_mistake_in_the_config() -> None:
    async def run() -> None:
        async with started(None):
            raise AssertionError("started")

    with pytest.raises(ConfigError, match=r"actor\.endpoint is not set"):
        asyncio.run(run())


@pytest.fixture
def vllm_server(tiny_models: tuple[Path, Path]) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        f"--model={tiny_models[0]}",
    ]
    options = [
        f"--port={port}",
        "--host=127.0.0.1",
        "--dtype=bfloat16",
        "--max-model-len=256",
        "--enforce-eager",
    ]
    # What our own engine needs on CPU: permission for AMX, and no prompt that is split.
    on_cpu = [
        f"--worker-extension-cls={EXTENSION}",
        "--no-enable-chunked-prefill",
        "--max-num-batched-tokens=2048",
    ]
    exact = [
        "--logprobs-mode=processed_logprobs",
        "--generation-config=vllm",
        "--kv-cache-memory-bytes=16777216",
    ]
    with subprocess.Popen(
        [*command, *options, *on_cpu, *exact], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        yield f"http://127.0.0.1:{port}/v1"
        server.terminate()


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(600)
def test_a_real_vllm_server_keeps_the_contract(vllm_server: str) -> None:
    """What the small server of the other tests imitates: ids, logprobs, seeds, stop tokens and a full context."""

    async def run() -> None:
        deadline = time.monotonic() + 300
        while True:
            try:
                policy = await start(InferenceSettings(Path("nowhere"), 256, endpoint=vllm_server))
                break
            except EngineDead:
                assert time.monotonic() < deadline
                await asyncio.sleep(1.0)

        async def sample(seed: int | None = 7, stop: tuple[int, ...] = ()) -> Generation:
            return await policy.generate(
                PROMPT, max_tokens=16, temperature=1.0, stop_ids=stop, seed=seed
            )

        first, again, other = await sample(), await sample(), await sample(8)
        assert len(first.ids) == len(first.logprobs) == 16
        assert first == again
        assert first.ids != other.ids
        stopped = await sample(stop=(first.ids[5],))
        assert stopped.ids == first.ids[: first.ids.index(first.ids[5]) + 1]
        with pytest.raises(ContextFull, match=r"\d"):
            await policy.generate([11] * 300, max_tokens=1, temperature=1.0, stop_ids=(), seed=None)
        await policy.close()

    asyncio.run(run())
