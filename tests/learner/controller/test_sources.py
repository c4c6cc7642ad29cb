"""Which environment is drawn for which kind of ticket, from the recipe on."""

import json
from pathlib import Path

import pytest

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import ConfigError
from horizonrl.common.types import Kind
from horizonrl.envs.transcripts import to_record
from horizonrl.learner.controller.curriculum import Curriculum, sources_of


def recipe(tmp_path: Path, transcripts: str, others: str = "") -> RunConfig:
    demos = tmp_path / "demos.jsonl"
    demos.write_text(
        "\n".join(json.dumps(to_record(f"x_{n}", "go", [("a", "b")])) for n in range(3))
    )
    path = tmp_path / "recipe.toml"
    path.write_text(
        f"""
        [imitation]
        steps = 2
        [[envs]]
        id = "transcripts"
        options = {{ path = "{demos}" }}
        {transcripts}
        {others}
        """
    )
    return RunConfig.load([path])


def test_imitation_can_run_on_transcripts_and_rl_on_another_environment(tmp_path: Path) -> None:
    others = '[[envs]]\nid = "textcraft"\nkinds = ["train", "eval"]'
    sources = sources_of(recipe(tmp_path, 'kinds = ["demo"]', others).envs)
    assert [(source.env_id, len(source.task_ids)) for source in sources] == [
        ("transcripts", 3),
        ("textcraft", 363),
    ]
    curriculum = Curriculum(0, sources)
    drawn = {
        kind: {curriculum.draw(kind, number)[0].env_id for number in range(50)} for kind in Kind
    }
    assert drawn == {
        Kind.DEMO: {"transcripts"},
        Kind.TRAIN: {"textcraft"},
        Kind.EVAL: {"textcraft"},
    }


def test_imitation_mixes_transcripts_with_an_expert_by_weight(tmp_path: Path) -> None:
    others = '[[envs]]\nid = "parity"\nweight = 3.0'
    curriculum = Curriculum(0, sources_of(recipe(tmp_path, 'kinds = ["demo"]', others).envs))
    drawn = [curriculum.draw(Kind.DEMO, number)[0].env_id for number in range(1000)]
    assert 0.70 < drawn.count("parity") / 1000 < 0.80
    assert {curriculum.draw(Kind.TRAIN, number)[0].env_id for number in range(50)} == {"parity"}


def test_transcripts_cannot_be_drawn_for_rl(tmp_path: Path) -> None:
    config = recipe(tmp_path, "")
    with pytest.raises(
        ConfigError,
        match=r'transcripts only has demonstrations.*train, demo, eval.*kinds = \["demo"\]',
    ):
        sources_of(config.envs)


def test_turns_are_compared_within_states_only_where_the_environment_names_them() -> None:
    envs = RunConfig.load([], ["--envs", '[{"id": "textcraft"}, {"id": "parity"}]']).envs
    assert len(sources_of(envs)) == 2 and len(sources_of(envs[:1], states=True)) == 1
    with pytest.raises(
        ConfigError, match=r"parity does not name its states.*set state_weight to 0"
    ):
        sources_of(envs, states=True)


def test_a_phase_without_an_environment_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"rl\.steps is 100 but none of the envs transcripts has 'train' among"
    ):
        recipe(tmp_path, 'kinds = ["demo"]')
    with pytest.raises(
        ConfigError, match=r"imitation\.steps is 1 but none of the envs textcraft has 'demo' among"
    ):
        RunConfig.load(
            [], ["--envs", '[{"id": "textcraft", "kinds": ["train"]}]', "--imitation.steps=1"]
        )
    with pytest.raises(
        ConfigError, match=r"envs\.0\.kinds\.0: Input should be 'train', 'demo' or 'eval'"
    ):
        RunConfig.load([], ["--envs", '[{"id": "textcraft", "kinds": ["rl"]}]'])
