"""The recipes of the five scenarios: what they select can be read, and shown, by the model that they train."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from horizonrl.actors.chat.template import ChatTemplate
from horizonrl.actors.engines.scripted import ScriptedPolicy
from horizonrl.actors.rollout.rollout import Rollout, play
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.config.training import EnvSection
from horizonrl.common.types import Episode, Kind, Sampling, Task, Ticket
from horizonrl.envs import registry
from horizonrl.learner.controller.curriculum import spread
from horizonrl.ops.models.models import resolve_model

FOLDER = Path(__file__).parents[3] / "ops" / "recipes" / "scenarios"
RECIPES = {path.stem: RunConfig.load([path]) for path in sorted(FOLDER.glob("*.toml"))}
ALONE = {name: config for name, config in RECIPES.items() if name != "mix"}
TASKS = 40


def test_the_mix_has_the_five_scenarios_as_they_are_alone_each_with_its_weight_and_horizons() -> (
    None
):
    mix = RECIPES["mix"]
    assert sorted(ALONE) == ["embodied", "games", "science", "search", "web"]
    of_mix = {env.id: env for env in mix.envs}
    assert sorted(of_mix) == sorted(config.envs[0].id for config in ALONE.values())
    for config in ALONE.values():
        env = of_mix[config.envs[0].id]
        assert (env.options, env.categories) == (config.envs[0].options, config.envs[0].categories)
        assert env.horizons == config.horizon.horizons
        assert mix.model.max_context_tokens >= config.model.max_context_tokens
        assert mix.rollout.max_turn_tokens >= config.rollout.max_turn_tokens


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_selects_tasks_to_train_on_and_holds_some_out(name: str) -> None:
    for env in RECIPES[name].envs:
        for split in ("train", "test"):
            found = {
                spec.category
                for spec in registry.select(env.id, split, env.categories, env.options)
            }
            assert found >= set(env.categories)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("name", ALONE)
def test_first_observations_fit_and_so_do_nine_demonstrations_in_ten(name: str) -> None:
    config = ALONE[name]
    chat = ChatTemplate.load(resolve_model(config.model.name))
    episodes = asyncio.run(demonstrations(config, config.envs[0], chat))
    errors = Counter(episode.error for episode in episodes if episode.error)
    assert not [
        error for error in errors if "first prompt" in error or "turn of the demonstration" in error
    ]
    assert sum(episode.success for episode in episodes) >= 0.9 * len(episodes), errors


async def demonstrations(config: RunConfig, env: EnvSection, chat: ChatTemplate) -> list[Episode]:
    """Play an expert's demonstrations as the recipe's imitation does, some of each category."""
    policy = ScriptedPolicy(max_context_tokens=config.model.max_context_tokens)
    rollout = Rollout(policy, chat, config.rollout.system_prompt, env.step_timeout_s)
    episodes = []
    for spec in spread(registry.select(env.id, "train", env.categories, env.options), TASKS):
        ticket = Ticket(
            number=0,
            kind=Kind.DEMO,
            task=Task(env_id=env.id, task_id=spec.task_id),
            group_size=1,
            horizon_turns=max(config.horizons(env.id)),
            sampling=Sampling(max_turn_tokens=config.rollout.max_turn_tokens),
        )
        episodes.append(await play(lambda: registry.make(env.id, env.options), rollout, ticket, 0))
    return episodes
