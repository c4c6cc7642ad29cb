"""The plan's bytes are those of the live tensors of DeepSpeed's ranks, on CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from horizonrl.common.config.schema import RunConfig
from horizonrl.ops.plan.hardware import Fleet
from horizonrl.ops.plan.memory import LearnerMemory, learner_memory
from horizonrl.ops.plan.shapes import shape_of_directory
from tests.ops.plan.rank_memory import TOKENS, ZERO, counted

WITHIN = 0.1


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A model whose embeddings are half of it, and a deep one whose embedding is tied and small."""
    directories = []
    for name, vocabulary, wide, layers, tied in (
        ("wide", 2048, 256, 4, False),
        ("deep", 512, 512, 6, True),
    ):
        config = Qwen2Config(
            vocab_size=vocabulary,
            hidden_size=128,
            intermediate_size=wide,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
        )
        directories.append(tmp_path_factory.mktemp(name))
        Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(directories[-1])
    return directories


def planned(directory: Path, stage: int, ranks: int) -> LearnerMemory:
    """Return the plan for a rank with the settings of `rank_memory.py`, without the framework."""
    config = RunConfig.load([], [f"--learner.zero_stage={stage}", f"--learner.ranks={ranks}"])
    sizes = {"micro_batch_tokens": TOKENS, "deepspeed": {"zero_optimization": ZERO}}
    config = config.model_copy(update={"learner": config.learner.model_copy(update=sizes)})
    return learner_memory(
        config, shape_of_directory(directory), Fleet.parse(f"{ranks}xCPU", "--learner")
    )


@pytest.mark.process
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_holds_what_the_plan_says_at_every_stage(models: list[Path], ranks: int) -> None:
    directory = models[ranks - 1]  # one rank with the wide model, two with the deep one
    figures: dict[str, Any] = counted(directory, ranks)
    for stage in range(4):
        memory, was = planned(directory, stage, ranks), figures[str(stage)]
        case = (stage, memory, was)
        assert memory.total - memory.framework == pytest.approx(was["peak"], rel=WITHIN), case
        assert memory.weights == pytest.approx(was["held"]["torch.bfloat16"], rel=WITHIN), case
        # Between two steps: stages 0 and 2 have no gradients then, and stage 3 has its bucket too.
        kept = memory.optimizer + (memory.gradients if stage in (1, 3) else 0)
        kept += 4 * ZERO["reduce_bucket_size"] if stage == 3 else 0
        assert kept == pytest.approx(was["held"]["torch.float32"], rel=WITHIN), case
