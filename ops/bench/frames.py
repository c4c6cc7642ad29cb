"""Real pairs of successive weights: a short reinforcement learning of a model on the torch backend."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from horizonrl.learner.algorithm.batch import Batch, Trace
from horizonrl.learner.engine.api import EngineSettings
from horizonrl.learner.engine.registry import make_engine

RATES = (1e-6, 1e-5, 4e-5)
WARM_UP_STEPS = 14
"""Before the first frame: Adam's first steps move every weight by the whole rate, until its moments have settled."""
WARM_UP_RATE = 1e-5
PROMPTS = (
    "Name a colour.",
    "Write a sentence about a door.",
    "How do you make a stick?",
    "Count to five.",
)
BATCHES = 4
"""They come again and again, which saves sampling; a run has new ones for each step."""
GROUP = 4
NEW_TOKENS = 24


def make_frames(model_dir: Path, directory: Path) -> list[tuple[float, Path, Path]]:
    """Return for each rate the weights before and after a step at it, from `directory` if they are there already."""
    frames = [directory / f"frame-{index}.safetensors" for index in range(len(RATES) + 1)]
    if not all(frame.is_file() for frame in frames):
        directory.mkdir(parents=True, exist_ok=True)
        _train(model_dir, frames)
    return [(rate, frames[index], frames[index + 1]) for index, rate in enumerate(RATES)]


def _train(model_dir: Path, frames: list[Path]) -> None:
    engine = make_engine(EngineSettings(model_dir, backend="torch", weight_decay=0.01))
    try:
        batches = sample_batches(model_dir)
        for step, rate in enumerate((*[WARM_UP_RATE] * WARM_UP_STEPS, *RATES)):
            if step == WARM_UP_STEPS:
                engine.write_weights(frames[0])
            engine.train_step(replace(batches[step % BATCHES], version=step), rate)
            if step >= WARM_UP_STEPS:
                engine.write_weights(frames[step - WARM_UP_STEPS + 1])
    finally:
        engine.close()


def sample_batches(model_dir: Path) -> list[Batch]:
    """Sample batches with the model itself; the reward of an answer is the share of distinct ids in it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir, mistral_format=False)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    batches = []
    for step in range(BATCHES):
        torch.manual_seed(step)
        traces: list[Trace] = []
        for group, prompt in enumerate(PROMPTS):
            ids = tokenizer(prompt, return_tensors="pt")["input_ids"].repeat(GROUP, 1)
            with torch.no_grad():
                answers = model.generate(
                    ids, max_new_tokens=NEW_TOKENS, do_sample=True, top_k=0, pad_token_id=0
                )
                logits = model(answers[:, :-1]).logits.float()
            logprobs = logits.log_softmax(-1).gather(-1, answers[:, 1:, None])[..., 0].numpy()
            traces += [
                _trace(answer, row, ids.shape[1], group)
                for answer, row in zip(answers.numpy(), logprobs, strict=True)
            ]
        batches.append(Batch(tuple(traces), step))
    return batches


def _trace(ids_L: Any, logprobs_L: Any, prompt: int, group: int) -> Trace:
    generated = np.arange(len(ids_L)) >= prompt
    rewards_L = np.zeros(len(ids_L), np.float32)
    rewards_L[-1] = len(set(ids_L[prompt:].tolist())) / max(len(ids_L) - prompt, 1)
    return Trace(
        ids_L=ids_L.astype(np.int32),
        turns_L=np.where(generated, 0, -1).astype(np.int32),
        logprobs_L=np.where(generated, np.concatenate([[0], logprobs_L]), 0).astype(np.float32),
        versions_L=np.where(generated, 0, -1).astype(np.int32),
        rewards_L=rewards_L,
        group=group,
    )
