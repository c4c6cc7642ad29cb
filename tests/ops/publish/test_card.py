import json
import re
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from horizonrl.common.config.schema import RunConfig
from horizonrl.ops.models.tiny_model import make_tiny_model
from horizonrl.ops.publish.card import base_model, model_card, recipe
from horizonrl.ops.publish.export import example_prompt
from horizonrl.ops.rundir.directory import public_config
from horizonrl.ops.rundir.files import Files
from tests.ops.report.runs import run_config, write_run


def made(root: Path, step: int, *overrides: str, **facts: Any) -> ModelCard:
    config = run_config(root, *overrides)
    files = Files.read(write_run(config))
    facts = {"step": step, "digest": "d1", "run": "small", "environments": ["textcraft"]} | facts
    return ModelCard(model_card(config, files, Path(config.model.name), facts))


def test_a_card_has_the_exported_versions_results_with_their_intervals(tmp_path: Path) -> None:
    card = made(tmp_path, step=6)
    (result,) = card.data.eval_results
    assert (result.dataset_name, result.dataset_split, result.metric_type, result.metric_value) == (
        "textcraft",
        "validation",
        "success_rate",
        30 / 64,
    )
    assert result.metric_name == "success, 95 %: 0.352 to 0.589"
    assert "| **6** | textcraft | 47 % (35.2 to 58.9) | 0.47 | 64 |" in card.text
    assert "| 3 | textcraft |" in card.text
    assert "On validation tasks, 1 episode(s) each" in card.text
    assert "Test tasks were played 0 times." in card.text


def test_imitation_is_not_called_rl_and_what_each_added_is_told(tmp_path: Path) -> None:
    card = made(tmp_path, 6, "--imitation.steps=3", "--rl.steps=3")
    assert (
        "`model` after 3 optimizer steps of imitation and 3 optimizer steps of reinforcement learning"
        in card.text
    )
    gain = "Success on validation tasks: 16 % before training, 31 % after imitation"
    assert f"{gain}, 47 % after RL." in card.text
    half = made(tmp_path / "half", 3, "--imitation.steps=3", "--rl.steps=3")
    assert "`model` after 3 optimizer steps of imitation on multi-turn tasks" in half.text
    assert f"{gain}.\n" in half.text, "later versions are not this one"


def test_the_facts_are_words_and_rounded_numbers(tmp_path: Path) -> None:
    measured = {"success_rate": 0.46875, "low": 0.35234, "high": 0.58863, "split": "validation"}
    card = made(tmp_path, 6, lineage=2, **measured)
    table = card.text.partition("| fact | value |")[2].partition("\n\n")[0]
    assert table.splitlines()[2:] == [
        "| run | `small` |",
        "| version | 6, of lineage 2 |",
        "| success on validation tasks | 47 % (35-59 %) |",
        "| digest | `d1` |",
    ]


@pytest.mark.parametrize(
    "overrides", [(), ("--rollout.system_prompt=Say ``` é", "--eval.temperature=0")]
)
def test_the_example_of_a_card_runs(
    tmp_path: Path,
    overrides: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The prompt is what the run kept of an episode: its texts have quotes, markup and other alphabets."""
    config = run_config(tmp_path, "--rollout.max_turn_tokens=4", *overrides)
    run_dir = write_run(config)
    prompt = example_prompt(config, run_dir)
    assert prompt is not None and "Goal: craft a thing" in prompt
    facts = {"step": 6, "digest": "d1", "run": "small"}
    card = model_card(config, Files.read(run_dir), Path(config.model.name), facts, prompt)
    (example,) = re.findall(r"^```python\n(.*?)^```", card, re.S | re.M)
    monkeypatch.chdir(make_tiny_model(tmp_path / "exported"))
    scope: dict[str, Any] = {}
    exec(compile(example, "card", "exec"), scope)
    roles = ["system", "user"] if overrides else ["user"]
    assert [message["role"] for message in scope["messages"]] == roles
    assert scope["messages"][-1]["content"] == prompt
    assert scope["messages"][0]["content"] == ("Say ``` é" if overrides else prompt)
    assert 0 < scope["output"].shape[1] - scope["prompt"]["input_ids"].shape[1] <= 4
    capsys.readouterr()


def test_a_prompt_is_shown_only_of_an_environment_whose_texts_are_public(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    run_dir = write_run(config)
    named = json.dumps([{"id": "textcraft", "options": {"delay_s": 1}}, {"id": "transcripts"}])
    assert example_prompt(run_config(tmp_path, f"--envs={named}"), run_dir) is None


def test_a_version_that_was_not_evaluated_claims_no_result(tmp_path: Path) -> None:
    card = made(tmp_path, step=5)
    assert not card.data.eval_results
    assert "**6**" not in card.text


def test_a_card_names_environments_lineage_and_facts(tmp_path: Path) -> None:
    card = made(tmp_path, step=6)
    assert "| textcraft | 1 | train | all | staged: 4, 8 |" in card.text
    assert "| 0 | 0 |" in card.text
    assert "| digest | `d1` |" in card.text
    assert card.data.library_name == "transformers" and "horizonrl" in card.data.tags


@pytest.mark.parametrize(
    "kinds",
    [
        ["--loss.kind=gspo", "--loss.low=0.2"],
        ["--advantage.kind=rloo"],
        ["--loss.kind=package.losses:spo", "--loss.epsilon=0.2", "--loss.epochs=2"],
    ],
)
def test_the_recipe_of_a_card_makes_the_same_config(kinds: list[str], tmp_path: Path) -> None:
    config = run_config(tmp_path, "--rl.lr=3e-6", "--rollout.group_size=4", *kinds)
    file = tmp_path / "recipe.toml"
    file.write_text(recipe(config))
    assert public_config(RunConfig.load([file])) == public_config(config)
    assert "[actor]" not in recipe(config), "defaults need no line"


def test_nothing_of_the_machine_or_the_broker_is_in_a_card(tmp_path: Path) -> None:
    options = json.dumps(
        [{"id": "transcripts", "options": {"path": str(tmp_path / "private" / "talks.jsonl")}}]
    )
    card = made(tmp_path, 6, "--broker.url=nats://inner.example:4222", f"--envs={options}")
    assert str(tmp_path) not in card.content
    assert "inner.example" not in card.content
    assert "talks.jsonl" in card.content


def test_no_path_or_address_is_left_in_what_is_published_at_any_depth(tmp_path: Path) -> None:
    options = {
        "command": [
            "python",
            "/home/alice/secret/server.py",
            "--data=/home/alice/secret/data.json",
            "~/secret/x.py",
        ],
        "environment": {"SHELL": "cd '/home/alice/secret/x' && ls"},
        "url": "https://alice:key@inner.example:8000/maze?key=secret",
        "prompt": "true/false, a / b",
    }
    config = run_config(
        tmp_path,
        f"--envs={json.dumps([{'id': 'parity', 'options': options}])}",
        '--actor.vllm={"download_dir": "/home/alice/models"}',
        "--actor.gateway_host=inner.example",
        "--learner.nodes=2",
        "--learner.node_rank=1",
        "--learner.rendezvous=inner.example:1234",
    )
    made = recipe(config)
    assert not [
        word
        for word in ("alice", "secret", "inner.example", "1234", "gateway_host", "node_rank")
        if word in made
    ]
    shown = public_config(config)
    (env,) = shown["envs"]
    assert env["options"]["command"] == ["python", "server.py", "--data=data.json", "x.py"]
    assert env["options"]["url"] == "https://host/maze"
    assert env["options"]["environment"] == {"SHELL": "cd 'x' && ls"}
    assert env["options"]["prompt"] == options["prompt"]
    file = tmp_path / "recipe.toml"
    file.write_text(made)
    assert public_config(RunConfig.load([file])) == shown


@pytest.mark.parametrize(
    ("name", "text", "known"),
    [
        ("smollm2-135m-instruct", None, ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0")),
        ("pocket-0123456789ab", None, (None, "apache-2.0")),
        ("other", "---\ntags: [a]\nlicense: mit\n---\n", (None, "mit")),
        ("other", "# A model\n\nlicense: mit\n", (None, "unknown")),
        ("other", "---\ntags: [a]\n---\n\nlicense: mit\n", (None, "unknown")),
        ("other", None, (None, "unknown")),
    ],
)
def test_the_licence_is_the_base_models_or_unknown(
    tmp_path: Path, name: str, text: str | None, known: tuple[str | None, str]
) -> None:
    (tmp_path / name).mkdir()
    if text is not None:
        (tmp_path / name / "README.md").write_text(text)
    assert base_model(tmp_path / name) == known
