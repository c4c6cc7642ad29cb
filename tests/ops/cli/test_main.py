import io
import sys
import tomllib
from pathlib import Path

import pytest

from horizonrl.common.config.schema import RunConfig
from horizonrl.ops.cli.commands.training import SECTIONS
from horizonrl.ops.cli.main import main
from horizonrl.ops.cli.overrides import split_overrides
from horizonrl.ops.cli.recipe_names import purpose, recipes
from horizonrl.ops.rundir.directory import write_config
from horizonrl.ops.terminal.console import plain_console

REMOTE = ["eval", "--endpoint", "http://127.0.0.1:9/v1", "--model-name", "m"]


def test_overrides_are_parted_from_the_commands_own_words() -> None:
    words, overrides = split_overrides(
        ["train", "a.toml", "--rl.lr", "1e-5", "--watch", "--run.seed=3", "b.toml"]
    )
    assert words == ["train", "a.toml", "--watch", "b.toml"]
    assert overrides == ["--rl.lr", "1e-5", "--run.seed=3"]


def test_the_environments_are_set_as_a_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--envs", '[{"id": "parity", "weight": 2}]']) == 0
    shown = tomllib.loads(capsys.readouterr().out)
    assert [(env["id"], env["weight"]) for env in shown["envs"]] == [("parity", 2)]


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for command in (
        "train",
        "broker",
        "controller",
        "learner",
        "actor",
        "status",
        "export",
        "envs",
        "doctor",
    ):
        assert command in shown


@pytest.mark.parametrize(
    "command", [["train"], ["config"], ["demos"], ["eval"], ["study", "learning"]]
)
def test_the_help_of_what_takes_keys_lists_them_with_their_defaults(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for section, field in RunConfig.model_fields.items():
        assert f"--{section}" in shown
        for key in getattr(field.annotation, "model_fields", ()):
            assert f"{key}=" in shown or f"--{section}.{key}." in shown
    assert "--section.key VALUE" in shown


@pytest.mark.parametrize(
    ("role", "shown", "hidden"),
    [
        ("actor", ["--actor.", "--rollout."], ["--learner.", "--loss.", "--curriculum."]),
        ("learner", ["--learner.", "--loss.", "--curriculum."], ["--actor."]),
        ("controller", ["--curriculum.", "--envs"], ["--learner.", "--actor.", "--loss."]),
        ("broker", ["--broker.nats."], ["--envs", "--rl."]),
    ],
)
def test_the_help_of_a_role_lists_its_keys_alone(
    role: str, shown: list[str], hidden: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([role, "--help"])
    text = capsys.readouterr().out
    assert all(section in text for section in shown)
    assert not any(section in text for section in hidden)


def test_every_section_is_read_by_a_role() -> None:
    assert {name for sections in SECTIONS.values() for name in sections} == set(
        RunConfig.model_fields
    )


def test_a_key_is_explained_for_each_kind_that_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--explain", "loss.low"]) == 0
    shown = capsys.readouterr().out
    assert "loss.low (with kind ppo, decoupled_ppo): number ≥0, ≤1 (0.2)\n    Ratios below" in shown
    assert "loss.low (with kind gspo): number ≥0, ≤1 (0.0003)\n    Lower side" in shown
    assert main(["config", "--explain", "advantage"]) == 0
    assert "(docs/algorithms.md)" in capsys.readouterr().out
    assert main(["config", "--explain", "loss.gspo_low"]) != 0
    assert "did you mean loss.low?" in capsys.readouterr().err


def test_a_recipe_of_the_package_is_known_by_its_name_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["config", "laptop", "lora", "--rl.steps", "5"]) == 0
    shown = tomllib.loads(capsys.readouterr().out)
    assert (shown["run"]["name"], shown["lora"]["rank"] > 0, shown["rl"]["steps"]) == (
        "laptop",
        True,
        5,
    )
    (tmp_path / "laptop").write_text('[run]\nname = "mine"\n')
    assert main(["config", "laptop"]) == 0
    assert 'name = "mine"' in capsys.readouterr().out


def test_the_recipes_are_listed_with_what_they_train_and_shown_to_begin_ones_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["recipes"]) == 0
    shown = capsys.readouterr().out
    for name, file in recipes().items():
        assert f" {name} " in shown
        assert purpose(file)[:40] in shown
        assert len(purpose(file)) > 20
    assert main(["recipes", "pocket"]) == 0
    assert capsys.readouterr().out == recipes()["pocket"].read_text()


def test_what_is_not_installed_is_named_with_its_cure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A light install exports nothing: `huggingface_hub` comes with the engines."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for name in [name for name in sys.modules if name.startswith("horizonrl.ops.publish.")]:
        monkeypatch.delitem(sys.modules, name)
    for command in (["export", str(tmp_path), "out"], ["dataset", str(tmp_path), "out"]):
        assert main(command) == 2
        shown = capsys.readouterr().err
        assert f"`horizonrl {command[0]}` needs the package huggingface_hub" in shown
        assert "pip install 'horizonrl[cpu]'" in shown


def test_a_run_that_lies_in_runs_is_meant_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_config(RunConfig.load([], ["--run.name=mine"]))
    assert main(["report", "mine"]) == 2
    assert "did you mean runs/mine?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["train", "--rl.learning_rate", "1"], "rl.learning_rate: no such key"),
        (["train", "gone.toml"], "no recipe at gone.toml"),
        (["trian", "laptop"], "no command 'trian'; did you mean train?"),
        (
            ["train", "laptpo"],
            "no recipe 'laptpo', neither a file nor a name; did you mean laptop? "
            "`horizonrl recipes` lists all",
        ),
        (["envs", "chek"], "`horizonrl envs` has no 'chek'; did you mean check? Choose list, "),
        (["study", "learnin"], "`horizonrl study` has no 'learnin'; did you mean learning?"),
        (["eval", "m", "--taks", "3"], "`horizonrl eval`; did you mean --tasks? See horizonrl"),
        (
            ["train", "--rl.max_stalenes", "3"],
            "did you mean rl.max_staleness? Known keys: demos_per_step, ",
        ),
        (
            ["train", "--rl.threads", "3"],
            "rl.threads: no such key; did you mean learner.threads or actor.threads?",
        ),
        (["train", "--rll.steps", "3"], "rll: no such key; did you mean rl?"),
        (
            ["train", "--envs", '[{"id": "parity", "categorys": []}]'],
            "did you mean envs.0.categories?",
        ),
        (
            ["train", "laptop", "--lr", "1"],
            "--lr: no such option of `horizonrl train`; did you mean --imitation.lr or",
        ),
        (["status", "runs", "--wathc"], "--wathc: no such option of `horizonrl status`"),
        (["track", "laptop", "pocket"], "'pocket' is one word too many for `horizonrl track`"),
        (["envs", "list", "textcarft"], "no environment 'textcarft'; did you mean textcraft"),
        (["envs", "list", "alfworld"], "did you mean agentgym-alfworld? `horizonrl envs list`"),
        (["config", "--learner.backend", "torhc"], "learner.backend is 'torhc': choose deepspeed"),
        (["config", "--actor.engine", "vlm"], "actor.engine is 'vlm': choose vllm"),
        (["config", "--loss.kind", "no_such_module:f"], "this Python has no module"),
        (["config", "--envs", '[{"id": "mze"}]'], "no environment 'mze'; did you mean maze?"),
        (
            ["config", "--envs", '[{"id": "maze", "options": {"stile": "full"}}]'],
            "has no option 'stile'; did you mean style?",
        ),
        (["train", "--horizon.horizons", "[0]"], "greater than or equal to 1"),
        (["learner"], "broker.url is not set"),
        (["learner", "--broker.url", "127.0.0.1"], "write it as nats://HOST:PORT"),
        (["actor", "--broker.url", "nats://h:99999"], "write it as nats://HOST:PORT"),
        (["train", "--envs", '[{"id": "babyai", "categories": ["gone"]}]'], "gone"),
        (["train", "--envs", '[{"id": "textcraft", "options": {"styl": "compact"}}]'], "styl"),
        (["train", "--rl.steps", "4", "--rl.steps.x", "4"], "has set as a whole"),
        (["train", "--horizon.horizons", "[6, 3]"], "do not grow from stage to stage: give [3, 6]"),
        (["train", "--horizon.horizons", "3,6"], "'[1, 2]' in quotes on the command line"),
        (["doctor", "--rl.lr", "1"], "`horizonrl doctor` takes no keys"),
        (["envs", "list", "--rl.lr", "1"], "`horizonrl envs list` takes no keys"),
        (
            ["envs", "list", "--options.x", "1"],
            "`horizonrl envs list` takes no options of environments",
        ),
        (["report", "nowhere"], "no config.toml, and no episodes.jsonl of an evaluation"),
        (["report", "nowhere", "--port", "80"], "--port is for a page that is served: add --watch"),
        (
            ["export", "nowhere", "out", "--public"],
            "--public is for a repository on the Hub: add --push",
        ),
        (
            ["report", "nowhere", "elsewhere"],
            "no config.toml, and no episodes.jsonl of an evaluation",
        ),
        (["envs", "list", "gone"], "no environment 'gone'"),
        (["status"], "which run?"),
        (["status", "nowhere"], "is no run directory"),
        (["export", "nowhere", "out"], "is no run directory"),
        (["export", "nowhere", "out", "--best"], "is no run directory"),
        (["envs", "check"], "which environment?"),
        (["envs", "check", "transcripts"], "transcripts need a file"),
        (
            ["envs", "check", "transcripts", "--options.path", "gone.jsonl"],
            "no transcripts at gone.jsonl",
        ),
        (
            ["envs", "check", "parity", "--option.path", "x"],
            "envs check takes --options.KEY VALUE, not --option",
        ),
        (["demos", "--out", "x", "--env", "babyai"], "no environment 'babyai', only textcraft"),
        (["eval"], "which model?"),
        (["eval", "gone", "--env", "parity"], "neither a directory nor"),
        (["eval", "--endpoint", "http://h/v1"], "--endpoint wants --model-name"),
        (["eval", "pocket", "--endpoint", "http://h/v1", "--model-name", "m"], "were both given"),
        (["eval", "--endpoint", "http://me:pw@h/v1", "--model-name", "m"], "would be written down"),
        (
            [*REMOTE, "--env", "parity", "--key-variable", "NOPE"],
            "an environment variable that is not set",
        ),
        ([*REMOTE], "on what?"),
        ([*REMOTE, "--env", "gone"], "no environment 'gone'"),
        ([*REMOTE, "--env", "parity", "--categories", "hard"], "has no category 'hard'"),
        ([*REMOTE, "--env", "parity", "--options.x", "1"], "has no option 'x'"),
        ([*REMOTE, "--env", "transcripts", "--options.path", "x"], "only replays what others did"),
        ([*REMOTE, "--env", "parity", "--turns", "0"], "--turns is 0"),
        ([*REMOTE, "--env", "parity", "--tasks", "0"], "--tasks is 0: give 1 or more"),
        ([*REMOTE, "--env", "parity", "--samples", "1", "999"], "--samples is 999"),
        (
            [*REMOTE, "--env", "parity", "--samples", "2", "--eval.temperature", "0"],
            "at eval.temperature 0",
        ),
        (
            [*REMOTE, "--env", "parity", "--turns", "1", "2", "--horizon.announce", "true"],
            "one value of --turns",
        ),
        ([*REMOTE, "--table", "--env", "parity"], "--table has no environment 'parity'"),
        ([*REMOTE, "--table", "--categories", "depth1"], "--table has its own categories"),
    ],
)
def test_asking_wrongly_is_one_clear_message(
    argv: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    assert message in shown
    assert list(tmp_path.iterdir()) == []


@pytest.mark.process
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["envs", "serve", "parity", "--port", "99999"], "give 0 or more, 65535 at most"),
        (["study", "learning", "losses", "--directory", "d", "--seeds", "a"], "such as 0,1,2"),
        (["demos", "--out", "x", "--count", "0"], "0: give 1 or more"),
        (["broker", "keys", "--out", "x", "--actors", "-1"], "-1: give 1 or more"),
        (["broker", "keys", "--out", "x", "--host", ""], "'': give a name or an address"),
        (["broker", "keys", "--out", "x", "--host", "caf\u00e9"], "give a name or an address"),
        (
            ["demos", "--out", "nowhere/x.jsonl", "--envs", '[{"id": "parity"}]'],
            "no directory nowhere",
        ),
        (
            ["plan", "--json", "nowhere/plan.json"],
            "no directory nowhere: name a file in an existing directory",
        ),
        (["report", "runs/laptop", "--out", "."], ". is a directory: name a file in it"),
    ],
)
def test_a_number_out_of_bounds_is_refused_with_them(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_demonstrations_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    words = ["demos", "--count", "1", "--out"]
    out = tmp_path / "x.jsonl"
    assert main([*words, str(out), "--envs", '[{"id": "parity"}]']) == 0
    before = out.read_text()
    assert main([*words, str(out), "--envs", '[{"id": "guess"}]']) == 2
    assert (
        main([*words, str(out), "--envs", '[{"id": "weather", "options": {"format": "native"}}]'])
        == 2
    )
    assert out.read_text() == before
    assert [file.name for file in tmp_path.iterdir()] == ["x.jsonl"]


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("horizonrl ")


def test_environments_are_listed_in_short_and_those_that_are_named_in_full(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["envs", "list", "textcraft"]) == 0
    named = capsys.readouterr().out
    assert "depth1" in named and "babyai" not in named


def test_a_run_without_evaluations_has_no_best_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = RunConfig.load([], [f"--run.root={tmp_path}"])
    write_config(config)
    assert main(["export", str(config.run_dir), str(tmp_path / "out"), "--best"]) == 1
    assert "holds no evaluated version: set eval.every" in capsys.readouterr().err


def test_a_path_that_the_locale_cannot_read_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    word = "--run.root=l\udcc3\udcbcft"  # `lüft` where LC_ALL is C and Python's UTF-8 mode is off
    assert main(["train", word]) == 2
    assert "is no text in this locale" in capsys.readouterr().err


def test_a_traceback_is_text_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(words: list[str]) -> None:
        raise RuntimeError(f"\x1b[2J\u202e{words[0]}")

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr("horizonrl.ops.cli.main.parse", fail)
    with pytest.raises(RuntimeError) as raised:
        main(["status"])
    sys.excepthook(raised.type, raised.value, raised.tb)
    said = capsys.readouterr().err
    assert said.startswith("Traceback") and said.endswith("\nRuntimeError: ?[2J?status\n")


def test_what_an_environment_says_is_printed_as_it_is() -> None:
    shown = io.StringIO()
    plain_console(shown).print("a :key: opens [b]the door[/b]", highlight=False)
    assert shown.getvalue() == "a :key: opens [b]the door[/b]\n"


def test_a_full_disk_is_one_clear_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--json", "/dev/full"]) == 1
    assert (
        capsys.readouterr().err
        == "error: No space left on device: free some space, then give the same command again\n"
    )


def test_options_that_are_none_are_left_out_since_toml_has_no_null(
    capsys: pytest.CaptureFixture[str],
) -> None:
    inner = '{"b": [{"c": null, "d": 1}]}'
    envs = f'[{{"id": "delayed", "options": {{"env": null, "options": {inner}}}}}]'
    assert (
        main(
            [
                "config",
                "--envs",
                envs,
                "--actor.vllm",
                '{"kv_cache_dtype": null, "max_num_seqs": 4}',
            ]
        )
        == 0
    )
    shown = tomllib.loads(capsys.readouterr().out)
    assert shown["envs"][0]["options"] == {"options": {"b": [{"d": 1}]}}
    assert shown["actor"]["vllm"] == {"max_num_seqs": 4}
