"""GPUs divided among learner and actors, with the machine's number given."""

import pytest

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import ConfigError
from horizonrl.ops.launch.gpus import divide

EIGHT = tuple("01234567")


def config(*overrides: str) -> RunConfig:
    return RunConfig.load([], overrides)


def test_without_gpus_nothing_changes() -> None:
    division = divide(config("--actor.count=2"), ())
    assert division.environment("learner") == division.environment("actor", 1) == {}


def test_the_learner_has_the_first_gpus_and_each_actor_its_own() -> None:
    division = divide(
        config("--learner.ranks=2", "--actor.count=3", "--actor.tensor_parallel=2"), EIGHT
    )
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
    share = {"HORIZONRL_ACTOR__GPU_MEMORY_SHARE": "0.45"}
    assert division.environment("actor", 7) == {"CUDA_VISIBLE_DEVICES": "0", **share}
    assert division.environment("learner") == {"CUDA_VISIBLE_DEVICES": ",".join(EIGHT)}
    given = divide(config("--learner.ranks=8", "--actor.gpu_memory_share=0.3"), EIGHT)
    assert given.environment("actor")["HORIZONRL_ACTOR__GPU_MEMORY_SHARE"] == "0.3"
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
