"""`horizonrl demos`: an expert's episodes as conversations in AgentTraj's form, one a line, for others to train on."""

import asyncio
import json
from pathlib import Path
from typing import Any

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.config.training import EnvSection
from horizonrl.common.errors import ConfigError, EnvironmentFailure
from horizonrl.common.files import atomic_write
from horizonrl.common.types import MAX_TURNS
from horizonrl.envs import registry
from horizonrl.envs.agentgym.doors import number_tasks
from horizonrl.envs.api import Environment, make_expert, tool_user
from horizonrl.envs.transcripts import to_record


def write_demonstrations(
    config: RunConfig, out: Path, count: int | None, env_id: str | None
) -> int:
    """Let the expert play the first tasks that the recipe selects, and write its episodes. Returns 0."""
    env = _choose(config, env_id)
    # Numbered among all tasks, not among the chosen ones: an item id has to mean the same task everywhere.
    numbers = number_tasks(env.id, registry.tasks(env.id, env.options))
    task_ids = [
        spec.task_id for spec in registry.select(env.id, env.split, env.categories, env.options)
    ][:count]
    with atomic_write(out) as incoming, incoming.open("w", encoding="utf-8", newline="\n") as file:
        for task_id in task_ids:
            record = asyncio.run(_play(env, task_id, f"{env.id}_{numbers[task_id]}"))
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    print(f"wrote {len(task_ids)} demonstrations of {env.id} to {out}")
    return 0


def _choose(config: RunConfig, env_id: str | None) -> EnvSection:
    ids = [env.id for env in config.envs]
    if env_id is None and len(ids) > 1:
        raise ConfigError(f"the recipe has the envs {', '.join(ids)}: choose one with --env ID")
    if env_id is not None and env_id not in ids:
        raise ConfigError(
            f"the recipe has no environment {env_id!r}, only {', '.join(ids)}: name one of these"
        )
    return config.envs[ids.index(env_id) if env_id is not None else 0]


async def _play(env: EnvSection, task_id: str, item_id: str) -> dict[str, Any]:
    """Play one task to its end. Raises EnvironmentFailure when the expert does not solve it."""
    environment = registry.make(env.id, env.options)
    try:
        async with asyncio.timeout(env.step_timeout_s * MAX_TURNS):
            return await _episode(environment, task_id, item_id)
    finally:
        await environment.close()


async def _episode(environment: Environment, task_id: str, item_id: str) -> dict[str, Any]:
    prompt = observation = (await environment.reset(task_id)).text
    expert = make_expert(environment)
    if tool_user(environment) is not None:
        raise ConfigError(
            f"{environment.env_id} is played by calling tools, which AgentTraj has no form for"
        )
    turns: list[tuple[str, str]] = []
    while len(turns) < MAX_TURNS:
        text = expert.act(observation)
        step = await environment.step(text)
        observation = step.observation
        turns.append((text, observation))
        if step.terminated and step.success:
            return to_record(item_id, prompt, turns)
        if step.terminated or step.truncated:
            break
    raise EnvironmentFailure(
        f"the expert did not solve task {task_id!r} in {len(turns)} turns: leave it out"
    )
