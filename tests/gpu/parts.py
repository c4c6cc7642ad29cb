"""What `run.py` measures: one function per part, started as `python3 parts.py FUNCTION --work DIR`.

A part prints each measurement as soon as it has it. The engine is called as the learner calls it (`EngineSettings`,
`make_engine`, `train_step`), so that what is measured is what trains. Models have random weights: speed and memory do
not depend on them. Axes: H query heads, G key heads, T positions, E numbers per head, N rows, D hidden, V vocabulary.
"""

import argparse
import gc
import inspect
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# What the bundle brings stands behind all that the machine has: its torch and its numba fit each other.
sys.path.append(str(Path(__file__).with_name("site")))

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

from horizonrl.broker.weights.changes import apply_changes, encode_changes, read_layout, warm_up
from horizonrl.broker.weights.frames import digest_file
from horizonrl.learner.algorithm.batch import Batch, Trace
from horizonrl.learner.engine import recompute
from horizonrl.learner.engine.api import EngineSettings, RankEngine
from horizonrl.learner.engine.model.attention import PackedSegments, attend
from horizonrl.learner.engine.model.model import TokenScorer
from horizonrl.learner.engine.model.packing import Segment
from horizonrl.learner.engine.registry import make_engine
from horizonrl.ops.plan.hardware import ACCELERATORS
from horizonrl.ops.plan.shapes import ModelShape, shape_of_size

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
PACKAGES = (
    *(
        "torch",
        "triton",
        "nvidia-cudnn-cu13",
        "nvidia-nccl-cu13",
        "transformers",
        "safetensors",
        "deepspeed",
    ),
    *("numpy", "numba", "pydantic", "pydantic-core", "horizonrl"),
)
TINY = ModelShape("tiny", 2, 64, 128, 64, 32, 512, tied=True)
LR = 1e-5
CHANGED_SHARE = 1 / 256
"""Weights that differ between two versions, about as many as at a learning rate of 1e-6."""


@dataclass(frozen=True, slots=True)
class Run:
    """What a part was started with."""

    work: Path
    small: bool

    def pick(self, real: Any, small: Any) -> Any:
        return small if self.small else real

    def shape(self, size: str) -> ModelShape:
        return TINY if self.small else shape_of_size(size)

    def model_dir(self, size: str, **changes: Any) -> Path:
        """Return a model with random weights, which is made once for all parts."""
        directory = self.work / "-".join(
            [size, *(f"{name}-{value}" for name, value in changes.items())]
        )
        if not (directory / "config.json").is_file():
            language_model(replace(self.shape(size), **changes)).save_pretrained(directory)
            forget()
        return directory

    def seconds(self, work: Callable[[], Any], repeats: int = 1) -> float:
        """Return the median time of a call, after one that does not count if there are several."""
        values: dict[str, float] = {}
        count = 1 if self.small or repeats == 1 else repeats + 1
        for number in range(count):
            with clock(values, str(number)):
                work()
        return statistics.median(list(values.values())[-repeats:])

    @contextmanager
    def engine(
        self, model_dir: Path, tokens: int, backend: str = "torch", **settings: Any
    ) -> Iterator[RankEngine]:
        threads = self.pick(len(os.sched_getaffinity(0)), 1)
        engine = make_engine(
            EngineSettings(
                model_dir, backend, micro_batch_tokens=tokens, threads=threads, **settings
            )
        )
        try:
            yield engine
        finally:
            engine.close()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("function", choices=PARTS)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args(argv)
    if not ON_GPU and not arguments.small:
        raise SystemExit(
            "torch.cuda.is_available() is False: give --small, or see what nvidia-smi and torch say"
        )
    PARTS[arguments.function](Run(arguments.work, arguments.small))


# How it is measured


@contextmanager
def measured(name: str) -> Iterator[dict[str, Any]]:
    """Print what the body puts into the dictionary, and its error if it raises one, which does not end the part."""
    values: dict[str, Any] = {}
    try:
        yield values
    except Exception as error:  # noqa: BLE001 - a failure is what this program looks for
        values["error"] = f"{type(error).__name__}: {error}"[:1000]
        values["traceback"] = traceback.format_exc()[-1500:]
        values["exit_code"] = getattr(error, "exit_code", 1)
    print(f"@ {json.dumps({name: values})}", flush=True)
    forget()


@contextmanager
def clock(values: dict[str, Any], name: str) -> Iterator[None]:
    """Put the seconds of the body, and of what it asks of the GPU, into the dictionary."""
    wait()
    started = time.perf_counter()
    yield
    wait()
    values[name] = rounded(time.perf_counter() - started)


def wait() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def forget() -> None:
    """Free what nobody refers to, and begin to measure the peak of memory from here."""
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gb() -> float:
    """Return the largest memory of tensors on the GPU since `forget`, or that of the process since its start."""
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return rounded((torch.cuda.max_memory_allocated() if ON_GPU else resident) / 1e9)


def rounded(value: float) -> float:
    return float(f"{value:.4g}")


def relative_error(ours: Tensor, right: Tensor) -> float:
    return rounded(float((ours.double() - right.double()).norm() / right.double().norm()))


# Models and batches


def language_model(shape: ModelShape) -> Any:
    """Return a Qwen2 with random weights in bfloat16, made on the device."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    width = 128 if shape.hidden >= 1536 else 64 if shape.hidden > 64 else 32
    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.query_width // width,
        num_key_value_heads=shape.kv_width // width,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=65536,
        bos_token_id=None,
        eos_token_id=None,
    )
    qwen: Any = Qwen2ForCausalLM
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with DEVICE:
            return qwen(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def make_batch(vocabulary: int, episodes: int, tokens: int, group: int = 1, seed: int = 0) -> Batch:
    """Return random episodes, of which the second half is trained; those of one group have the same first half."""
    ids = np.random.default_rng(seed).integers(0, vocabulary, (episodes, tokens // episodes))
    prompt = ids.shape[1] // 2
    for index, row in enumerate(ids):
        row[:prompt] = ids[index - index % group, :prompt]
    logprobs = np.full(ids.shape, -np.log(vocabulary))
    traces = [
        make_trace(row, prompt, logprobs[index], index % 2, index // group)
        for index, row in enumerate(ids)
    ]
    return Batch(tuple(traces), 0)


def make_trace(
    ids: Any, prompt: int, logprobs: Any, reward: float, group: int, policy: int = 0
) -> Trace:
    generated = np.arange(len(ids)) >= prompt
    rewards = np.zeros(len(ids), np.float32)
    rewards[-1] = reward
    return Trace(
        ids_L=ids.astype(np.int32),
        turns_L=np.where(generated, 0, -1).astype(np.int32),
        logprobs_L=np.where(generated, logprobs, 0.0).astype(np.float32),
        versions_L=np.where(generated, policy, -1).astype(np.int32),
        rewards_L=rewards,
        group=group,
    )


# The parts


def machine(run: Run) -> None:
    """Say what the machine is, and what its GPU does at best."""
    with measured("versions") as values:
        values |= {
            "python": sys.version.split()[0],
            "cores": len(os.sched_getaffinity(0)),
            "cuda": torch.version.cuda,
        }
        for package in PACKAGES:
            try:
                values[package] = version(package)
            except PackageNotFoundError:
                values[package] = None
    if ON_GPU:
        with measured("gpu") as values:
            query = [
                "nvidia-smi",
                "--query-gpu=name,memory.total,driver_version",
                "--format=csv,noheader",
            ]
            values["nvidia-smi"] = subprocess.run(
                query, capture_output=True, text=True, check=True
            ).stdout.strip()
            values["cudnn"], values["nccl"] = (
                torch.backends.cudnn.version(),
                torch.cuda.nccl.version(),
            )
    with measured("peak") as values:
        side, words = run.pick((8192, 1 << 30), (256, 1 << 20))
        a, b = (torch.randn(side, side, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        values["product_tflops"] = rounded(2 * side**3 / run.seconds(lambda: a @ b, 5) / 1e12)
        source = torch.zeros(words, dtype=torch.int32, device=DEVICE)
        copy = torch.empty_like(source)
        values["copy_tb_per_s"] = rounded(
            2 * source.nbytes / run.seconds(lambda: copy.copy_(source), 3) / 1e12
        )


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From queries 1 × H × T × E, keys and values 1 × G × T × E to 1 × T × H × E."""


def attention(run: Run) -> None:
    """Compare kernels for packed segments with float64, forward and backward, and each with its second run."""
    own, prefix = run.pick((700, 500), (40, 30))
    alone = tuple(Segment(start, start + own) for start in range(0, 3 * own, own))
    shared = (
        Segment(0, prefix),
        *(Segment(prefix + s.start, prefix + s.end, 0, prefix) for s in alone),
    )
    for case, segments, groups, window in (
        ("alone", alone, 4, None),
        ("prefix", shared, 4, None),
        ("prefix, as many keys as queries", shared, 28, None),
        ("prefix, window", shared, 4, prefix // 2),
    ):
        torch.manual_seed(0)
        tokens, width = segments[-1].end, run.pick(128, 32)
        counts = (28, groups, groups)
        inputs = [
            torch.randn(1, n, tokens, width, device=DEVICE, dtype=torch.bfloat16) for n in counts
        ]
        gradient = torch.randn(1, tokens, 28, width, device=DEVICE, dtype=torch.bfloat16)
        by_hand = one_matrix(segments, window)
        right = with_gradients(by_hand, [tensor.double() for tensor in inputs], gradient.double())
        for kernel, function in kernels(segments, window).items():
            with measured(f"{case}: {kernel}") as values:
                compare_kernel(run, function, inputs, gradient, right, values)


def compare_kernel(
    run: Run,
    function: Attention,
    inputs: list[Tensor],
    gradient: Tensor,
    right: list[Tensor],
    values: dict[str, Any],
) -> None:
    def work() -> list[Tensor]:
        return with_gradients(function, inputs, gradient)

    first = work()
    for name, ours, theirs in zip(("out", "dq", "dk", "dv"), first, right, strict=True):
        values[f"error_{name}"] = relative_error(ours, theirs)
    values["repeats"] = all(map(torch.equal, first, work()))
    values["s"] = run.seconds(work, 5)
    torch.use_deterministic_algorithms(True)
    try:
        values["repeats_if_asked_to"] = all(map(torch.equal, work(), work()))
        values["s_if_asked_to_repeat"] = run.seconds(work, 5)
    finally:
        torch.use_deterministic_algorithms(False)


def with_gradients(function: Attention, inputs: Sequence[Tensor], gradient: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def one_matrix(segments: Sequence[Segment], window: int | None) -> Attention:
    """Return attention by its formula, with a mask for all segments."""
    tokens = segments[-1].end
    seen_TT = torch.zeros(tokens, tokens, dtype=torch.bool, device=DEVICE)
    for segment in segments:
        seen_TT[segment.start : segment.end, visible(segment)] = seen(segment, window)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = repeated(q, k, v)
        scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~seen_TT, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2)

    return function


def repeated(q: Tensor, *kept: Tensor) -> list[Tensor]:
    """Return keys and values with a head for each head of the queries."""
    return [tensor.repeat_interleave(q.shape[1] // tensor.shape[1], 1) for tensor in kept]


def visible(segment: Segment) -> Tensor:
    """Return the positions that a segment's last token sees: its prefix, and its own."""
    spans = ((segment.prefix_start, segment.prefix_end), (segment.start, segment.end))
    return torch.cat([torch.arange(*span, device=DEVICE) for span in spans])


def seen(segment: Segment, window: int | None) -> Tensor:
    """Return which of the visible positions each token of a segment sees."""
    own, prefix = segment.end - segment.start, segment.prefix_end - segment.prefix_start
    lower = torch.ones(own, prefix + own, dtype=torch.bool, device=DEVICE).tril_(prefix)
    return lower if window is None else lower.triu_(prefix - window + 1)


def kernels(segments: tuple[Segment, ...], window: int | None) -> dict[str, Attention]:
    """Return the learner's attention, and those of torch that compute the same."""
    from torch.nn.attention.varlen import varlen_attn

    keys, masks = (
        [visible(segment) for segment in segments],
        [seen(segment, window) for segment in segments],
    )
    asking, asked = [s.end - s.start for s in segments], [len(positions) for positions in keys]
    bounds = [
        torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32, device=DEVICE)
        for counts in (asking, asked)
    ]
    all_keys, packed = torch.cat(keys), PackedSegments(segments, DEVICE)

    def learner(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(nn.Module(), q, k, v, None, segments=packed, sliding_window=window)[0]

    def varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0)}
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            options["enable_gqa"] = True
        flat = [tensor[0].transpose(0, 1) for tensor in (q, k[:, :, all_keys], v[:, :, all_keys])]
        out: Any = varlen_attn(*flat, *bounds, max(asking), max(asked), **options)
        return out[None]

    def by_segment(kernel: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Attention:
        def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            queries = q.split(asking, 2)
            parts = [
                kernel(queries[n], k[:, :, at], v[:, :, at], masks[n]) for n, at in enumerate(keys)
            ]
            return torch.cat(parts, 2).transpose(1, 2)

        return function

    def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

    def flash(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
        out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
            q, *repeated(q, k, v), 0.0, True
        )[0]
        return out

    choice = {"learner": learner, "varlen": varlen, "masked, by segment": by_segment(masked)}
    return choice if window is not None else choice | {"flash, by segment": by_segment(flash)}


def lengths(run: Run) -> None:
    """Time causal attention over lengths that are new, and again: cuDNN builds a plan for each shape."""
    least, most, count, width = run.pick((300, 4000, 40, 128), (30, 90, 4, 32))
    drawn = np.random.default_rng(0).choice(np.arange(least, most), count, replace=False).tolist()

    def inputs(tokens: int) -> list[Tensor]:
        shapes = [(1, heads, tokens, width) for heads in (28, 4, 4)]
        return [
            torch.randn(s, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for s in shapes
        ]

    def sdpa(tokens: int) -> None:
        scaled_dot_product_attention(
            *inputs(tokens), is_causal=True, enable_gqa=True
        ).sum().backward()

    def learner(tokens: int) -> None:
        packed = PackedSegments((Segment(0, tokens),), DEVICE)
        attend(nn.Module(), *inputs(tokens), None, segments=packed)[0].sum().backward()

    for function in (sdpa, learner):
        with measured(function.__name__) as values:
            function(64)
            for when in ("new", "again"):
                times: dict[str, Any] = {}
                for tokens in drawn:
                    with clock(times, str(tokens)):
                        function(tokens)
                values[f"{when}_s"] = statistics.median(times.values())
                values[f"{when}_max_s"] = max(times.values())
    with measured("backend") as values:
        q, k, v = inputs(64)
        # Of SDPBackend: 1 flash, 2 efficient, 3 cuDNN; 0 is the formula.
        values["of_sdpa"] = torch._fused_sdp_choice(q, k, v, None, 0.0, True, enable_gqa=True)


def step(run: Run) -> None:
    """Time a step of the backend `torch`, by what the layers keep, tokens and segments; and where the GPU waits."""
    # The tiny model's layers are below the limit from which `learner/engine/recompute.py` works.
    recompute.WORTH_RECOMPUTING_BYTES = run.pick(recompute.WORTH_RECOMPUTING_BYTES, 0)
    batches = run.pick(
        ((2048, 2), (2048, 32), (8192, 32), (16384, 2), (16384, 32)), ((256, 2), (256, 8))
    )
    for size in run.pick(("1.5B", "0.5B"), ("0.5B",)):
        for mode in ("default", "checkpointing", "products kept"):
            with measured(f"{size}, {mode}") as values:
                time_steps(run, size, mode, batches, values)


def time_steps(
    run: Run, size: str, mode: str, batches: Sequence[tuple[int, int]], start: dict[str, Any]
) -> None:
    shape, model_dir = run.shape(size), run.model_dir(size)
    most = max(tokens for tokens, _ in batches)
    with run.engine(model_dir, most, gradient_checkpointing=mode == "checkpointing") as engine:
        start["states_gb"] = peak_gb()
        if mode == "products kept" and ON_GPU:  # on a CPU it is the default
            scorer: Any = vars(engine)["_backend"].scorer
            recompute.keep_products(scorer.lm)
        for tokens, episodes in batches:
            batch = make_batch(shape.vocabulary, episodes, tokens)

            def work(batch: Batch = batch) -> None:
                engine.train_step(batch, LR)

            with measured(f"{size}, {mode}, {tokens} tokens in {episodes} episodes") as values:
                values |= speed(run, shape, work, tokens, episodes)
        if mode == "default":
            with measured(f"{size}, where the time goes") as values:
                values |= profiled(work)


def speed(
    run: Run, shape: ModelShape, work: Callable[[], object], tokens: int, episodes: int
) -> dict[str, Any]:
    """Return how fast a step is, and the largest memory in it."""
    step_s = run.seconds(work, 2)
    # Three passes, whatever is computed again; half of the tokens have logits.
    flops = 3 * tokens * shape.forward_flops(tokens / episodes / 2, headed_share=0.5)
    values = {"step_s": step_s, "tokens_per_s": rounded(tokens / step_s), "peak_gb": peak_gb()}
    values["tflops"] = rounded(flops / step_s / 1e12)
    name = torch.cuda.get_device_name().replace(" ", "") if ON_GPU else ""
    # The longest name: L40S contains L4.
    cards = sorted(
        (card for card in ACCELERATORS.values() if card.name in name),
        key=lambda card: len(card.name),
    )
    if cards:
        values["mfu"] = rounded(flops / step_s / cards[-1].flops)
    return values


def profiled(work: Callable[[], None]) -> dict[str, Any]:
    """Return the share of a step in which no kernel ran, and the kernels that took longest."""
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    values: dict[str, Any] = {}
    with (
        profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * ON_GPU]) as profiler,
        clock(values, "s"),
    ):
        work()
    events: Any = profiler.events()
    ran = [
        event
        for event in events
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    busy_us, end, totals = 0.0, 0.0, dict[str, float]()
    for event in sorted(ran, key=lambda event: event.time_range.start):
        span = event.time_range
        busy_us += max(0.0, span.end - max(end, span.start))
        end = max(end, span.end)
        totals[event.name[:60]] = totals.get(event.name[:60], 0.0) + span.elapsed_us() / 1e6
    longest = sorted(totals, key=lambda name: -totals[name])[:12]
    values["kernels"], values["idle_share"] = len(ran), rounded(1 - busy_us / 1e6 / values["s"])
    values["longest_s"] = {name: rounded(totals[name]) for name in longest}
    return values


def deepspeed(run: Run) -> None:
    """Step, save, load and step again at ZeRO's stages on one rank; wait with NCCL between two steps."""
    for stage in (1, 2, 3):
        with measured(f"stage {stage}") as values:
            resume(run, stage, values)


def resume(run: Run, stage: int, values: dict[str, Any]) -> None:
    tokens, saved, frame = (
        run.pick(8192, 256),
        run.work / "checkpoint",
        run.work / "frame.safetensors",
    )
    batch = make_batch(run.shape("0.5B").vocabulary, 8, tokens, group=4)
    with run.engine(run.model_dir("0.5B"), tokens, "deepspeed", zero_stage=stage) as engine:
        values["collectives"] = torch.distributed.get_backend()
        values["step_s"] = run.seconds(lambda: engine.train_step(batch, LR), 2)
        values["peak_gb"] = peak_gb()
        with clock(values, "save_s"):
            engine.save(saved, {})
        with clock(values, "write_weights_s"):
            before = engine.write_weights(frame)
        engine.train_step(batch, LR)
        unbroken = engine.write_weights(frame)
        with clock(values, "load_s"):
            engine.load(saved)
        values["load_is_exact"] = engine.write_weights(frame) == before
        engine.train_step(batch, LR)
        values["resume_is_exact"] = engine.write_weights(frame) == unbroken
        if stage == 3:
            time.sleep(run.pick(40, 0.1))
            with clock(values, "step_after_a_wait_s"):
                engine.train_step(batch, LR)
    shutil.rmtree(saved)


def large(run: Run) -> None:
    """Read one long episode with 7B, without an optimizer; train 3B whole."""
    with measured("7B, one episode, no optimizer") as values:
        read_7b(run, values)
    with measured("3B, AdamW") as values:
        train_3b(run, values)


def read_7b(run: Run, values: dict[str, Any]) -> None:
    shape, tokens = run.shape("7B"), run.pick(32768, 256)
    lm = language_model(shape)
    recompute.checkpoint_layers(lm)
    scorer = TokenScorer(lm, device=DEVICE)
    places = torch.arange(tokens, device=DEVICE)
    asked = (
        places % shape.vocabulary,
        places,
        torch.tensor([[0, tokens, 0, 0]]),
        places[tokens // 2 :],
    )
    values["weights_gb"] = peak_gb()
    values |= speed(run, shape, lambda: scorer(*asked).logprobs_N.sum().backward(), tokens, 1)


def train_3b(run: Run, values: dict[str, Any]) -> None:
    tokens, frame = run.pick(16384, 256), run.work / "frame.safetensors"
    with run.engine(run.model_dir("3B"), tokens, gradient_checkpointing=True) as engine:
        batch = make_batch(run.shape("3B").vocabulary, 4, tokens, group=4)
        values |= speed(run, run.shape("3B"), lambda: engine.train_step(batch, LR), tokens, 4)
        for when in ("first", "second"):
            with clock(values, f"write_weights_{when}_s"):
                engine.write_weights(frame)
            engine.train_step(batch, LR)


def publish(run: Run) -> None:
    """Take a version of 3B off the GPU in several ways; compare two versions on it; apply changes there and here."""
    source, frame = run.model_dir("3B") / "model.safetensors", run.work / "frame.safetensors"
    olds = {
        name: t.flatten().view(torch.int16)
        for name, t in load_file(source, device=DEVICE.type).items()
    }
    size = sum(tensor.nbytes for tensor in olds.values())
    with measured("off the GPU") as values:
        values["gb"] = rounded(size / 1e9)
        values["pageable_s"] = run.seconds(
            lambda: [tensor.to("cpu", copy=True) for tensor in olds.values()], 2
        )
        with clock(values, "pin_s"):
            pinned = torch.empty(size // 2, dtype=torch.int16, pin_memory=ON_GPU)
        slots = torch.split(pinned, [len(tensor) for tensor in olds.values()])
        copies = list(zip(slots, olds.values(), strict=True))
        values["pinned_s"] = run.seconds(
            lambda: [slot.copy_(old, non_blocking=True) for slot, old in copies], 2
        )
        with clock(values, "write_s"):
            frame.write_bytes(pinned.numpy().data)
        with clock(values, "digest_s"):
            digest_file(frame)
        frame.unlink()
    news = {name: changed(tensor) for name, tensor in olds.items()}
    changes = {}
    with measured("compared on the GPU") as values:
        with clock(values, "compare_s"):
            for name, tensor in olds.items():
                places = (tensor != news[name]).nonzero()[:, 0]
                changes[name] = (places.to(torch.int32).cpu(), news[name][places].cpu())
        with clock(values, "apply_s"):
            for name, (places, words) in changes.items():
                olds[name].index_copy_(0, places.to(DEVICE, torch.int64), words.to(DEVICE))
        values["exact"] = all(torch.equal(tensor, news[name]) for name, tensor in olds.items())
    with measured("coded on the host") as values:
        old = bytearray(source.read_bytes())
        new = bytearray(old)
        for name, words in read_layout(old).tensors.items():
            image = np.frombuffer(new, np.int16, words.size_bytes // 2, words.offset)
            image[changes[name][0].numpy()] = changes[name][1].numpy()
        with clock(values, "compile_s"):
            warm_up()
        with clock(values, "encode_s"):
            coded = encode_changes(old, new)
        with clock(values, "apply_s"):
            apply_changes(old, coded)
        values |= {"gb": rounded(len(coded) / 1e9), "exact": old == new}


def changed(words: Tensor) -> Tensor:
    """Return a copy in which some words are one larger."""
    places = torch.randint(len(words), (max(1, int(len(words) * CHANGED_SHARE)),), device=DEVICE)
    copy = words.clone()
    copy[places] += 1
    return copy


def learning(run: Run) -> None:
    """Sample with transformers, train on it: the gap between the two, the reward, and a resume."""
    vocabulary, steps, lr = 512, run.pick(20, 2), run.pick(1e-4, 1e-3)
    lm = language_model(replace(run.shape("0.5B"), vocabulary=vocabulary))
    frame, saved = run.work / "frame.safetensors", run.work / "checkpoint"
    with run.engine(run.model_dir("0.5B", vocabulary=vocabulary), 16384) as engine:
        with measured("steps") as values:
            values |= {"rewards": [], "gaps": [], "step_s": []}
            for number in range(steps):
                started = time.perf_counter()
                engine.write_weights(frame)
                lm.load_state_dict(load_file(frame, device=DEVICE.type), strict=False)
                batch = sample(run, lm, number, vocabulary)
                stats = engine.train_step(batch, lr)
                values["rewards"].append(
                    rounded(float(np.mean([t.rewards_L[-1] for t in batch.traces])))
                )
                values["gaps"].append(rounded(stats.logprob_gap))
                values["step_s"].append(rounded(time.perf_counter() - started))
        with measured("gap of each episode") as values:
            values["gaps"] = [
                rounded(engine.logprob_gap_at(t, batch.version, frame)) for t in batch.traces[:4]
            ]
        with measured("resume") as values:
            engine.save(saved, {})
            digests = []
            for _ in range(2):
                engine.load(saved)
                engine.train_step(batch, lr)
                digests.append(engine.write_weights(frame))
            values["exact"] = digests[0] == digests[1]


@torch.no_grad()
def sample(run: Run, lm: Any, policy: int, vocabulary: int) -> Batch:
    """Return episodes of one prompt in groups of eight, whose reward is the share of tokens of the lower half."""
    episodes, tokens = run.pick((64, 32), (16, 8))
    prompts = torch.ones(episodes, 8, dtype=torch.int64, device=DEVICE)
    torch.manual_seed(policy)
    output = lm.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=tokens,
        do_sample=True,
        top_k=0,
        top_p=1.0,
        pad_token_id=0,
        cache_implementation="static",
        disable_compile=True,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logprobs = torch.stack(output.logits, 1).float().log_softmax(-1)
    logprobs = logprobs.gather(-1, output.sequences[:, 8:, None])[..., 0].cpu().numpy()
    ids = output.sequences.cpu().numpy()
    rewards = (ids[:, 8:] < vocabulary // 2).mean(1)
    rows = np.concatenate([np.zeros((episodes, 8)), logprobs], 1)
    traces = [make_trace(ids[n], 8, rows[n], rewards[n], n // 8, policy) for n in range(episodes)]
    return Batch(tuple(traces), policy)


def out_of_memory(run: Run) -> None:
    """Train with too little memory: what the engine raises, and whether it goes on with less."""
    shape, tokens = run.shape("0.5B"), run.pick(65536, 512)
    fitting, too_large = (
        make_batch(shape.vocabulary, 8, count) for count in (tokens // 32, tokens)
    )
    with run.engine(run.model_dir("0.5B"), tokens) as engine:
        with measured("a batch that fits") as values:
            values["step_s"] = run.seconds(lambda: engine.train_step(fitting, LR), 2)
            values["peak_gb"] = peak_gb()
        if ON_GPU:
            whole = torch.cuda.get_device_properties(DEVICE).total_memory
            torch.cuda.set_per_process_memory_fraction(
                1.5 * torch.cuda.max_memory_reserved() / whole
            )
        with measured("one that does not"):
            engine.train_step(too_large, LR)
        with measured("the batch that fits, again") as values:
            values["step_s"] = run.seconds(lambda: engine.train_step(fitting, LR))
            values["peak_gb"] = peak_gb()


def fragments(run: Run) -> None:
    """Train on packed batches of different lengths: what the allocator holds beyond what is used."""
    most, count = run.pick((16384, 50), (256, 3))
    shape, rng = run.shape("0.5B"), np.random.default_rng(0)
    with measured("different lengths") as values, run.engine(run.model_dir("0.5B"), most) as engine:
        values["allocator"] = os.environ["PYTORCH_ALLOC_CONF"]
        with clock(values, "all_s"):
            for number in range(count):
                tokens = int(rng.integers(most // 8, most))
                engine.train_step(make_batch(shape.vocabulary, 4, tokens, seed=number), LR)
        if ON_GPU:
            statistics_of = torch.cuda.memory_stats()
            for name in ("reserved", "allocated"):
                values[f"{name}_gb"] = rounded(statistics_of[f"{name}_bytes.all.current"] / 1e9)
                values[f"{name}_peak_gb"] = rounded(statistics_of[f"{name}_bytes.all.peak"] / 1e9)
            values["retries"] = statistics_of["num_alloc_retries"]


def head(run: Run) -> None:
    """Score tokens with 7B's head: the learner's way, and in chunks; time, memory, gradients against float64."""
    rows, chunks = run.pick((8192, (220, 2048, 8192)), (64, (8, 64)))
    lm = language_model(replace(run.shape("7B"), layers=1, tied=False))
    scorer, hidden = TokenScorer(lm, device=DEVICE), list[Tensor]()
    weight_VD: Tensor = lm.lm_head.weight
    places = torch.arange(rows + 1, device=DEVICE)
    ids = places * 7919 % len(weight_VD)
    asked = (ids, places, torch.tensor([[0, rows + 1, 0, 0]]), places[1:])

    def keep(_: object, __: object, output: Any) -> None:
        output.last_hidden_state.retain_grad()
        hidden[:] = [output.last_hidden_state]

    def learner() -> list[Tensor]:
        weight_VD.grad = None
        scorer(*asked).logprobs_N.sum().backward()
        return [tensor.grad for tensor in (hidden[0], weight_VD) if tensor.grad is not None]

    def chunked(rows_at_once: int, dtype: torch.dtype) -> list[Tensor]:
        """Return the gradients of hidden states and head; autograd adds up those of the chunks."""
        leaves = [
            tensor.detach().to(dtype).requires_grad_() for tensor in (hidden[0][0], weight_VD)
        ]
        for start in range(0, rows, rows_at_once):
            part = slice(start, min(start + rows_at_once, rows))
            logits = linear(leaves[0][part], leaves[1])
            logprobs = logits.to(torch.promote_types(dtype, torch.float32)).log_softmax(-1)
            logprobs.gather(-1, ids[1:][part, None]).sum().backward()
        return [tensor.grad for tensor in leaves if tensor.grad is not None]

    lm.base_model.register_forward_hook(keep)
    with measured("learner, and one layer") as values:
        ours = learner()
        right = chunked(min(chunks), torch.float64)
        values["error_hidden"], values["error_head"] = map(
            relative_error, (ours[0][0], ours[1]), right
        )
        forget()
        values["s"] = run.seconds(learner, 2)
        values["peak_gb"] = peak_gb()
    for size in chunks:
        with measured(f"chunks of {size}") as values:
            ours = chunked(size, torch.bfloat16)
            values["error_hidden"], values["error_head"] = map(relative_error, ours, right)
            ours.clear()
            forget()
            values["s"] = run.seconds(lambda size=size: chunked(size, torch.bfloat16), 2)
            values["peak_gb"] = peak_gb()


PARTS: dict[str, Callable[[Run], None]] = {
    "machine": machine,
    "attention": attention,
    "lengths": lengths,
    "step": step,
    "deepspeed": deepspeed,
    "large": large,
    "publish": publish,
    "learning": learning,
    "out_of_memory": out_of_memory,
    "fragments": fragments,
    "head": head,
}


if __name__ == "__main__":
    main()
