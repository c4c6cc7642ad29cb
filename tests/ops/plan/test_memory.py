"""The plan's activations are those of fake tensors, at full size."""

import pytest

from horizonrl.common.config.schema import RunConfig
from horizonrl.ops.plan.hardware import Fleet
from horizonrl.ops.plan.memory import learner_memory
from horizonrl.ops.plan.shapes import SIZES
from tests.ops.plan.fake_pass import peak_bytes

WITHIN = 0.1


@pytest.mark.parametrize("checkpoint", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize(
    ("size", "head_width", "tokens"), [("0.5B", 64, 8192), ("7B", 128, 16_384)]
)
def test_activations_are_those_of_fake_tensors(
    size: str, head_width: int, tokens: int, checkpoint: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [
        f"--learner.micro_batch_tokens={tokens}",
        f"--learner.gradient_checkpointing={checkpoint}".lower(),
    ]
    memory = learner_memory(
        RunConfig.load([], overrides), SIZES[size], Fleet.parse("1xCPU", "--learner")
    )
    peak = peak_bytes(SIZES[size], head_width, tokens, checkpoint, monkeypatch)
    assert memory.activations + memory.backward == pytest.approx(peak, rel=WITHIN)
