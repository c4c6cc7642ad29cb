"""GPUs divided among learner and actors, with the machine's number given."""

from pathlib import Path

import pytest

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import ConfigError
from horizonrl.ops.run.gpus import divide, visible_gpus

EIGHT = tuple("01234567")


def config(*overrides: str) -> RunConfig:
    return RunConfig.load([], overrides)


def test_without_gpus_nothing_changes() -> None:
    division = divide(config("--actor.count=2"), ())
    assert division.environment("learner") == division.environment("actor", 1) == {}


def test_the_learner_has_the_first_gpus_and_each_actor_its_own() -> None:
    division = divide(config("--learner.ranks=2", "--actor.count=3", "--actor.tensor_parallel=2"), EIGHT)
    assert division.learner == ("0", "1")
    assert division.actors == (("2", "3"), ("4", "5"), ("6", "7"))
    assert not division.shared
    assert division.environment("actor", 1) == {"CUDA_VISIBLE_DEVICES": "4,5"}
    assert division.environment("controller") == {"CUDA_VISIBLE_DEVICES": ""}
    assert str(division) == "GPUs: learner 0+1; actor-0 2+3, actor-1 4+5, actor-2 6+7"


def test_too_few_gpus_are_shared_from_the_end() -> None:
    division = divide(config("--learner.ranks=8", "--actor.count=8"), EIGHT)
    assert division.shared
    assert division.learner == EIGHT
    assert sorted(division.actors) == [(gpu,) for gpu in EIGHT]
    one = divide(config("--learner.ranks=7", "--actor.count=2"), EIGHT)
    assert one.actors == (("7",), ("6",))


def test_actors_without_a_model_and_a_learner_without_one_take_no_gpu() -> None:
    assert divide(config("--actor.engine=scripted"), EIGHT).actors == ((),)
    both = config("--actor.engine=scripted", "--learner.backend=hash")
    assert divide(both, EIGHT).environment("learner") == {}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--learner.ranks=9"], "this machine has 8: lower learner"),
        (["--actor.tensor_parallel=16"], "lower learner"),
        (["--actor.count=9"], "lower actor"),
        (["--learner.ranks=8", "--actor.gpu_memory_share=0.9"], "share a GPU"),
    ],
)
def test_what_does_not_fit_is_said_with_the_numbers(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        divide(config(*overrides), EIGHT)


def test_the_environment_says_which_gpus_are_there() -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3, GPU-ab"}) == ("3", "GPU-ab")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == ()


@pytest.mark.parametrize(
    ("given", "seen"),
    [("-1", ()), ("NoDevFiles", ()), ("0,-1,1", ("0",)), ("0,1", ("0", "1")), ("MIG-4,GPU-5", ("MIG-4", "GPU-5"))],
)
def test_a_name_of_no_gpu_ends_the_list_as_it_does_for_cuda(given: str, seen: tuple[str, ...]) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": given}) == seen


WHOLE = "GPU 0: NVIDIA H100 (UUID: GPU-aa)\nGPU 1: NVIDIA H100 (UUID: GPU-bb)\n"
SLICED = """\
GPU 0: NVIDIA H100 (UUID: GPU-aa)
  MIG 3g.40gb     Device  0: (UUID: MIG-a1)
  MIG 3g.40gb     Device  1: (UUID: MIG-a2)
GPU 1: NVIDIA H100 (UUID: GPU-bb)
"""


@pytest.mark.parametrize(("listed", "seen"), [("", ()), (WHOLE, ("0", "1")), (SLICED, ("MIG-a1", "MIG-a2", "GPU-bb"))])
def test_slices_count_instead_of_the_gpu_that_they_divide(
    listed: str, seen: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{listed.strip()}'\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert visible_gpus({}) == seen
