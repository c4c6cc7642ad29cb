"""The recipes of AgentGym-RL: each is a valid config, alone and under what changes it, and says where it is from."""

import re
from pathlib import Path

import pytest

from horizonrl.actors.chat.template import ChatTemplate
from horizonrl.common.config.schema import RunConfig
from horizonrl.ops.cli.recipe_names import find_recipe
from horizonrl.ops.models.tiny_model import make_tiny_qwen

SCENARIOS = ("textcraft", "babyai", "sciworld", "searchqa", "webarena")
NUMBER = re.compile(r"^(\w+) = .*\d")


def load(*names: str) -> RunConfig:
    return RunConfig.load([find_recipe(Path("agentgym-rl") / name) for name in names])


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_recipe_is_valid_and_its_updates_divide_its_batch(scenario: str) -> None:
    config = load(scenario)
    assert config.model.name == "Qwen/Qwen2.5-7B-Instruct"
    assert (config.learner.ranks, config.learner.zero_stage) == (8, 3)
    assert (config.rl.lr, config.reference.kl) == (1e-6, 1e-3)
    assert config.rl.groups_per_step % config.loss.minibatches == 0
    assert len(config.horizon.horizons) == 3
    assert config.rl.steps > 2 * config.horizon.steps_per_stage, "every stage is reached"


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_fixed_horizon_and_the_smaller_model_lie_on_top(scenario: str) -> None:
    staged, fixed = load(scenario), load(scenario, f"{scenario}-fixed", "qwen3b")
    assert fixed.horizon.kind == "fixed"
    assert len(fixed.horizon.horizons) == 1
    assert fixed.model.name == "Qwen/Qwen2.5-3B-Instruct"
    assert fixed.envs == staged.envs
    assert fixed.run.name != staged.run.name


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_number_of_a_recipe_names_its_source(scenario: str) -> None:
    text = find_recipe(Path("agentgym-rl") / scenario).read_text()
    assert [line for line in text.splitlines() if NUMBER.match(line) and "#" not in line] == []


def test_the_tiny_stand_in_has_qwens_architecture_and_a_chat(tmp_path: Path) -> None:
    from transformers import AutoConfig

    model = make_tiny_qwen(tmp_path / "tiny")
    assert AutoConfig.from_pretrained(model).architectures == ["Qwen2ForCausalLM"]
    chat = ChatTemplate.load(model)
    assert "craft 2 oak planks" in chat.decode(chat.open(None, "craft 2 oak planks"))
