"""What a CUDA machine computes: the learner's step, the codec of weights, checkpoints, memory and speed, as one table.

    python -m horizonrl.ops.bench.gpu --device cuda --model 0.5B --json gpu.json

For a bare machine with PyTorch and transformers and no network: `make gpu-bundle` packs this package and what else it
imports as wheels. Each measurement is a process of its own, so that one's memory is not another's. `--device cpu` runs
the same with a tiny model; a row that needs what is not installed says so.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

LOGPROB_TOLERANCE = 0.02
"""Difference of an episode's mean logprob between two devices, in nats: bfloat16 rounds at 2 ** -8, and sums differ."""
NORM_TOLERANCE = 0.05
"""Relative difference of the gradient's norm between two devices."""
LR = 1e-5
WARM_STEPS, TIMED_STEPS = 1, 3


@dataclass(frozen=True, slots=True)
class Check:
    what: str
    found: str
    expected: str
    good: bool | None
    """None for a measurement that nothing is expected of, and for one that could not be made."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", default="tiny", help="tiny, a size such as 0.5B (random weights), or a directory")
    parser.add_argument("--backend", choices=("torch", "deepspeed"), default="torch")
    parser.add_argument("--episodes", type=int, default=8, help="episodes of the batch; 8")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of an episode; 256")
    parser.add_argument("--micro-batch-tokens", type=int, default=2048)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.part:
        print(json.dumps(PARTS[arguments.part](arguments)))
        return 0
    with tempfile.TemporaryDirectory(prefix="horizonrl-gpu-") as work:
        arguments.work = Path(work)
        return _report(arguments, *_measure(arguments))


def _measure(arguments: argparse.Namespace) -> tuple[list[Check], dict[str, Any]]:
    """Run every part in a process of its own; return the rows and all that the parts said."""
    _made(arguments)
    found: dict[str, Any] = {"own": _child(arguments, "learn", arguments.device)}
    if arguments.device != "cpu":
        found["cpu"] = _child(arguments, "learn", "cpu")
    found["codec"] = _child(arguments, "codec", "cpu")
    own = found["own"]
    rows = []
    if "cpu" in found:
        cpu = found["cpu"]
        gap = float(np.abs(np.array(own["gaps"]) - np.array(cpu["gaps"])).max())
        near = gap < LOGPROB_TOLERANCE
        rows.append(Check("logprobs against the CPU's", f"{gap:.4f} nats", f"< {LOGPROB_TOLERANCE}", near))
        off = abs(own["grad_norm"] / cpu["grad_norm"] - 1)
        near = off < NORM_TOLERANCE
        rows.append(Check("gradient norm against the CPU's", f"{off:.2%} off", f"< {NORM_TOLERANCE:.0%}", near))
    rows += [
        Check("two steps from one start", own["again"], "the same weights", own["again"] == "the same weights"),
        Check("a step after a resume", own["resumed"], "the same weights", own["resumed"] == "the same weights"),
        Check("learner, peak memory", _gb(own["peak_bytes"]), f"plan: {_gb(own['planned_bytes'])}", None),
        Check("learner, tokens per second", f"{own['tokens_per_s']:,.0f}", "", None),
        Check("a frame", _gb(own["frame_bytes"]), f"plan: {_gb(own['planned_frame'])}", None),
        Check("a checkpoint", _gb(own["checkpoint_bytes"]), f"plan: {_gb(own['planned_checkpoint'])}", None),
    ]
    codec = found["codec"]
    if "missing" in codec:
        rows.append(Check("codec of changes", f"not run: {codec['missing']}", "", None))
    else:
        rows += [
            Check("changes, applied", "exact" if codec["exact"] else "NOT exact", "exact", codec["exact"]),
            Check("changes, size", f"1/{codec['ratio']:.0f} of the frame", "", None),
            Check("changes, encode and apply", f"{codec['encode_s']:.2f} s, {codec['apply_s']:.2f} s", "", None),
        ]
    return rows, found


def _report(arguments: argparse.Namespace, rows: Sequence[Check], found: dict[str, Any]) -> int:
    for row in rows:
        verdict = {True: "ok", False: "FAILED", None: "-"}[row.good]
        print(f"{verdict:7}{row.what:36}{row.found:26}{row.expected}")
    if arguments.json is not None:
        report = {"device": found["own"]["device"], "torch": found["own"]["torch"], "model": arguments.model}
        report |= {"rows": [{slot: getattr(row, slot) for slot in Check.__slots__} for row in rows], "parts": found}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 1 if any(row.good is False for row in rows) else 0


def _child(arguments: argparse.Namespace, part: str, device: str) -> dict[str, Any]:
    """Run a part in a process of its own; without a GPU in sight if it is the CPU's."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    words = [sys.executable, "-m", "horizonrl.ops.bench.gpu", "--part", part, "--device", device]
    words += ["--work", str(arguments.work), "--model", arguments.model, "--backend", arguments.backend]
    words += ["--episodes", str(arguments.episodes), "--tokens", str(arguments.tokens)]
    words += ["--micro-batch-tokens", str(arguments.micro_batch_tokens)]
    done = subprocess.run(words, env=os.environ | hidden, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the part {part} on {device} ended with code {done.returncode}; its errors are above")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _made(arguments: argparse.Namespace) -> None:
    """Put the model's directory at WORK/model: a link to a given one, or random weights of a size."""
    place, given = arguments.work / "model", Path(arguments.model)
    if given.is_dir():
        place.symlink_to(given.resolve())
        return
    from horizonrl.ops.plan.shapes import ModelShape, shape_of_size

    tiny = ModelShape("tiny", 2, 128, 256, 128, 64, 512, tied=True)
    shape = tiny if arguments.model == "tiny" else shape_of_size(arguments.model)
    width = 32 if shape is tiny else 128 if shape.kv_width % 128 == 0 and shape.query_width % 128 == 0 else 64
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.query_width // width,
        num_key_value_heads=shape.kv_width // width,
        tie_word_embeddings=shape.tied,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        qwen: Any = Qwen2ForCausalLM
        qwen(config).save_pretrained(place)
    finally:
        torch.set_default_dtype(torch.float32)


def _learn(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train on one batch; say what was computed, whether it repeats and resumes, and what it took."""
    import torch

    from horizonrl.broker.weights.frames import digest_file
    from horizonrl.common.config.schema import RunConfig
    from horizonrl.learner.engine.api import EngineSettings
    from horizonrl.learner.engine.registry import make_engine
    from horizonrl.ops.plan.estimate import learner_memory
    from horizonrl.ops.plan.hardware import ACCELERATORS, Fleet
    from horizonrl.ops.plan.shapes import shape_of_directory

    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: give --device cpu, or run this where torch.cuda.is_available()")
    model, work = arguments.work / "model", arguments.work / f"learn-{arguments.device}"
    settings = EngineSettings(
        model_dir=model,
        backend=arguments.backend,
        micro_batch_tokens=arguments.micro_batch_tokens,
        threads=int(os.environ.get("OMP_NUM_THREADS", "1")),
    )
    engine = make_engine(settings)
    batch = _batch(arguments.episodes, arguments.tokens, engine.vocabulary)
    engine.save(work / "start", {})
    engine.write_weights(work / "start.safetensors")
    first = engine.train_step(batch, LR)
    old, new = arguments.work / "old.safetensors", arguments.work / "new.safetensors"
    engine.write_weights(old)
    engine.save(work / "middle", {})
    times = []
    for _ in range(WARM_STEPS + TIMED_STEPS):
        started = time.perf_counter()
        engine.train_step(batch, LR)
        if arguments.device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() if arguments.device == "cuda" else _resident_bytes()
    gaps = [engine.logprob_gap_at(trace, 0, work / "start.safetensors") for trace in batch.traces]
    engine.load(work / "middle")
    engine.train_step(batch, LR)
    second = engine.write_weights(new)
    engine.load(work / "start")
    engine.train_step(batch, LR)
    again = engine.write_weights(work / "again.safetensors")
    engine.train_step(batch, LR)
    unbroken = engine.write_weights(work / "unbroken.safetensors")
    config = RunConfig.load([], [f"--learner.micro_batch_tokens={arguments.micro_batch_tokens}"])
    config = config.model_copy(update={"learner": config.learner.model_copy(update={"backend": arguments.backend})})
    shape = shape_of_directory(model)
    place = "H100" if arguments.device == "cuda" else "CPU"
    planned = learner_memory(config, shape, Fleet(1, ACCELERATORS[place]))
    return {
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "loss": first.loss,
        "grad_norm": first.grad_norm,
        # Per episode, under the weights that every device begins with.
        "gaps": gaps,
        "again": "the same weights" if again == digest_file(old) else "other weights",
        "resumed": "the same weights" if second == unbroken else "other weights",
        "peak_bytes": peak,
        "planned_bytes": planned.total - (planned.framework if arguments.device == "cuda" else 0),
        "tokens_per_s": sum(len(trace.ids_L) for trace in batch.traces) / statistics.median(times[WARM_STEPS:]),
        "frame_bytes": old.stat().st_size,
        "planned_frame": 2 * shape.parameters,
        "checkpoint_bytes": sum(file.stat().st_size for file in (work / "middle").iterdir()),
        "planned_checkpoint": 12 * shape.parameters,
    }


def _codec(arguments: argparse.Namespace) -> dict[str, Any]:
    """Encode the changes between two frames of the learner's, apply them, and compare every byte."""
    try:
        # By name: the codec is younger than this program.
        codec: Any = import_module("horizonrl.broker.weights.changes")
    except ImportError as error:
        return {"missing": str(error)}
    old, new = ((arguments.work / f"{name}.safetensors").read_bytes() for name in ("old", "new"))
    try:
        codec.encode_changes(old, new)  # compiles
    except Exception as error:  # noqa: BLE001 - numba is not on every machine, and that is what the row then says
        return {"missing": f"{type(error).__name__}: {error}"}
    started = time.perf_counter()
    changes = codec.encode_changes(old, new)
    encoded = time.perf_counter()
    codec.apply_changes(bytearray(old), changes)
    image = bytearray(old)
    begun = time.perf_counter()
    codec.apply_changes(image, changes)
    return {
        "exact": bytes(image) == new,
        "ratio": len(new) / len(changes),
        "encode_s": encoded - started,
        "apply_s": time.perf_counter() - begun,
    }


def _batch(episodes: int, tokens: int, vocabulary: int) -> Any:
    """Return a batch of random episodes in groups of four; the second half of each is generated, in turns of 16."""
    from horizonrl.learner.intake.batch import Batch, Trace

    rng = np.random.default_rng(0)
    traces = []
    for index in range(episodes):
        places = np.arange(tokens) - tokens // 2
        generated = (places >= 0) & (places % 32 < 16)
        generated[-1] = True
        rewards = np.zeros(tokens, np.float32)
        rewards[-1] = index % 2
        turns = np.where(generated, places // 32, -1).astype(np.int32)
        traces.append(
            Trace(
                ids_L=rng.integers(0, vocabulary, tokens).astype(np.int32),
                turns_L=turns,
                logprobs_L=np.where(generated, -float(np.log(vocabulary)), 0.0).astype(np.float32),
                versions_L=np.where(generated, 0, -1).astype(np.int32),
                rewards_L=rewards,
                group=index // 4,
            )
        )
    return Batch(tuple(traces), 0)


def _resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _gb(count: float) -> str:
    return f"{count / 1e9:.3f} GB"


PARTS = {"learn": _learn, "codec": _codec}


if __name__ == "__main__":
    sys.exit(main())
