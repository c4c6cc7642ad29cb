"""The plan: shapes are those of real models, formulas have the right growth, and wrong words get an answer."""

import json
from pathlib import Path

import pytest
import yaml

from horizonrl.broker.codec import encode
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import ConfigError
from horizonrl.common.types import Episode, Group, Provenance, StopReason, Turn, VersionSpan
from horizonrl.ops.cli.main import main
from horizonrl.ops.cli.recipe_names import find_recipe, recipes
from horizonrl.ops.plan.constants import BROKER_STORE, table
from horizonrl.ops.plan.estimate import RunPlan, Workload, change_ratio, group_bytes, plan_run
from horizonrl.ops.plan.hardware import ACCELERATORS, Fleet
from horizonrl.ops.plan.memory import learner_memory
from horizonrl.ops.plan.shapes import SIZES, shape_of_directory, shape_of_name
from tests.records import make_ticket

SMALL_SHARE = "--actor.gpu_memory_share=0.45"


def planned(
    learner: str = "8xH100", actors: str | None = "32xH100", size: str = "7B", *overrides: str
) -> RunPlan:
    """Plan the recipe; without `actors` they share the learner's GPUs."""
    config = RunConfig.load([find_recipe(Path("agentgym-rl/textcraft"))], overrides)
    sampling = Fleet.parse(actors, "--actors") if actors else None
    return plan_run(
        config, SIZES[size], Fleet.parse(learner, "--learner"), sampling, Workload.of(config)
    )


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
    text = {
        "num_attention_heads": 28,
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "intermediate_size": 18_944,
    }
    text |= {
        "num_key_value_heads": 4,
        "vocab_size": 152_064,
        "tie_word_embeddings": False,
        "model_type": "qwen2",
    }
    (tmp_path / "config.json").write_text(json.dumps(text))
    assert (
        shape_of_directory(tmp_path).parameters
        == shape_of_name("Qwen/Qwen2.5-7B-Instruct").parameters
    )
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
        totals.append(
            learner_memory(config, SIZES["32B"], Fleet.parse("8xH100", "--learner")).total
        )
    assert totals == sorted(totals, reverse=True)
    few, many = planned("8xH100"), planned("16xH100")
    assert many.learner.optimizer * 2 == few.learner.optimizer
    assert many.step_s < few.step_s


def test_a_reference_is_split_over_the_ranks_at_stage_3_and_costs_traffic() -> None:
    def reference(stage: int, kl: float) -> RunPlan:
        return planned(
            "8xH100", "8xH100", "7B", f"--learner.zero_stage={stage}", f"--reference.kl={kl}"
        )

    assert reference(2, 0.1).learner.reference == 8 * reference(3, 0.1).learner.reference > 0
    assert reference(3, 0.1).step_s > reference(3, 0.0).step_s


def test_a_model_that_does_not_fit_is_said_and_what_would_help() -> None:
    plan = planned("1xH100", "1xL4")
    assert "more ranks" in plan.troubles[0]
    assert "no room for one episode" in plan.troubles[1]
    assert plan.bottleneck == "actors"
    assert planned("8xH200", "8xH200", "7B").troubles == []


def test_advice_leaves_out_what_the_recipe_has() -> None:
    settings = (
        "--learner.zero_stage=1",
        "--learner.gradient_checkpointing=false",
        "--learner.micro_batch_tokens=20000",
    )
    asked = ("learner.zero_stage", "learner.gradient_checkpointing", "learner.micro_batch_tokens")
    (bare,) = planned("8xA100-40", "8xH100", "7B", *settings).troubles
    (full,) = planned("8xL4", "8xH100", "7B").troubles
    assert all(key in bare for key in asked)
    assert not any(key in full for key in asked) and "GPUs with more memory" in full


def test_actors_on_the_learners_gpus_divide_memory_and_time_with_it() -> None:
    apart, shared = planned("8xH100", "8xH100"), planned("8xH100", None)
    assert (
        shared.gpu_bytes
        == shared.learner.total + shared.engine.total
        > apart.gpu_bytes
        == apart.learner.total
    )
    seconds = [1 / plan.capacities[part] for plan, part in ((apart, "learner"), (apart, "actors"))]
    assert 1 / shared.capacities["learner and actors"] == pytest.approx(sum(seconds))
    assert shared.groups < min(apart.capacities["learner"], apart.capacities["actors"])
    (trouble, *_) = planned("8xA100-40", None).troubles
    assert "for an engine" in trouble and "actor.gpu_memory_share" in trouble


def test_idle_gpus_are_said() -> None:
    (hint,) = [hint for hint in planned("8xH100", "32xH100").hints if "would do" in hint]
    enough = int(hint.split(": ")[1].split()[0])
    assert planned("8xH100", f"{enough}xH100").bottleneck == "learner"
    assert enough == 1 or planned("8xH100", f"{enough - 1}xH100").bottleneck == "actors"
    assert any("fewer ranks" in hint for hint in planned("64xH100", "1xH100").hints)
    assert not any("busy" in hint for hint in planned("8xH100", None).hints)


def test_a_gpu_of_ones_own_gives_the_engine_more_than_a_shared_one() -> None:
    config = RunConfig.load([], ["--learner.ranks=8"])
    learner, load = Fleet.parse("8xH100", "--learner"), Workload.of(config)
    shares = [
        plan_run(config, SIZES["7B"], learner, actors, load).engine.share
        for actors in (learner, None)
    ]
    assert shares == [0.9, 0.45]
    assert any(
        "GPUs of their own" in hint for hint in planned("8xH100", "8xH100", "7B", SMALL_SHARE).hints
    )
    assert not any(
        "GPUs of their own" in hint for hint in planned("8xH100", None, "7B", SMALL_SHARE).hints
    )


def test_versions_and_checkpoints_take_time_from_both() -> None:
    rare, often = (
        planned("8xH100", "8xH100", "7B", f"--learner.checkpoint_every={n}") for n in (100, 1)
    )
    assert 256 / often.capacities["learner"] > 256 / rare.capacities["learner"]
    each = 32 / rare.capacities["learner"] - rare.step_s
    assert each == pytest.approx(rare.version.copy_s + rare.version.checkpoint_s / 100)
    once, thrice = (
        planned("8xH100", "8xH100", "7B", f"--rl.publish_every={n}", "--rl.max_staleness=3")
        for n in (1, 3)
    )
    saved = 32 / once.capacities["actors"] - 32 / thrice.capacities["actors"]
    assert saved == pytest.approx(once.version.pause_s * 2 / 3)


def test_a_broker_whose_default_store_is_too_small_is_said() -> None:
    values = yaml.safe_load(Path("ops/deploy/kubernetes/nats/values.yaml").read_text())
    store = values["config"]["jetstream"]["fileStore"]["maxSize"]
    assert store == f"{int(BROKER_STORE.value) >> 30}Gi"
    said = [
        any("fileStore" in hint for hint in planned("8xH100", "8xH100", size).hints)
        for size in ("1.5B", "3B", "7B")
    ]
    assert said == [False, False, True]


def test_gpus_that_are_not_supported_are_arithmetic() -> None:
    unsupported = [name for name, gpu in ACCELERATORS.items() if not gpu.supported]
    assert unsupported == ["MI300X"]
    assert any("arithmetic" in hint for hint in planned("8xMI300X", "8xH100").hints)
    assert not any("arithmetic" in hint for hint in planned("8xH100", "8xH100").hints)


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
        Episode(
            index=index,
            prompt_ids=(1,),
            turns=(turn,) * 10,
            stop=StopReason.TERMINATED,
            success=True,
        )
        for index in range(8)
    )
    group = Group(
        ticket=make_ticket(group_size=8, horizon_turns=10),
        episodes=episodes,
        provenance=Provenance(actor="test"),
    )
    assert group_bytes(8, Workload(1280, 640)) == pytest.approx(len(encode(group)), rel=0.05)


@pytest.mark.parametrize("name", sorted(recipes()))
def test_every_recipe_that_is_a_run_of_its_own_can_be_planned(name: str) -> None:
    config = RunConfig.load([find_recipe(Path(name))])
    fleets = Fleet.parse("8xH100", "--learner"), Fleet.parse("32xH100", "--actors")
    plan = plan_run(config, SIZES["7B"], *fleets, Workload.of(config))
    assert plan.groups > 0


def test_the_command_prints_the_plan_and_writes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    words = [
        "plan",
        "agentgym-rl/textcraft",
        "--learner",
        "8xH100",
        "--actors",
        "32xH100",
        "--model-size",
        "7b",
    ]
    assert main([*words, "--json", str(file)]) == 0
    assert "First bottleneck: learner." in capsys.readouterr().out
    written = json.loads(file.read_text())
    assert written["bottleneck"] == "learner"
    assert set(written["constants"]) == set(table())
    assert {constant["kind"] for constant in written["constants"].values()} >= {
        "measured",
        "assumption",
        "code",
    }


def test_actors_are_on_the_learners_gpus_unless_they_have_some(
    capsys: pytest.CaptureFixture[str],
) -> None:
    printed = []
    for words in ([], ["--actors", "shared"], ["--actors", "8xH100"]):
        assert main(["plan", "agentgym-rl/textcraft", "--learner", "8xH100", *words]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert ["learner and actors" in text for text in printed] == [True, True, False]


def test_a_run_that_makes_no_step_says_never_and_not_in_how_many_hours(
    capsys: pytest.CaptureFixture[str],
) -> None:
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
        (
            ["--episode-tokens", "100", "--generated-tokens", "200"],
            "--generated-tokens is 200 of 100",
        ),
    ],
)
def test_a_wrong_word_gets_an_answer(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "laptop", "--model-size", "7B", *words]) == 2
    assert message in capsys.readouterr().err


def test_the_example_of_the_page_is_the_plan() -> None:
    plan = planned("8xH100", None)
    rank, gpu = plan.learner.total / 1e9, plan.gpu_bytes / 1e9
    sentence = f"a rank takes {rank:.1f} GB, and {gpu:.1f} with an engine"
    assert sentence in Path("docs/scaling.md").read_text()
