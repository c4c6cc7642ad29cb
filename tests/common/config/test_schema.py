from pathlib import Path
from typing import Any

import pytest

from horizonrl.common.config.objective import CispoLoss, DecoupledPpoLoss, GspoLoss
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.config.training import AdaptiveHorizon, FixedHorizon, LearnerSection
from horizonrl.common.errors import ConfigError
from horizonrl.common.types import Phase

FOLDER = Path(__file__).parents[3] / "ops" / "recipes"
RECIPES = sorted([*FOLDER.glob("*.toml"), *FOLDER.glob("scenarios/*.toml")])


def recipe(tmp_path: Path, text: str, name: str = "recipe.toml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_is_valid(path: Path) -> None:
    RunConfig.load([path])


def test_later_recipes_win_then_the_environment_then_overrides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = recipe(
        tmp_path, "[rl]\nlr = 1e-6\nsteps = 1\nmax_staleness = 1\ngroups_per_step = 1", "first.toml"
    )
    second = recipe(
        tmp_path, "[rl]\nsteps = 2\nmax_staleness = 2\ngroups_per_step = 2", "second.toml"
    )
    monkeypatch.setenv("HORIZONRL_RL__MAX_STALENESS", "3")
    monkeypatch.setenv("HORIZONRL_RL__GROUPS_PER_STEP", "3")
    rl = RunConfig.load([first, second], ["--rl.groups_per_step", "4"]).rl
    assert (rl.lr, rl.steps, rl.max_staleness, rl.groups_per_step) == (1e-6, 2, 3, 4)


def test_a_section_and_a_key_of_it_are_both_set_in_any_order() -> None:
    for overrides in (["--rl.steps=5", '--rl={"lr": 1e-6}'], ['--rl={"lr": 1e-6}', "--rl.steps=5"]):
        rl = RunConfig.load([], overrides).rl
        assert (rl.steps, rl.lr) == (5, 1e-6)
    deep = ["--broker.nats.replicas=3", "--broker", '{"nats": {"user": "a"}}']
    for overrides in (deep, [*deep[1:], deep[0]]):
        nats = RunConfig.load([], overrides).broker.nats
        assert (nats.replicas, nats.user) == (3, "a")
    with pytest.raises(
        ConfigError, match="--broker sets as a whole what another flag has set a part of"
    ):
        RunConfig.load([], [deep[0], "--broker", '{"nats": 3}'])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["--rl.steps=5", "--rl=fast"],
            r"--rl sets as a whole what another flag has set a part of",
        ),
        (["--rl.learning_rate", "1"], r"rl\.learning_rate: no such key\. Known keys: .*\blr\b"),
        (["--rll.lr", "1"], r"rll: no such key; did you mean rl\? Known keys: "),
        (
            ["--env.id", "maze"],
            r"env: no such key: environments are a list, for example --envs .*maze",
        ),
        (
            ["--horizon.horizons", "[0]"],
            r"horizon\.horizons\.0: .*greater than or equal to 1 \(got 0\)",
        ),
        (
            ["--rollout.temperature=0.009"],
            r"rollout\.temperature: .*below 0\.01 vLLM samples at 0\.01.*give 0\.01 or",
        ),
        (["--eval.temperature=0.002"], r"eval\.temperature: .*below 0\.01 vLLM samples at 0\.01"),
        (["--rollout.temperature=0"], r"rollout\.temperature: .*greater than 0 \(got 0\)"),
        (["--eval.temperature=11"], r"eval\.temperature: .*less than or equal to 10"),
        (["--rl.lr=-1"], r"rl\.lr: .*greater than 0 \(got -1\)"),
        (["--rl.lr"], r"--rl\.lr has no value"),
        (["rl.lr", "1"], r"unexpected argument 'rl\.lr'"),
        (
            ["--rollout.group_size", "64"],
            r"group_size is 64 but actor\.slots is 32.*set actor\.slots to 64",
        ),
        (
            ["--rollout.group_size=1", "--curriculum.kind=adaptive"],
            r"group_size is 1 but advantage\.kind grpo and curriculum\.kind adaptive compares",
        ),
        (
            ["--learner.micro_batch_tokens", "128"],
            r"micro_batch_tokens is 128 .*max_context_tokens = 1024",
        ),
        (["--run.name", "a.b"], r"run\.name"),
        (["--envs", '[{"id": "textcraft"}, {"id": "textcraft"}]'], r"one entry"),
        (["--imitation.steps=0", "--rl.steps=0"], r"nothing to train"),
        (
            ["--rl.steps", "true"],
            r"rl\.steps: this key is not a switch: give its value \(got True\)",
        ),
        (
            ["--learner.ranks", "false"],
            r"learner\.ranks: this key is not a switch: give its value \(got False\)",
        ),
        (["--model.name", ""], r"model\.name: .*at least 1 character"),
        (["--rl.lr", "Infinity"], r"rl\.lr: .*finite"),
        (
            ["--horizon.kind=adaptive", "--horizon.steps_per_stage=1"],
            r"steps_per_stage is 1 .* set it to 2 or more",
        ),
        (
            ["--eval.every=5", "--envs", '[{"id": "parity", "split": "all"}]'],
            r"parity trains on split all.* to train",
        ),
        (
            ["--eval.every=5", "--eval.samples=64"],
            r"eval\.samples is 64 but actor\.slots is 32.*to 64 or more",
        ),
        (
            ["--eval.every=5", "--eval.samples=4", "--eval.temperature=0"],
            r"all the same: set eval\.samples to 1",
        ),
    ],
)
def test_a_mistake_is_one_clear_message(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig.load([], overrides)


def test_a_wrong_item_is_not_reported_again_as_a_wrong_list() -> None:
    with pytest.raises(ConfigError) as raised:
        RunConfig.load([], ["--horizon.horizons", "[0]"])
    assert len(str(raised.value).splitlines()) == 1


def test_a_recipe_that_is_missing_or_no_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no recipe at .*gone\.toml"):
        RunConfig.load([tmp_path / "gone.toml"])
    with pytest.raises(ConfigError, match=r"recipe\.toml is not TOML: Expected"):
        RunConfig.load([recipe(tmp_path, "[rl")])
    with pytest.raises(ConfigError, match="nests tables or lists too deeply"):
        RunConfig.load([recipe(tmp_path, "a = " + "[" * 5000)])
    for text, why in (
        ("[rl]\n# caf\u00e9".encode("latin-1"), "not UTF-8, in line 2"),
        (b"\xef\xbb\xbf[rl]", "byte order mark"),
    ):
        (tmp_path / "saved.toml").write_bytes(text)
        with pytest.raises(ConfigError, match=why):
            RunConfig.load([tmp_path / "saved.toml"])


def test_a_mistake_is_said_with_the_recipe_or_the_variable_that_it_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    first.write_text('[rl]\nlr = 0.1\n[[envs]]\nid = "textcraft"\nweight = "much"\n')
    second.write_text('[rl]\nlr = "fast"\nsteps = true\nlrr = 1\n')
    with pytest.raises(ConfigError) as raised:
        RunConfig.load([first, second])
    places = [
        line.removeprefix(f"{tmp_path}/").split(": ")[:2] for line in str(raised.value).splitlines()
    ]
    of_second = [["second.toml", f"rl.{key}"] for key in ("steps", "lr", "lrr")]
    assert places == [["first.toml", "envs.0.weight"], *of_second]
    with pytest.raises(ConfigError, match=r"(?m)^rl\.lr: "):
        RunConfig.load([second], ["--rl.lr=slow"])
    monkeypatch.setenv("HORIZONRL_RL__LR", "slow")
    with pytest.raises(ConfigError, match=r"(?m)^HORIZONRL_RL__LR: rl\.lr: "):
        RunConfig.load([second])
    with pytest.raises(ConfigError, match="is not a regular file"):
        RunConfig.load([tmp_path])


@pytest.mark.parametrize(
    "text", ["[RL]\nsteps = 6", "[rl]\nsteps = 5\n[RL]\nsteps = 6", '[[Envs]]\nid = "babyai"']
)
def test_a_section_in_capitals_is_no_section(tmp_path: Path, text: str) -> None:
    """pydantic-settings takes it for ours, and loses it where ours is there too."""
    with pytest.raises(
        ConfigError, match=r"no such section, in a recipe; did you mean (rl|envs)\?"
    ):
        RunConfig.load([recipe(tmp_path, text)])
    with pytest.raises(ConfigError, match="RL: no such section, in the command line"):
        RunConfig.load([], ["--RL.steps", "3", "--rl.steps", "4"])


@pytest.mark.parametrize("name", ["HORIZONRL_RL_STEPS", "HORIZONRL_REWARDS__SCALE"])
def test_an_environment_variable_that_is_no_key_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "3")
    with pytest.raises(
        ConfigError, match=rf"{name} names no key of the config: write it as HORIZONRL_SECTION__KEY"
    ):
        RunConfig.load([])


def test_other_variables_of_the_prefix_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "HORIZONRL_IMAGE",
        "HORIZONRL_LEARNER_SERVICE_HOST",
        "HORIZONRL_NATS_PORT_4222_TCP",
    ):
        monkeypatch.setenv(name, "tcp://10.0.0.1:4222")
    assert RunConfig.load([]).rl.steps


def test_an_environment_variable_that_is_no_json_is_one_clear_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HORIZONRL_ENVS", "textcraft")
    with pytest.raises(ConfigError, match="HORIZONRL_ENVS is not JSON"):
        RunConfig.load([])


def test_none_turns_an_option_off() -> None:
    assert RunConfig.load([], ["--loss.dual_clip", "none"]).loss.dual_clip is None


def test_phases_follow_one_another_and_number_their_own_steps() -> None:
    config = RunConfig.load([], ["--imitation.steps", "2", "--rl.steps", "3"])
    assert [config.phase(step) for step in range(4)] == [
        (Phase.IMITATION, 0),
        (Phase.IMITATION, 1),
        (Phase.RL, 0),
        (Phase.RL, 1),
    ]
    assert config.total_steps == 5


@pytest.mark.parametrize(
    ("imitation", "rl", "every", "steps"),
    [
        (2, 5, 2, [0, 2, 4, 6, 7]),
        (2, 4, 2, [0, 2, 4, 6]),
        (0, 4, 3, [0, 3, 4]),
        (3, 0, 2, [0, 3]),
        (3, 4, 9, [0, 3, 7]),
        (3, 4, 0, []),
    ],
)
def test_evaluations_are_due_at_the_start_of_each_phase_every_n_steps_and_at_the_end(
    imitation: int, rl: int, every: int, steps: list[int]
) -> None:
    config = RunConfig.load(
        [], [f"--imitation.steps={imitation}", f"--rl.steps={rl}", f"--eval.every={every}"]
    )
    assert [config.eval_step(number) for number in range(config.eval_rounds)] == steps


def test_credit_is_the_staleness_bound_in_groups() -> None:
    config = RunConfig.load([], ["--rl.max_staleness", "3", "--rl.groups_per_step", "5"])
    assert config.credit(Phase.RL) == 20
    rounds = RunConfig.load(
        [], ["--rl.max_staleness=3", "--rl.groups_per_step=5", "--rl.publish_every=3"]
    )
    assert [rounds.credit(Phase.RL, step) for step in range(5)] == [20, 15, 10, 20, 15]
    assert rounds.credit(Phase.IMITATION, 2) == 4 * rounds.imitation.groups_per_step


def test_actors_get_every_nth_version_the_last_one_and_those_that_they_evaluate() -> None:
    config = RunConfig.load(
        [],
        [
            "--imitation.steps=2",
            "--rl.steps=8",
            "--rl.publish_every=3",
            "--rl.max_staleness=2",
            "--eval.every=4",
        ],
    )
    assert [step for step in range(11) if config.publishes(step)] == [2, 5, 6, 8, 10]


def test_the_rate_warms_up_in_imitation_and_again_in_rl() -> None:
    steps = ["--imitation.steps=3", "--rl.steps=4", "--imitation.lr=1", "--rl.lr=10"]
    config = RunConfig.load([], [*steps, "--imitation.warmup_steps=2", "--rl.warmup_steps=2"])
    assert [config.lr(step) for step in range(config.total_steps)] == [0.5, 1, 1, 5, 10, 10, 10]
    assert RunConfig.load([], steps).lr(0) == 1


@pytest.mark.parametrize(
    ("learner", "message"),
    [
        ({"nodes": 2}, "learner.rendezvous is None: give an address of machine 0"),
        ({"nodes": 2, "rendezvous": "10.0.0.1"}, "as HOST:PORT"),
        ({"nodes": 2, "rendezvous": "10.0.0.1:99999"}, "as HOST:PORT"),
        (
            {"nodes": 2, "rendezvous": "10.0.0.1:29400", "node_rank": 2},
            "node_rank goes from 0 to 1",
        ),
        ({"nodes": 2, "rendezvous": "10.0.0.1:29400", "min_nodes": 3}, "min_nodes from 1 to 2"),
        ({"node_rank": 1}, "learner.nodes is 1: set nodes to the number of machines"),
        (
            {"backend": "torch", "deepspeed": {"aio": {}}},
            "leave them out, or set backend to deepspeed",
        ),
        ({"deepspeed": {"fp16": {}}}, "fp16 cannot be set"),
        (
            {"zero_stage": 1, "deepspeed": {"zero_optimization": {"overlap_comm": True}}},
            "set zero_stage to 2 or more",
        ),
        (
            {"zero_stage": 2, "deepspeed": {"zero_optimization": {"offload_param": {}}}},
            "set zero_stage to 3 or more",
        ),
    ],
)
def test_a_learner_of_several_machines_says_what_is_missing(
    learner: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LearnerSection(**learner)


def test_a_rendezvous_is_a_host_and_a_port() -> None:
    assert LearnerSection(nodes=2, rendezvous="[fd00::1]:29400").rendezvous_address == (
        "fd00::1",
        29400,
    )


def test_only_the_keys_of_a_kind_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = RunConfig.load([recipe(tmp_path, '[loss]\nkind = "gspo"\nlow = 1e-3')]).loss
    assert loss == GspoLoss(low=1e-3) and "cap" not in loss.model_dump()
    with pytest.raises(
        ConfigError, match=r"cap: no such key of loss\.kind gspo: it belongs to ppo, cispo\. Known"
    ):
        RunConfig.load([], ["--loss.kind=gspo", "--loss.cap=2"])
    with pytest.raises(
        ConfigError, match=r"loss\.kind is 'gspoo': choose ppo, .*; did you mean gspo\?"
    ):
        RunConfig.load([], ["--loss.kind=gspoo"])
    monkeypatch.setenv("HORIZONRL_LOSS__KIND", "cispo")
    monkeypatch.setenv("HORIZONRL_LOSS__CAP", "7")
    assert RunConfig.load([]).loss == CispoLoss(cap=7)


def test_a_source_that_changes_a_kind_drops_what_lower_ones_say_of_the_other(
    tmp_path: Path,
) -> None:
    """`low` of gspo is another bound than `low` of ppo; `epochs` is the same, and so is `low` of decoupled_ppo."""
    text = recipe(tmp_path, "[loss]\nlow = 0.1\nepochs = 2\n[horizon]\nsteps_per_stage = 4")
    assert RunConfig.load([text], ["--loss.kind=gspo"]).loss == GspoLoss(epochs=2)
    assert RunConfig.load([text], ["--loss.kind=decoupled_ppo"]).loss == DecoupledPpoLoss(
        low=0.1, epochs=2
    )
    assert RunConfig.load([text], ["--horizon.kind=fixed"]).horizon == FixedHorizon()
    assert RunConfig.load([text], ["--horizon.kind=adaptive"]).horizon == AdaptiveHorizon(
        steps_per_stage=4
    )
    with pytest.raises(
        ConfigError, match=r"horizon\.stepps: no such key; did you mean horizon\.steps"
    ):
        RunConfig.load([recipe(tmp_path, "[horizon]\nstepps = 4")], ["--horizon.kind=fixed"])
