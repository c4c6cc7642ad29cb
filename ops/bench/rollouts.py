"""Sampled tokens per second of whole episodes, against bare vLLM on the same requests.

In each round our actor plays N episodes of TextCraft at once, and vLLM, started as a user would start it, then samples
as many tokens for each of the same prompts. Ours also runs the environment, renders and decodes; vLLM does not.
"""

from collections.abc import AsyncIterator, Mapping
from typing import Any

from horizonrl.ops.bench.case import Case, Request
from horizonrl.ops.bench.programs import Program, program

EPISODES, SMALL_EPISODES = (1, 8, 32, 64), (2,)
CONTEXT_TOKENS = 512
KV_CACHE_MIB, SMALL_KV_CACHE_MIB = 1024, 32
BARE = "bare vLLM, same requests"


async def cases(request: Request) -> AsyncIterator[Case]:
    """Yield a case per number of episodes that are played at once."""
    sizes = SMALL_EPISODES if request.small else EPISODES
    kv_cache_mib = SMALL_KV_CACHE_MIB if request.small else KV_CACHE_MIB
    engine = (request.model_dir(), CONTEXT_TOKENS, max(sizes), kv_cache_mib)
    words = list(map(str, engine))
    async with (
        program("horizonrl.ops.bench.our_rollouts", *words) as ours,
        program("horizonrl.ops.bench.bare_vllm", *words) as bare,
    ):
        for episodes in sizes:
            yield _case(ours, bare, episodes)


def _case(ours: Program, bare: Program, episodes: int) -> Case:
    requests: list[Any] = []

    async def play() -> Mapping[str, float]:
        played = await ours.ask({"episodes": episodes})
        requests[:] = played["requests"]
        return {"tokens/s": played["tokens"] / played["seconds"]}

    async def replay() -> Mapping[str, float]:
        replayed = await bare.ask(requests)
        return {"tokens/s": replayed["tokens"] / replayed["seconds"]}

    what = f"rollout of {episodes} episodes at once"
    return Case(what, {"ours": play, BARE: replay}, {BARE: 1.0}, warms_up=True)
