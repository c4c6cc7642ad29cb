"""The peer of the rollout rows: vLLM as a user starts it, on the requests that our rollouts made.

A program of its own: an engine per process. It answers one line of JSON, a list of episodes, each a list of (prompt
ids, tokens to sample), with a line that has the seconds. The turns of an episode follow one another, as they must; no
environment answers between them, and nothing is decoded.
"""

import asyncio
import json
import os
import sys
import time
from itertools import count
from typing import Any

EXTENSION = "horizonrl.actors.engines.vllm_worker.WeightsExtension"
Requests = list[list[tuple[list[int], int]]]


async def main(model_dir: str, max_context_tokens: int, slots: int, kv_cache_mib: int) -> None:
    """Start the engine, then replay what stdin asks for until it ends."""
    import vllm
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    # The memory, the threads and the eager mode are those of our actor; all else is vLLM's default.
    engine: Any = AsyncLLM.from_engine_args(
        vllm.AsyncEngineArgs(
            model=model_dir,
            dtype="bfloat16",
            max_model_len=max_context_tokens,
            max_num_seqs=slots,
            kv_cache_memory_bytes=kv_cache_mib << 20,
            enforce_eager=True,
            skip_tokenizer_init=True,
            disable_log_stats=True,
            # For its import alone, which asks Linux for AMX: without it bare vLLM dies in its first request.
            worker_extension_cls=EXTENSION,
        )
    )
    numbers = count()

    async def episode(requests: list[tuple[list[int], int]]) -> int:
        sampled = 0
        for ids, tokens in requests:
            params = vllm.SamplingParams(
                max_tokens=tokens,
                ignore_eos=True,
                temperature=1.0,
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            async for output in engine.generate(
                {"prompt_token_ids": ids}, params, str(next(numbers))
            ):
                sampled += len(output.outputs[0].token_ids)
        return sampled

    await episode([([0], 1)])
    print(json.dumps({"ready": True}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        requests: Requests = json.loads(line)
        started = time.perf_counter()
        sampled = sum(await asyncio.gather(*map(episode, requests)))
        print(json.dumps({"seconds": time.perf_counter() - started, "tokens": sampled}), flush=True)


if __name__ == "__main__":
    # Before vLLM's import, as in our actor.
    os.environ |= {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
    }
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
