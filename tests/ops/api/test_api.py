"""The Python API on run directories that are there, without a process of ours."""

import fcntl
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import horizonrl
from horizonrl.common.errors import CheckpointError
from horizonrl.common.run_dir import METRICS
from horizonrl.ops.api import programs, run
from horizonrl.ops.api.configs import words
from horizonrl.ops.rundir.directory import in_training, only_train
from horizonrl.ops.rundir.files import Files
from horizonrl.ops.rundir.variables import recipe_environment
from tests.ops.report.runs import Scale, run_config, write_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_run(run_config(tmp_path), Scale(held_out=2))


def test_the_import_brings_nothing_heavy_and_every_name_is_there() -> None:
    code = """
import sys
before = set(sys.modules)
import horizonrl
print(sorted({name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))
for name in horizonrl.__all__:
    assert getattr(horizonrl, name).__name__ == name
assert set(horizonrl.__all__) < set(dir(horizonrl))
print(horizonrl.__version__, sorted({"torch", "vllm", "deepspeed", "transformers", "pandas"} & set(sys.modules)))
try:
    horizonrl.launch
except AttributeError as error:
    print(error)
"""
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert shown.stdout.splitlines() == [
        "['horizonrl']",
        "0.1.0 []",
        "module 'horizonrl' has no attribute 'launch'",
    ]


def test_a_recipe_is_a_name_a_file_or_several_with_python_values_over_it(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text("[rl]\nsteps = 5\nlr = 0.5\n")
    config = horizonrl.load_recipe(
        ["laptop", mine], {"rl.steps": 7, "run.name": "123", "horizon.horizons": [2, 4]}
    )
    assert (config.rl.steps, config.rl.lr, config.run.name, config.horizon.horizons) == (
        7,
        0.5,
        "123",
        (2, 4),
    )
    assert horizonrl.load_recipe("laptop").model == config.model
    assert horizonrl.load_recipe(mine).rl.steps == 5
    assert (
        horizonrl.load_recipe(overrides={"envs": [{"id": "parity"}], "broker.url": None}).envs[0].id
        == "parity"
    )
    with pytest.raises(horizonrl.ConfigError, match=r"rl\.stepz: no such key; did you mean"):
        horizonrl.load_recipe(overrides={"rl.stepz": 1})
    with pytest.raises(horizonrl.ConfigError, match="no recipe 'lapto'"):
        horizonrl.load_recipe("lapto")
    assert words({"run.root": tmp_path}) == [f'--run.root="{tmp_path}"']


def test_a_run_gives_its_files_as_rows_and_data_frames(run_dir: Path) -> None:
    opened = horizonrl.open_run(run_dir)
    assert repr(opened) == f"Run({str(run_dir)!r})"
    metrics = opened.metrics()
    assert metrics.column("step") == [1, 2, 3, 4, 5, 6]
    assert (len(metrics), metrics[0]["phase"], metrics[-2:].column("version")) == (6, "rl", [5, 6])
    assert metrics.to_pandas().set_index("step")["success_rate"].between(0, 1).all()
    assert opened.ledger()[0]["trained"][0][1].startswith("train-")
    assert opened.evaluations().column("success_rate") == [10 / 64, 20 / 64, 30 / 64]
    assert (opened.step, opened.finished, opened.config.run.name) == (6, True, "small")
    assert opened.gain() == "16 % before training, 47 % after RL"
    stages = opened.stages()
    assert stages.column("stage") == ["before training", "after RL"]
    assert stages.column("version") == [0, 6]
    with pytest.raises(
        horizonrl.ConfigError, match="no column 'succes_rate'; did you mean success_rate"
    ):
        metrics.column("succes_rate")


def test_a_data_frame_without_pandas_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(horizonrl.MissingDependency, match="pip install pandas"):
        horizonrl.Rows([{"a": 1}]).to_pandas()


def test_episodes_are_typed_and_say_what_could_not_be_read(run_dir: Path) -> None:
    opened = horizonrl.open_run(run_dir)
    episodes = list(opened.episodes())
    assert len(episodes) == 144
    assert all(
        isinstance(episode, horizonrl.EpisodeRow) and episode.kind == "train"
        for episode in episodes
    )
    assert sum(len(turn.token_ids) for turn in episodes[0].turns) > 0
    both = list(opened.episodes(held_out=True))
    assert (
        next(episode.end for episode in both if episode.kind == "eval") == "evaluation of version 0"
    )
    assert len(both) == 144 + 3 * 2
    with (run_dir / "episodes" / "step-000003.jsonl").open("a") as file:
        file.write('{"ticket": "cut sh')
    with pytest.warns(UserWarning, match="1 episodes of"):
        assert len(list(opened.episodes())) == 144


def test_what_is_no_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(horizonrl.ConfigError, match="is no run directory"):
        horizonrl.open_run(tmp_path)
    with pytest.raises(horizonrl.ConfigError, match=r"holds no results\.json"):
        horizonrl.open_evaluation(tmp_path)


def test_a_report_is_one_file_and_an_export_needs_weights(run_dir: Path, tmp_path: Path) -> None:
    opened = horizonrl.open_run(run_dir)
    assert opened.report() == run_dir / "report.html"
    assert "<!doctype html>" in opened.report(tmp_path / "page.html").read_text()[:20]
    (tmp_path / "empty").mkdir()
    with pytest.raises(horizonrl.ConfigError, match="no directory"):
        opened.report(tmp_path / "none" / "page.html")
    with pytest.raises(CheckpointError, match="holds no checkpoint yet"):
        opened.export(tmp_path / "out")


def test_a_finished_run_is_followed_to_its_end_in_order(run_dir: Path) -> None:
    events = [(event.kind, event.step) for event in horizonrl.open_run(run_dir).follow()]
    assert events == [("step", step) for step in range(1, 7)] + [
        ("evaluation", version) for version in (0, 3, 6)
    ]
    last = [str(event) for event in horizonrl.open_run(run_dir).follow(after_step=6)]
    assert last[0] == "evaluation 0 of 6: held-out, success 16 %"


class Watched(run.Run):
    """A run whose files change between two looks, as a test says."""

    def __init__(self, directory: Path, changes: Iterator[None]) -> None:
        super().__init__(directory)
        self.changes = changes
        self.ended = False

    def _lives(self) -> bool:
        return not self.ended

    def _wait(self, seconds: float) -> None:
        self.ended = next(self.changes, self) is self


def test_steps_that_a_crash_rolled_back_are_followed_again(run_dir: Path) -> None:
    file = run_dir / METRICS
    lines = [json.loads(line) for line in file.read_text().splitlines()]

    def write(steps: int, lineage: int = 0) -> None:
        """As a resumed learner writes it: a new file in the place of the old one."""
        again = [line | {"lineage": lineage if line["step"] > 2 else 0} for line in lines[:steps]]
        other = file.with_suffix(".new")
        other.write_text("".join(json.dumps(line) + "\n" for line in again))
        other.rename(file)

    def changes() -> Iterator[None]:
        write(4)
        yield
        write(3, lineage=1)  # rolled back to step 2, and step 3 taken again
        yield
        write(5, lineage=1)
        yield

    write(3)
    (run_dir / "evals.jsonl").unlink()
    seen = [
        (event.step, event.measures["lineage"]) for event in Watched(run_dir, changes()).follow()
    ]
    assert seen == [(1, 0), (2, 0), (3, 0), (4, 0), (3, 1), (4, 1), (5, 1)]


def test_a_program_that_fails_raises_what_it_said(tmp_path: Path) -> None:
    failed = programs.RunningCommand.start(
        ["train", str(tmp_path / "none.toml")], tmp_path / "said.txt"
    )
    with pytest.raises(
        horizonrl.ConfigError, match=r"^no recipe at .*none\.toml: give the path of a TOML file$"
    ):
        failed.wait(60)
    assert not failed.running
    failed.stop()  # nothing is left to stop


def test_a_run_outlives_its_object_and_is_known_while_it_starts(tmp_path: Path) -> None:
    wrong = [{"id": "parity", "options": {"style": "compact"}}]
    config = horizonrl.load_recipe(
        overrides={"run.root": str(tmp_path), "run.name": "mine", "envs": wrong}
    )
    process, run_dir = horizonrl.start(config).program.process, tmp_path / "mine"
    process.send_signal(signal.SIGSTOP)  # it would end by itself soon
    gc.collect()
    with pytest.raises(
        horizonrl.RunFailed, match=rf"another `horizonrl train` \(process {process.pid}\) works in"
    ):
        horizonrl.start(config)
    with pytest.raises(horizonrl.ConfigError, match="is still starting"):
        horizonrl.open_run(run_dir)
    process.send_signal(signal.SIGCONT)
    process.wait(120)
    assert (
        (run_dir / "logs/train.txt")
        .read_text()
        .startswith("error: environment 'parity' has no option 'style'")
    )
    assert horizonrl.load_recipe(run_dir / "logs/train.toml") == config
    with pytest.raises(horizonrl.ConfigError, match="is no run directory"):
        horizonrl.open_run(run_dir)
    with only_train(run_dir), pytest.raises(horizonrl.RunFailed, match="another `horizonrl train`"):
        horizonrl.start(config)


def test_a_directory_is_in_training_while_its_lock_is_held_whoever_has_the_noted_id(
    tmp_path: Path,
) -> None:
    assert not in_training(tmp_path)
    # A killed one's, which has passed to this process.
    (tmp_path / "train.lock").write_text(str(os.getpid()))
    assert not in_training(tmp_path)
    with only_train(tmp_path):
        (tmp_path / "train.lock").write_text("1234567890")  # of another machine or container
        assert in_training(tmp_path)
    assert not in_training(tmp_path)


def test_a_look_at_the_lock_keeps_no_train_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.lock").touch()
    with (tmp_path / "train.lock").open() as look:
        fcntl.flock(look, fcntl.LOCK_SH)
        monkeypatch.setattr("time.sleep", lambda _: fcntl.flock(look, fcntl.LOCK_UN))
        with only_train(tmp_path):
            pass


def test_variables_that_would_win_over_a_config_do_not_reach_its_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = {
        "HORIZONRL_RL__STEPS": "3",
        "HORIZONRL_RL": '{"steps": 5}',
        "HORIZONRL_ENVS": "[]",
        "horizonrl_rl__lr": "1",
    }
    monkeypatch.setenv("HORIZONRL_BROKER__NATS__PASSWORD", "secret")
    monkeypatch.setenv("HORIZONRL_IMAGE", "an image")
    config = horizonrl.load_recipe(overrides={"rl.steps": 9})
    for name, value in keys.items():
        monkeypatch.setenv(name, value)
    given = recipe_environment(config)
    assert not keys.keys() & given.keys()
    assert given["HORIZONRL_IMAGE"] == "an image"
    assert given["HORIZONRL_BROKER__NATS__PASSWORD"] == "secret"
    assert "PATH" in given


def test_a_program_has_as_long_to_end_as_its_learner_and_its_actors() -> None:
    for overrides, stop_s in (
        ({}, 180),
        ({"learner.shutdown_s": 600}, 660),
        ({"actor.drain_s": 300}, 380),
    ):
        assert programs.longest_stop_s(horizonrl.load_recipe(overrides=overrides)) == stop_s


async def test_the_api_works_where_an_event_loop_runs_already(
    run_dir: Path, tmp_path: Path
) -> None:
    opened = horizonrl.open_run(run_dir)
    opened.report(tmp_path / "page.html")
    assert len(opened.metrics()) == len(Files.read(run_dir).metrics)
    assert [event.step for event in opened.follow(after_step=5)] == [6, 0, 3, 6]


def test_a_choice_is_the_commands_words() -> None:
    from horizonrl.ops.api.evaluation import _choice

    choice = horizonrl.Choice(
        env_ids=("parity", "maze"),
        split="all",
        tasks=3,
        samples=(1, 4),
        turns=(2,),
        options={"style": "compact"},
    )
    given = " ".join(_choice(choice))
    assert (
        given
        == '--split all --tasks 3 --env parity maze --samples 1 4 --turns 2 --options.style="compact"'
    )
    words_file = _choice(horizonrl.Choice(options={"words": Path("w.txt")}))
    assert list(words_file)[-1] == '--options.words="w.txt"'
    assert list(_choice(horizonrl.Choice())) == ["--split", "test"]
    assert (
        list(_choice(horizonrl.Choice(["parity"], samples=[2])))
        == "--split test --env parity --samples 2".split()
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"env_ids": "parity"}, r"Choice: env_ids is 'parity', and should be list\[str\]"),
        ({"env_ids": 1}, r"env_ids is 1, and should be list\[str\]"),
        (
            {"split": "foo"},
            "split is 'foo', and should be one of 'train', 'validation', 'test', 'all'",
        ),
        ({"samples": "ab"}, r"samples is 'ab', and should be list\[int\]"),
        ({"samples": 2}, r"samples is 2, and should be list\[int\]"),
        ({"tasks": "2"}, "tasks is '2', and should be int, or None"),
    ],
)
def test_a_choice_of_a_wrong_type_is_refused_as_it_is_made(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(horizonrl.ConfigError, match=message):
        horizonrl.Choice(**given)


def test_every_field_of_a_choice_is_on_the_page() -> None:
    table = (
        (Path(__file__).parents[3] / "docs/python-api.md").read_text().partition("`Choice` has")[2]
    )
    assert [
        name
        for name in vars(horizonrl.Choice())
        if f"`{name}`" not in table.partition("```python")[0]
    ] == []


def test_a_wrong_argument_is_a_config_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    api: Any = horizonrl
    config, file = horizonrl.load_recipe("laptop"), tmp_path / "file"
    file.touch()
    for call, message in (
        (
            lambda: api.train("laptop"),
            r"^train: config is 'laptop', .* RunConfig; pass load_recipe\('laptop'\)$",
        ),
        (lambda: api.start("laptop"), "^start: config is 'laptop'"),
        (
            lambda: api.start({"rl.steps": 4}),
            "^start: config is {'rl.steps': 4}, and should be RunConfig$",
        ),
        (
            lambda: api.load_recipe(5),
            r"^load_recipe: recipe is 5, and should be str \| Path \| list\[str \| Path\]$",
        ),
        (
            lambda: api.load_recipe("laptop", ["rl.steps=4"]),
            r"overrides is .* should be dict\[str, Any\], or None",
        ),
        (
            lambda: api.evaluate("m", "out", {"tasks": 1}),
            "choice is {'tasks': 1}, and should be Choice, or None",
        ),
        (
            lambda: api.evaluate("m", file),
            f"^{file}: File exists: give another path, or fix this one$",
        ),
        (lambda: api.open_run(None), r"directory is None, and should be str \| Path$"),
        (lambda: api.open_run(file).export(5), "is no run directory"),
        (lambda: api.Run(file).export(5), r"^export: out is 5, and should be str \| Path$"),
        (
            lambda: api.start_role("foo", config),
            "should be one of 'broker', 'controller', 'learner', 'actor'$",
        ),
    ):
        with pytest.raises(horizonrl.ConfigError, match=message):
            call()
    assert list(tmp_path.iterdir()) == [file]
