"""The page "Bring your own agent": its code is run as it stands there."""

import asyncio
import inspect
import re
from pathlib import Path

import pytest

from horizonrl.actors.gateway import calls, session
from horizonrl.actors.rollout.rollout import Rollout, play
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.types import Episode, StopReason
from horizonrl.envs import registry
from horizonrl.envs.program.env import ProgramEnvironment
from tests.actors.gateway.served import CHAT, Remembering, gateway_of, ticket

PAGE = (Path(__file__).parents[3] / "docs" / "bring-your-own-agent.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def block(language: str, number: int = 0) -> str:
    return [text for found, text in BLOCKS if found == language][number]


def played(answer: str, options: dict[str, object], horizon_turns: int) -> Episode:
    async def scenario() -> Episode:
        policy = Remembering(lambda read: answer)
        async with gateway_of(policy) as served:
            rollout = Rollout(policy, CHAT, None, 5.0, gateway=served)
            task = registry.tasks("program", options)[0].task_id
            order = ticket(horizon_turns)
            order = order.model_copy(
                update={"task": order.task.model_copy(update={"task_id": task})}
            )
            return await play(lambda: registry.make("program", options), rollout, order, 0)

    return asyncio.run(scenario())


@pytest.mark.process
def test_the_three_files_of_the_page_are_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (
        ("agent.py", block("python")),
        ("tasks.jsonl", block("json")),
        ("recipe.toml", block("toml")),
    ):
        Path(name).write_text(text)
    config = RunConfig.load([Path("recipe.toml")], [])
    (env,) = config.envs
    splits = [task.split for task in registry.tasks(env.id, env.options)]
    assert splits == ["train", "train", "validation", "test"]
    episode = played("It is 7.", env.options, horizon_turns=4)
    assert (episode.stop, episode.episode_return, episode.prompt) == (
        StopReason.TERMINATED,
        1.0,
        "What is 3 plus 4?",
    )


@pytest.mark.process
def test_the_page_plays_one_of_our_environments(tmp_path: Path) -> None:
    maze = registry.tasks("maze")[0].task_id
    (tmp_path / "player.py").write_text(block("python", 1))
    (tmp_path / "tasks.jsonl").write_text(f'{{"id": "m", "maze": "{maze}"}}\n')
    options: dict[str, object] = {
        "program": f"{tmp_path}/player.py:play_maze",
        "tasks": f"{tmp_path}/tasks.jsonl",
    }
    episode = played("move up", options, horizon_turns=500)
    assert (episode.error, episode.valid, episode.branches) == (None, True, ())
    assert len(episode.turns) > 1


def test_the_page_names_every_option_and_every_code_of_an_answer() -> None:
    options = set(re.findall(r"^\| `(\w+)` \| .* \| .* \|$", PAGE, re.MULTILINE))
    assert set(inspect.signature(ProgramEnvironment).parameters) <= options
    source = inspect.getsource(session) + inspect.getsource(calls)
    codes = set(re.findall(r'CallRefused\(\s*4\d\d, "(\w+)"', source))
    assert {code for code in codes if f"`{code}`" not in PAGE} == set()
    assert len(codes) > 6
