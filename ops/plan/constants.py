"""Every number of the formulas that is not the model's or the recipe's, with where it is from."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Constant:
    value: float
    unit: str
    kind: Literal["measured", "vendor", "code", "assumption"]
    """measured: here, with the command in docs/scaling.md; vendor: a data sheet; code: a number of this program."""
    source: str


# What a token leaves behind in a layer for the backward pass, in bytes per unit of width (bfloat16). Least squares over
# six shapes of Llama and of Qwen2, whose saved tensors were counted; the residual is below 0.1 %.
SAVED_HIDDEN = Constant(
    20.0, "B", "measured", "per hidden unit, token and layer: count of saved tensors"
)
SAVED_KV = Constant(
    4.0, "B", "measured", "per key-value unit, token and layer: count of saved tensors"
)
SAVED_FEED_FORWARD = Constant(
    8.0, "B", "measured", "per feed-forward unit, token and layer: count of saved tensors"
)
SAVED_TAIL = Constant(
    7.0, "B", "measured", "per hidden unit and token after the last layer: count of saved tensors"
)
LAYER_GRADIENTS = Constant(
    4.0, "B", "measured", "per feed-forward unit and token in a layer's backward pass"
)
LOGITS = Constant(
    512 << 20, "B", "code", "logits of one chunk of tokens on a GPU (learner/engine/model/head.py)"
)
LOGITS_CPU = Constant(
    64 << 20, "B", "code", "logits of one chunk of tokens on a CPU (learner/engine/model/head.py)"
)
REDUCE_BUCKET = Constant(
    5e8, "", "code", "DeepSpeed's reduce_bucket_size: elements that are reduced at once"
)
LIVE_PARAMETERS = Constant(
    1e9, "", "code", "DeepSpeed's stage3_max_live_parameters: gathered at once"
)
SUB_GROUP = Constant(
    1e9, "", "code", "DeepSpeed's sub_group_size: elements that stage 3 updates at once"
)
FRAMEWORK = Constant(2.0e9, "B", "assumption", "CUDA context, kernels and allocator per process")
FRAMEWORK_CPU = Constant(
    0.45e9, "B", "assumption", "a learner before its model on CPU, set so that two runs agree"
)
ENGINE_WORKSPACE = Constant(2.5e9, "B", "assumption", "vLLM's activations and CUDA graphs, per GPU")

TRAIN_UTILISATION = Constant(
    0.35, "", "assumption", "share of the peak in training, of a model that fills the GPU"
)
PREFILL_UTILISATION = Constant(0.40, "", "assumption", "share of the peak in prefill")
BANDWIDTH_UTILISATION = Constant(
    0.60, "", "assumption", "share of the memory bandwidth in decoding"
)
DECODE_OVERHEAD = Constant(
    0.004, "s", "assumption", "per decoded token of all slots: scheduling, sampling, launches"
)
GPUS_PER_HOST = Constant(
    8, "", "assumption", "GPUs of one host, which share one download of the weights"
)
HOST_LINK = Constant(25e9 / 8, "B/s", "assumption", "a host's link to the broker: 25 Gbit/s")
RANK_LINK = Constant(
    300e9, "B/s", "assumption", "between the GPUs of a host: two thirds of NVLink 4's 450 GB/s"
)
NODE_LINK = Constant(
    25e9, "B/s", "assumption", "a GPU's part of the fabric between hosts: half of 400 Gbit/s"
)

HOST_COPY = Constant(20e9, "B/s", "assumption", "from a GPU into pinned memory, over PCIe")
WRITE = Constant(2.45e9, "B/s", "measured", "a weights file to tmpfs, one thread: 15.2 GB in 6.2 s")
DIGEST = Constant(4.0e9, "B/s", "measured", "xxh3_128 of a file, one thread: 15.2 GB in 3.8 s")
ENCODE = Constant(
    8 * 1.17e9,
    "B/s",
    "measured",
    "changes between two files: 15.2 GB in 13 s of one core, on 8 of them",
)
KEY_FRAME = Constant(460e6, "B/s", "measured", "a key frame into the stream: 350 to 570 MB/s")
PATCH = Constant(
    4.1e9, "B/s", "measured", "changes into a host's file, one thread: 15.2 GB in 3.7 s"
)
LOAD = Constant(
    4.0e9, "B/s", "measured", "a file into an engine through vLLM's loader: 15.2 GB in 3.8 s on CPU"
)
PROBE = Constant(
    5.1e9, "B/s", "measured", "the probe and the embedding's comparison: 15.2 GB in 3.0 s on CPU"
)
CHECKPOINT = Constant(
    0.9e9, "B/s", "measured", "a checkpoint through one thread of rank 0: 107 GB in 90 to 150 s"
)

EPISODE_FILL = Constant(
    0.5, "", "assumption", "mean share of model.max_context_tokens that an episode fills"
)
GENERATED_SHARE = Constant(
    0.5, "", "assumption", "share of an episode's tokens that the policy generated"
)

GENERATED_TOKEN = Constant(
    12.0, "B", "measured", "of a group per generated token: id, logprob, about 4 letters"
)
OTHER_TOKEN = Constant(8.0, "B", "measured", "of a group per other token: id, about 4 letters")
EPISODE_TURNS = Constant(10, "", "assumption", "turns of an episode, for the size of a group")
TURN = Constant(150.0, "B", "measured", "of a group per turn: names of fields, spans, lengths")
BROKER_GROUPS = Constant(
    1055.0, "/s", "measured", "groups of 40 kB published to one server (bench durability)"
)
BROKER_BYTES = Constant(
    1055.0 * 40_000, "B/s", "measured", "the same in bytes; larger groups are bound by these"
)
DECODE_GROUP = Constant(
    40e-9, "s/B", "measured", "learner's CPU per byte of a group: 6.8 ms for 171 kB"
)
EPISODE_FILE = Constant(16.0, "B", "measured", "of episodes/ per token")

KEY_FRAME_EVERY = Constant(
    64, "", "code", "versions between two key frames (learner/loop/weights_publisher.py)"
)
FRAMES_STORED = Constant(
    4, "", "code", "weights that the stream holds at most (learner/loop/weights_publisher.py)"
)
BROKER_STORE = Constant(
    40 << 30, "B", "code", "the broker's store in ops/deploy/kubernetes/nats/values.yaml"
)
CHANGE_RATIOS = {
    1e-6: Constant(
        605,
        "",
        "measured",
        "frame over changes at 1e-6: SmolLM2-135M, bench weights (docs/weights.md)",
    ),
    1e-5: Constant(
        134,
        "",
        "measured",
        "frame over changes at 1e-5: SmolLM2-135M, bench weights (docs/weights.md)",
    ),
    4e-5: Constant(
        52,
        "",
        "measured",
        "frame over changes at 4e-5: SmolLM2-135M, bench weights (docs/weights.md)",
    ),
}
"""By learning rate; in between, the logarithms are interpolated, and outside the nearest rate counts."""


def rank_link(ranks: int) -> float:
    """Return the bytes per second between ranks: of one host, or of several."""
    return (RANK_LINK if ranks <= GPUS_PER_HOST.value else NODE_LINK).value


def table() -> dict[str, Constant]:
    """Return every constant by name, in the order of this file."""
    single = {
        name.lower(): value for name, value in globals().items() if isinstance(value, Constant)
    }
    return single | {
        f"change_ratio at {rate:g}": constant for rate, constant in CHANGE_RATIOS.items()
    }
