"""The actor's wiring: what a scripted actor needs, and what it does without."""

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from horizonrl.actors.main import run_actor
from horizonrl.broker.agreement import wait_for_agreement
from horizonrl.broker.api import Key
from horizonrl.broker.memory import MemoryServer, MemoryTransport
from horizonrl.broker.state import StateStore
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import ConfigError
from horizonrl.common.service import Service
from horizonrl.envs import registry
from horizonrl.learner.controller.curriculum import TaskSource
from horizonrl.learner.controller.main import build_controller
from horizonrl.ops.evaluation.subjects import SubjectRequest, ticket_subject
from horizonrl.ops.models.tiny_model import VOCABULARY

PLAY = """
import asyncio, json, sys
from pathlib import Path
from horizonrl.actors.chat.template import ChatTemplate
from horizonrl.actors.engines.registry import start_policy
from horizonrl.common.config.schema import RunConfig

async def play():
    model = Path(sys.argv[1])
    config = RunConfig.load((), ["--actor.engine=scripted"])
    policy = await start_policy(config.actor, config.model, model, seed=0)
    chat = ChatTemplate.load(model)
    ids = []
    for _ in range(200):
        prompt = chat.open(None, "hello")
        made = await policy.generate(prompt, max_tokens=32, temperature=1.0, stop_ids=chat.stop_ids, seed=None)
        chat.decode(made.ids)
        ids += made.ids
    heavy = [name for name in ("torch", "vllm", "deepspeed") if sys.modules.get(name) is not None]
    print(json.dumps({"engine": policy.engine, "highest": max(ids), "heavy": heavy}))

asyncio.run(play())
"""


def test_a_scripted_actor_samples_ids_of_the_model_and_imports_no_engine(
    tiny_models: tuple[Path, Path],
) -> None:
    command = [sys.executable, "-c", PLAY, str(tiny_models[0])]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    found = json.loads(answer.stdout)
    assert found == {"engine": "scripted", "highest": found["highest"], "heavy": []}
    assert VOCABULARY // 2 < found["highest"] < VOCABULARY


def test_the_provenance_names_the_file_that_tasks_come_from_and_a_wrong_option_is_told_before_any_ticket() -> (
    None
):
    file = Path(__file__).parents[1] / "contracts" / "transcripts.jsonl"
    version = asyncio.run(registry.versioned_id("transcripts", {"path": str(file)}))
    assert version.startswith("transcripts 1 sha256:")
    assert asyncio.run(registry.versioned_id("parity")) == "parity 1"
    with pytest.raises(ConfigError, match="no option 'distractor'"):
        asyncio.run(registry.versioned_id("textcraft", {"distractor": 2}))


def refusing(model: Path, place: Path) -> Path:
    """Return a copy of a model whose template takes no system message, as Gemma's."""
    shutil.copytree(model, place)
    template = place / "chat_template.jinja"
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    template.write_text(refusal + template.read_text())
    return place


def test_a_system_prompt_that_the_template_refuses_is_told_before_any_ticket(
    tiny_models: tuple[Path, Path], tmp_path: Path
) -> None:
    model = refusing(tiny_models[0], tmp_path / "model")
    config = RunConfig.load((), ["--actor.engine=scripted", "--rollout.system_prompt=Be brief."])

    async def act() -> None:
        await run_actor(config, model, {}, tmp_path, Service())

    async def evaluate() -> None:
        overrides = ("--actor.engine=scripted", "--rollout.system_prompt=Be brief.")
        with ticket_subject(SubjectRequest(str(model), overrides=overrides)) as subject:
            async with subject.start(subject.config, {"parity": {}}):
                pass

    for start in (act, evaluate):
        with pytest.raises(
            ConfigError, match=r"rollout\.system_prompt .*System role not supported"
        ):
            asyncio.run(start())


CRAFTING = '--envs=[{"id": "textcraft", "options": {"distractors": 2}}]'


def recipe(*overrides: str) -> RunConfig:
    return RunConfig.load((), ["--rl.steps=3", "--model.max_context_tokens=256", *overrides])


async def test_an_actor_waits_until_the_controller_says_what_its_own_recipe_says() -> None:
    transport, config = (
        MemoryTransport(MemoryServer()),
        recipe(CRAFTING),
    )
    # Of before it was given more steps.
    await StateStore(transport).put(Key.RUN, recipe("--rl.steps=2").settings)
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        waiting = group.create_task(wait_for_agreement(transport, config.settings))
        await asyncio.sleep(0)
        assert not waiting.done()
        source = TaskSource("textcraft", ("stick",), 1.0)
        controller = group.create_task(build_controller(config, transport, [source]).run())
        await waiting
        controller.cancel()


def test_an_actor_of_another_recipe_ends_and_says_what_differs() -> None:
    async def scenario() -> None:
        transport = MemoryTransport(MemoryServer())
        run = recipe("--model.max_context_tokens=512", CRAFTING)
        await StateStore(transport).put(Key.RUN, run.settings)
        await wait_for_agreement(
            transport, recipe('--envs=[{"id": "parity"}]').settings, wait_s=0.01
        )

    with pytest.raises(ConfigError, match="recipe is not the run's") as caught:
        asyncio.run(scenario())
    assert "max_context_tokens is 256 here and 512 in the run" in str(caught.value)
    assert "textcraft.options is absent here and {'distractors': 2} in the run" in str(caught.value)
    assert "parity.options is {} here and absent in the run" in str(caught.value)
