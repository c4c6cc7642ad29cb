"""Random batches of traces for the learner's tests."""

from dataclasses import replace

import numpy as np

from horizonrl.learner.algorithm.batch import Batch, Trace


def make_trace(rng: np.random.Generator, tokens: int, version: int = 0, group: int = 0) -> Trace:
    """A trace whose second half is generated, with gaps where observations stand."""
    mask_L = (np.arange(tokens) >= max(1, tokens // 2)) & (rng.random(tokens) < 0.8)
    mask_L[-1] = True
    begins_L = mask_L & ~np.append(False, mask_L[:-1])
    turns_L = np.where(mask_L, np.cumsum(begins_L) - 1, -1).astype(np.int32)
    rewards_L = np.zeros(tokens, np.float32)
    rewards_L[-1] = rng.normal()
    return Trace(
        ids_L=rng.integers(0, 512, tokens).astype(np.int32),
        turns_L=turns_L,
        logprobs_L=np.where(mask_L, rng.normal(-6.5, 0.3, tokens).clip(max=0), 0).astype(
            np.float32
        ),
        versions_L=np.where(mask_L, version - rng.integers(0, 2, tokens), -1).astype(np.int32),
        rewards_L=rewards_L,
        group=group,
    )


def make_batch(seed: int = 0, traces: int = 6, longest: int = 60, version: int = 1) -> Batch:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(8, longest, traces)
    made = (
        make_trace(rng, int(length), version, group=index // 2)
        for index, length in enumerate(lengths)
    )
    return Batch(tuple(made), version)


def make_groups(seed: int, groups: int, group_size: int, prompt: int, version: int = 1) -> Batch:
    """A batch of groups whose episodes begin with the same prompt of `prompt` ids."""
    rng = np.random.default_rng(seed)
    traces = []
    for group in range(groups):
        prompt_ids = rng.integers(0, 512, prompt).astype(np.int32)
        for _ in range(group_size):
            tail = make_trace(rng, int(rng.integers(8, 40)), version=version)
            first = int(tail.mask_L.argmax())
            ids_L = np.concatenate([prompt_ids, tail.ids_L[first:]])
            rest = {
                name: np.concatenate([np.full(prompt, fill, column.dtype), column[first:]])
                for name, column, fill in (
                    ("turns_L", tail.turns_L, -1),
                    ("logprobs_L", tail.logprobs_L, 0.0),
                    ("versions_L", tail.versions_L, -1),
                    ("rewards_L", tail.rewards_L, 0.0),
                )
            }
            traces.append(Trace(ids_L=ids_L, group=group, **rest))
    return Batch(tuple(traces), version)


def demonstrations(batch: Batch) -> Batch:
    """The same batch as an expert's."""
    return replace(batch, traces=tuple(replace(trace, demo=True) for trace in batch.traces))
