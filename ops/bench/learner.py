"""Rows of the performance table about the learner: its step against a bare torch loop, and against TRL's loss.

All of them train the same model on the same batch, in one process and on one thread, in turns: forward, backward, and
AdamW on float32 masters, with micro-batches of as many tokens. The bare loop is what a careful user would write:
padded rows of similar length, the fast causal kernel, and logits at trained tokens only. TRL's rows go through its real
`GRPOTrainer` and its loss. Rates count every token of every episode, whether or not it is read once for many.
"""

import warnings
from collections.abc import AsyncIterator, Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from horizonrl.learner.algorithm.batch import Batch, Trace
from horizonrl.ops.bench.case import Case, Request, rate, require

MICRO_BATCH_TOKENS = 4096
GROUP_SIZE = 8
PROMPT_TOKENS = 140
RATE = 1e-6
GOAL = 1.8
BARE, TRL = "bare torch, logits at trained tokens", "TRL's GRPO loss"
_CLIP_LOW, _CLIP_HIGH = 0.2, 0.2

Step = Callable[[], None]


async def cases(request: Request) -> AsyncIterator[Case]:
    """Yield a case per kind of batch."""
    require("torch", "trl")
    import torch

    torch.set_num_threads(1)
    turns = 3 if request.small else 30
    batches = {
        "learner step, one turn": make_batch(
            1 if request.small else 2, turns=1, generated=110, observed=0
        ),
        f"learner step, {turns} turns": make_batch(1, turns=turns, generated=8, observed=16),
    }
    model_dir = request.model_dir()
    for what, batch in batches.items():
        steps = {
            "ours": our_step(model_dir, batch),
            BARE: bare_step(model_dir, batch),
            TRL: trl_step(model_dir, batch, request.scratch),
        }
        tokens = sum(len(trace.ids_L) for trace in batch.traces)
        sides = {side: rate("tokens/s", tokens, step) for side, step in steps.items()}
        # The first round allocates and compiles kernels.
        yield Case(what, sides, dict.fromkeys((BARE, TRL), GOAL), warms_up=True)


def make_batch(groups: int, turns: int, generated: int, observed: int, seed: int = 0) -> Batch:
    """Return groups of random ids: `turns` of about `generated` tokens, with about `observed` read between them."""
    rng, traces = np.random.default_rng(seed), []

    def about(tokens: int) -> int:
        return int(rng.integers(max(1, tokens * 4 // 5), tokens * 6 // 5 + 1))

    for group in range(groups):
        prompt = rng.integers(3, 500, PROMPT_TOKENS)
        for _ in range(GROUP_SIZE):
            lengths = [(turn, about(generated)) for turn in range(turns)]
            places = [np.full(PROMPT_TOKENS, -1)]
            for turn, tokens in lengths:
                read = about(observed) if observed and turn + 1 < turns else 0
                places += [np.full(tokens, turn), np.full(read, -1)]
            turns_L = np.concatenate(places).astype(np.int32)
            ids_L = np.concatenate(
                [prompt, rng.integers(3, 500, len(turns_L) - PROMPT_TOKENS)]
            ).astype(np.int32)
            rewards_L = np.zeros(len(ids_L), np.float32)
            rewards_L[-1] = rng.normal()
            traces.append(
                Trace(
                    ids_L=ids_L,
                    turns_L=turns_L,
                    logprobs_L=np.where(turns_L >= 0, -6.0, 0.0).astype(np.float32),
                    versions_L=np.where(turns_L >= 0, 1, -1).astype(np.int32),
                    rewards_L=rewards_L,
                    group=group,
                )
            )
    return Batch(tuple(traces), version=1)


def our_step(model_dir: Path, batch: Batch) -> Step:
    from horizonrl.learner.engine.api import EngineSettings
    from horizonrl.learner.engine.registry import make_engine

    engine = make_engine(
        EngineSettings(model_dir, backend="torch", micro_batch_tokens=MICRO_BATCH_TOKENS)
    )

    def step() -> None:
        engine.train_step(batch, RATE)

    return step


def bare_step(model_dir: Path, batch: Batch) -> Step:
    """Return a step of a plain loop over padded rows."""
    import torch
    from torch.nn.functional import log_softmax

    model = _load(model_dir)
    tokens = sum(trace.trained_tokens for trace in batch.traces)

    def measure_loss(traces: Sequence[Trace]) -> Any:
        columns = _pad(traces)
        ids_BT, mask_BT = columns["ids"].long(), columns["trained"].bool()
        hidden_BTD = model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state
        logits_NV = model.lm_head(hidden_BTD[:, :-1][mask_BT[:, 1:]]).float()
        logprobs_N = log_softmax(logits_NV, -1).gather(1, ids_BT[mask_BT][:, None])[:, 0]
        advantages_N = torch.cat(
            [torch.full((t.trained_tokens,), float(t.rewards_L.sum())) for t in traces]
        )
        ratio_N = (logprobs_N - columns["old"][mask_BT]).clamp(-20, 20).exp()
        clipped_N = ratio_N.clamp(1 - _CLIP_LOW, 1 + _CLIP_HIGH)
        return -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N).sum() / tokens

    return _make_step(model, batch, measure_loss)


def trl_step(model_dir: Path, batch: Batch, directory: Path) -> Step:
    """Return a step with the loss of TRL's own trainer, as it calls it for each micro-batch."""
    import torch
    from transformers import AutoTokenizer

    trl: Any = import_module("trl")

    Dataset: Any = import_module("datasets").Dataset
    model = _load(model_dir)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer: Any = trl.GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=trl.GRPOConfig(
                output_dir=str(directory / "trl"),
                use_cpu=True,
                bf16=False,  # the model is bfloat16 already; this is about autocast
                gradient_checkpointing=False,
                per_device_train_batch_size=GROUP_SIZE,
                num_generations=GROUP_SIZE,
                report_to=[],
            ),
            train_dataset=Dataset.from_dict({"prompt": ["-"] * GROUP_SIZE}),
            processing_class=AutoTokenizer.from_pretrained(model_dir, mistral_format=False),
        )
    trainer.model.eval()
    trainer.current_gradient_accumulation_steps = 1
    total = torch.tensor(float(sum(trace.trained_tokens for trace in batch.traces)))

    def measure_loss(traces: Sequence[Trace]) -> Any:
        columns = _pad(traces, PROMPT_TOKENS)
        prompts = torch.stack(
            [torch.from_numpy(trace.ids_L[:PROMPT_TOKENS].astype(np.int64)) for trace in traces]
        )
        return trainer._compute_loss(
            model,
            {
                "prompt_ids": prompts,
                "prompt_mask": torch.ones_like(prompts),
                "completion_ids": columns["ids"].long(),
                "completion_mask": columns["present"].long(),
                "tool_mask": columns["trained"].long(),
                "advantages": torch.tensor([float(trace.rewards_L.sum()) for trace in traces]),
                "old_per_token_logps": columns["old"],
                "num_items_in_batch": total,
            },
        )

    return _make_step(model, batch, measure_loss)


def _make_step(model: Any, batch: Batch, measure_loss: Callable[[Sequence[Trace]], Any]) -> Step:
    """Return a step that adds up the gradients of all rectangles, then updates."""
    update = _Masters(model)

    def step() -> None:
        for traces in _rectangles(batch):
            update.add(measure_loss(traces))
        update.step()

    return step


def _pad(traces: Sequence[Trace], start: int = 0) -> dict[str, Any]:
    """Return rows of tokens from `start` on, filled up with 0: ids, presence, training, and the old logprobs."""
    import torch

    width = max(len(trace.ids_L) for trace in traces) - start
    columns = {
        name: torch.zeros(len(traces), width) for name in ("ids", "present", "trained", "old")
    }
    for row, trace in enumerate(traces):
        present = np.ones(len(trace.ids_L))
        values: tuple[Any, ...] = (trace.ids_L, present, trace.mask_L, trace.logprobs_L)
        for column, value_L in zip(columns.values(), values, strict=True):
            column[row, : len(present) - start] = torch.from_numpy(value_L[start:])
    return columns


def _rectangles(batch: Batch) -> list[list[Trace]]:
    """Return rows of similar length within the token budget."""
    made: list[list[Trace]] = []
    for trace in sorted(batch.traces, key=lambda trace: -len(trace.ids_L)):
        if made and (len(made[-1]) + 1) * len(made[-1][0].ids_L) <= MICRO_BATCH_TOKENS:
            made[-1].append(trace)
        else:
            made.append([trace])
    return made


def _load(model_dir: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    return model.eval()


class _Masters:
    """AdamW on one flat float32 master, as the learner's torch backend has it."""

    def __init__(self, model: Any) -> None:
        import torch

        self._parameters = [
            parameter for parameter in model.parameters() if parameter.requires_grad
        ]
        self._flat = torch.cat(
            [parameter.detach().float().flatten() for parameter in self._parameters]
        )
        self._flat.grad = torch.zeros_like(self._flat)
        self._adamw = torch.optim.AdamW([self._flat], lr=RATE, weight_decay=0.0, fused=True)

    def add(self, loss: Any) -> None:
        loss.backward()
        for parameter, sums in zip(self._parameters, self._views(self._flat.grad), strict=True):
            sums.add_(parameter.grad)
            parameter.grad = None

    def step(self) -> None:
        import torch

        torch.nn.utils.clip_grad_norm_([self._flat], 1.0)
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=False)
        for parameter, master in zip(self._parameters, self._views(self._flat), strict=True):
            parameter.data.copy_(master)

    def _views(self, flat: Any) -> list[Any]:
        pieces = flat.split([parameter.numel() for parameter in self._parameters])
        return [
            piece.view_as(parameter)
            for piece, parameter in zip(pieces, self._parameters, strict=True)
        ]
