"""What `[learner.deepspeed]` passes on changes neither a digest nor a checkpoint."""

from pathlib import Path
from typing import Any

import pytest

from horizonrl.common.config.deepspeed import PASSED_OF_ZERO, refuse_unsafe
from horizonrl.learner.engine.api import EngineSettings
from horizonrl.learner.engine.registry import make_engine
from tests.learner.engine.test_ranks import KL
from tests.learner.engines import on_deepspeed
from tests.learner.ranks_program import train

OFFLOADED = {"device": "cpu", "pin_memory": False}
BUCKETS = {"reduce_bucket_size": 50_000, "overlap_comm": True, "contiguous_gradients": True}
EACH_STAGE: dict[int, dict[str, Any]] = {
    1: {"offload_optimizer": OFFLOADED, "allgather_bucket_size": 40_000},
    2: {"offload_optimizer": OFFLOADED, "reduce_scatter": True, **BUCKETS},
    3: {
        "offload_optimizer": OFFLOADED,
        "offload_param": OFFLOADED,
        "sub_group_size": 30_000,
        "stage3_prefetch_bucket_size": 10_000,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 100_000,
        "stage3_max_reuse_distance": 100_000,
        **BUCKETS,
    },
}


@on_deepspeed
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offload_and_buckets_make_the_same_weights(
    stage: int, tiny_model: Path, tmp_path: Path
) -> None:
    digests = []
    for passed in ({}, {"zero_optimization": EACH_STAGE[stage]}):
        refuse_unsafe(passed)
        directory = tmp_path / str(len(digests))
        directory.mkdir()
        # At stages 1 and 3 offload adds up the gradient's norm in another order, so that a gradient that is clipped
        # differs in its last bits. Here none is clipped there.
        limits = {"max_grad_norm": 1e9 if stage in (1, 3) else 1.0, "micro_batch_tokens": 128}
        settings = EngineSettings(
            tiny_model, zero_stage=stage, deepspeed=passed, objective=KL, **limits
        )
        figures = train(make_engine(settings), directory)
        assert figures["repeats"], "a step after `load` made other weights than before"
        digests.append(figures["digest"])
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"bf16": {"enabled": False}},
            "bf16 cannot be set: the learner always computes in bfloat16",
        ),
        ({"train_batch_size": 8}, r"train_batch_size cannot be set: rl\.groups_per_step decides"),
        ({"gradient_clipping": 0.5}, r"set learner\.max_grad_norm"),
        ({"optimizer": {"type": "Lion"}}, "the optimizer is AdamW"),
        (
            {"zero_optimization": {"stage": 2}},
            r"zero_optimization\.stage cannot be set: set learner\.zero_stage",
        ),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "it rounds the weights"),
        ({"zero_optimization": {"overlap_com": True}}, "did you mean overlap_comm"),
        (
            {"zero_optimization": {"offload_param": {"device": "nvme"}}},
            "'nvme': choose cpu or none",
        ),
        ({"zero_optimization": {"offload_param": "cpu"}}, "write it as a table"),
        (
            {"zero_optimization": {"offload_optimizer": {"ratio": 0.3}}},
            r"offload_optimizer\.ratio is no key",
        ),
        ({"zero_optimisation": {}}, "did you mean zero_optimization"),
    ],
)
def test_what_could_change_a_digest_is_refused_with_the_reason(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        refuse_unsafe(given)


def test_every_key_that_passes_is_one_of_deepspeed() -> None:
    fields = pytest.importorskip("deepspeed.runtime.zero.config").DeepSpeedZeroConfig.model_fields
    assert fields.keys() | {field.alias for field in fields.values()} >= PASSED_OF_ZERO
