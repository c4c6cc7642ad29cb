"""Rows of the rollout: sampled tokens per second of whole episodes, against bare vLLM on the same requests.

In each round our actor plays N episodes of TextCraft at once, and vLLM, started as a user would start it, then samples
as many tokens for each of the same prompts. Ours also runs the environment, renders and decodes; vLLM does not.
"""

import tempfile
from pathlib import Path

import uvloop

from horizonrl.ops.bench.table.programs import program
from horizonrl.ops.bench.table.rows import Request, Row

EPISODES = (1, 8, 32, 64)
SMALL_EPISODES = (2,)
CONTEXT_TOKENS = 512
KV_CACHE_MIB, SMALL_KV_CACHE_MIB = 1024, 32
MODEL = "smollm2-135m-instruct"


def rows(request: Request) -> list[Row]:
    """Measure tokens per second by the number of episodes that are played at once."""
    from horizonrl.ops.models.models import resolve_model
    from horizonrl.ops.models.tiny_model import make_tiny_model

    with tempfile.TemporaryDirectory(prefix="horizonrl-bench-") as directory:
        model_dir = make_tiny_model(Path(directory)) if request.small else resolve_model(MODEL)
        sizes = SMALL_EPISODES if request.small else EPISODES
        rates = uvloop.run(
            _measure(model_dir, sizes, request.rounds, SMALL_KV_CACHE_MIB if request.small else KV_CACHE_MIB)
        )
    return [
        Row(
            f"rollout of {episodes} episodes at once",
            "bare vLLM, same requests",
            "tokens/s",
            *rates[episodes],
            goal=1.0,
        )
        for episodes in sizes
    ]


async def _measure(
    model_dir: Path, sizes: tuple[int, ...], turns: int, kv_cache_mib: int
) -> dict[int, tuple[list[float], list[float]]]:
    """Return tokens per second of ours and of the peer, by number of episodes and round."""
    arguments = (str(model_dir), str(CONTEXT_TOKENS), str(max(sizes)), str(kv_cache_mib))
    rates: dict[int, tuple[list[float], list[float]]] = {episodes: ([], []) for episodes in sizes}
    async with (
        program("horizonrl.ops.bench.table.our_rollouts", *arguments) as ours,
        program("horizonrl.ops.bench.table.bare_vllm", *arguments) as bare,
    ):
        await bare.ask((await ours.ask({"episodes": 2}))["requests"])  # the first requests warm caches up
        for _ in range(turns):
            for episodes, (our_rates, bare_rates) in rates.items():
                played = await ours.ask({"episodes": episodes})
                replayed = await bare.ask(played["requests"])
                our_rates.append(played["tokens"] / played["seconds"])
                bare_rates.append(replayed["tokens"] / replayed["seconds"])
    return rates
