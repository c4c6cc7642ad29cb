"""One rank and two ranks make the same step; a rank that dies ends the others."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from horizonrl.learner.ranks import decode_batch, encode_batch
from tests.learner.ranks_program import run_program
from tests.learner.traces import make_batch


def flat(path: Path) -> torch.Tensor:
    return torch.cat([tensor.flatten().float() for _, tensor in sorted(load_file(path).items())])


@given(st.integers(0, 1000), st.integers(0, 6))
def test_a_batch_crosses_to_the_other_ranks_bit_for_bit(seed: int, traces: int) -> None:
    batch = make_batch(seed, traces=traces)
    received = decode_batch(encode_batch(batch))
    assert received.version == batch.version
    for sent, got in zip(batch.traces, received.traces, strict=True):
        for name in ("ids_L", "mask_L", "logprobs_L", "versions_L", "advantages_L"):
            assert getattr(sent, name).dtype == getattr(got, name).dtype
            assert getattr(sent, name).tobytes() == getattr(got, name).tobytes()


@pytest.fixture(scope="module")
def alone(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], torch.Tensor]:
    """What one rank makes: its figures and its weights."""
    directory = tmp_path_factory.mktemp("alone")
    (figures,) = run_program("train-z1", tiny_model, directory, ranks=1)
    assert figures["rc"] == 0, figures
    return figures, flat(directory / "weights.safetensors")


@pytest.mark.process
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_two_ranks_make_the_steps_of_one(
    alone: tuple[dict[str, Any], torch.Tensor], tiny_model: Path, tmp_path: Path, zero_stage: int
) -> None:
    leader, follower = run_program(f"train-z{zero_stage}", tiny_model, tmp_path, ranks=2)
    assert (leader["rc"], follower["rc"]) == (0, 0), (leader, follower)
    figures, weights = alone
    assert leader["trained_tokens"] == figures["trained_tokens"]
    for name in ("loss", "grad_norm", "ess"):
        assert leader[name][0] == pytest.approx(figures[name][0], rel=1e-3), name
        assert leader[name] == pytest.approx(figures[name], rel=5e-2), name
    before = flat(tiny_model / "model.safetensors")
    deltas = (weights - before, flat(tmp_path / "weights.safetensors") - before)
    assert float(torch.nn.functional.cosine_similarity(*deltas, dim=0)) > 0.95
    assert leader["state"] == {"cursor": 3}
    assert leader["repeats"], "a step after `load` made other weights than before"


@pytest.mark.process
def test_a_rank_that_is_gone_ends_the_leader_with_an_error(tiny_model: Path, tmp_path: Path) -> None:
    leader, deserter = run_program("desert", tiny_model, tmp_path, ranks=2)
    assert deserter["rc"] == 7
    assert leader["rc"] == 1, leader
