"""The plan: shapes are those of real models, formulas have the right growth, and wrong words get an answer."""

import json
from pathlib import Path

import pytest

from horizonrl.broker.codec import encode
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import ConfigError
from horizonrl.common.types import Episode, Group, Provenance, StopReason, Turn, VersionSpan
from horizonrl.ops.cli.main import main
from horizonrl.ops.cli.recipe_names import find_recipe, recipes
from horizonrl.ops.plan.constants import table
from horizonrl.ops.plan.estimate import RunPlan, Workload, change_ratio, group_bytes, learner_memory, plan_run
from horizonrl.ops.plan.hardware import Fleet
from horizonrl.ops.plan.shapes import SIZES, shape_of_directory, shape_of_name
from tests.records import make_ticket

CONFIG = RunConfig.load([find_recipe(Path("agentgym-rl/textcraft"))])


def planned(learner: str = "8xH100", actors: str = "32xH100", size: str = "7B", *overrides: str) -> RunPlan:
    config = RunConfig.load([find_recipe(Path("agentgym-rl/textcraft"))], overrides)
    fleets = Fleet.parse(learner, "--learner"), Fleet.parse(actors, "--actors")
    return plan_run(config, SIZES[size], *fleets, Workload.of(config))


@pytest.mark.parametrize(
    ("size", "parameters"),
    [
        ("135M", 134_515_008),
        ("0.5B", 494_032_768),
        ("1.5B", 1_543_714_304),
        ("3B", 3_085_938_688),
        ("7B", 7_615_616_512),
        ("8B", 8_030_261_248),
        ("14B", 14_770_033_664),
        ("32B", 32_763_876_352),
        ("70B", 70_553_706_496),
        ("72B", 72_706_203_648),
    ],
)
def test_a_size_has_the_parameters_of_its_model(size: str, parameters: int) -> None:
    assert SIZES[size].parameters == parameters  # as each model's card or index file states them


def test_a_directory_and_a_name_give_the_same_shape(tmp_path: Path) -> None:
    text = {"num_attention_heads": 28, "hidden_size": 3584, "num_hidden_layers": 28, "intermediate_size": 18_944}
    text |= {"num_key_value_heads": 4, "vocab_size": 152_064, "tie_word_embeddings": False, "model_type": "qwen2"}
    (tmp_path / "config.json").write_text(json.dumps(text))
    assert shape_of_directory(tmp_path).parameters == shape_of_name("Qwen/Qwen2.5-7B-Instruct").parameters
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="does not say the model's shape"):
        shape_of_directory(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(text | {"num_experts": 8}))
    with pytest.raises(ConfigError, match="mixture of experts"):
        shape_of_directory(tmp_path)
    for hybrid in ({"layer_types": ["full_attention", "linear_attention"]}, {"mamba_d_ssm": 256}):
        (tmp_path / "config.json").write_text(json.dumps(text | hybrid))
        with pytest.raises(ConfigError, match="hybrid model"):
            shape_of_directory(tmp_path)
    with pytest.raises(ConfigError, match="give --model-size"):
        shape_of_name("somebody/model")


def test_more_ranks_and_a_higher_stage_need_less_memory_each() -> None:
    totals = []
    for stage in (0, 1, 2, 3):
        config = RunConfig.load([], [f"--learner.zero_stage={stage}", "--learner.ranks=8"])
        totals.append(learner_memory(config, SIZES["32B"], Fleet.parse("8xH100", "--learner")).total)
    assert totals == sorted(totals, reverse=True)
    few, many = planned("8xH100"), planned("16xH100")
    assert many.learner.optimizer * 2 == few.learner.optimizer
    assert many.step_s < few.step_s


def test_a_reference_is_split_over_the_ranks_at_stage_3_and_costs_traffic() -> None:
    def reference(stage: int, kl: float) -> RunPlan:
        return planned("8xH100", "8xH100", "7B", f"--learner.zero_stage={stage}", f"--reference.kl={kl}")

    assert reference(2, 0.1).learner.reference == 8 * reference(3, 0.1).learner.reference > 0
    assert reference(3, 0.1).step_s > reference(3, 0.0).step_s


def test_a_model_that_does_not_fit_is_said_and_what_would_help() -> None:
    plan = planned("1xH100", "1xL4")
    assert "learner.zero_stage" in plan.troubles[0]
    assert "no room for one episode" in plan.troubles[1]
    assert plan.bottleneck == "actors"
    assert planned("8xH200", "8xH200", "7B").troubles == []


def test_the_slowest_part_is_the_bottleneck() -> None:
    assert planned("8xH100", "64xH100").bottleneck == "learner"
    assert planned("64xH100", "1xH100").bottleneck == "actors"
    plan = planned()
    assert plan.groups == min(plan.capacities.values())


def test_tensor_parallelism_splits_weights_and_cache() -> None:
    one = planned("8xH100", "32xH100", "7B")
    two = planned("8xH100", "32xH100", "7B", "--actor.tensor_parallel=2")
    assert two.engine.weights * 2 == one.engine.weights
    assert two.engine.episodes > one.engine.episodes
    with pytest.raises(ConfigError, match=r"actor\.tensor_parallel is 2"):
        planned("8xH100", "1xH100", "7B", "--actor.tensor_parallel=2")


def test_changes_shrink_with_the_learning_rate() -> None:
    ratios = [change_ratio(lr) for lr in (1e-7, 1e-6, 3e-6, 1e-5, 2e-5, 4e-5, 1e-3)]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[0] == ratios[1]
    assert ratios[-1] == ratios[-2]


def test_a_groups_bytes_are_those_of_the_wire() -> None:
    text = "abcd" * 64
    span = (VersionSpan(version=0, lineage=0, tokens=64),)
    turn = Turn(
        output_ids=(5,) * 64,
        logprobs=(-0.5,) * 64,
        spans=span,
        observation_ids=(7,) * 64,
        text=text,
        observation=text,
    )
    episodes = tuple(
        Episode(index=index, prompt_ids=(1,), turns=(turn,) * 10, stop=StopReason.TERMINATED, success=True)
        for index in range(8)
    )
    group = Group(
        ticket=make_ticket(group_size=8, horizon_turns=10), episodes=episodes, provenance=Provenance(actor="test")
    )
    assert group_bytes(8, Workload(1280, 640)) == pytest.approx(len(encode(group)), rel=0.05)


@pytest.mark.parametrize("name", sorted(recipes()))
def test_every_recipe_that_is_a_run_of_its_own_can_be_planned(name: str) -> None:
    config = RunConfig.load([find_recipe(Path(name))])
    fleets = Fleet.parse("8xH100", "--learner"), Fleet.parse("32xH100", "--actors")
    plan = plan_run(config, SIZES["7B"], *fleets, Workload.of(config))
    assert plan.groups > 0


def test_the_command_prints_the_plan_and_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    words = ["plan", "agentgym-rl/textcraft", "--learner", "8xH100", "--actors", "32xH100", "--model-size", "7b"]
    assert main([*words, "--json", str(file)]) == 0
    assert "First bottleneck: learner." in capsys.readouterr().out
    written = json.loads(file.read_text())
    assert written["bottleneck"] == "learner"
    assert set(written["constants"]) == set(table())
    assert {constant["kind"] for constant in written["constants"].values()} >= {"measured", "assumption", "code"}


def test_a_run_that_makes_no_step_says_never_and_not_in_how_many_hours(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "laptop", "--model-size", "70B", "--actors", "1xL4"]) == 1
    (step,) = [line for line in capsys.readouterr().out.splitlines() if "│ step " in line]
    assert "never" in step and "no room" in step and "h for" not in step


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--learner", "8xH101"], "did you mean H100"),
        (["--actors", "many"], "such as 8xH100"),
        (["--actors", "0xH100"], "a number from 1"),
        (["--model-size", "9B"], "not in the table"),
        (["--episode-tokens", "1000000"], "--episode-tokens is 1e+06"),
        (["--episode-tokens", "100", "--generated-tokens", "200"], "--generated-tokens is 200 of 100"),
    ],
)
def test_a_wrong_word_gets_an_answer(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "laptop", "--model-size", "7B", *words]) == 2
    assert message in capsys.readouterr().err
