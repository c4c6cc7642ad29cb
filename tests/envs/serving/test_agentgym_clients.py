"""What AgentGym's own clients ask of a server and read of its answers, on ours: whole episodes of each environment.

The requests are written here from how its clients behave; `python -m tests.peers.agentgym ours` does the same
with the real package.
"""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from horizonrl.envs import registry
from horizonrl.envs.agentgym.doors import COUNTERPARTS, number_tasks
from horizonrl.envs.check import check
from horizonrl.envs.serving import episodes
from tests.envs.serving.servers import Caller, caller_of, server_of
from tests.peers.agentgym.games import Game, answer, door, play


@dataclass(frozen=True)
class Asks:
    """How one of AgentGym's clients plays: the handle, what reset is sent, and where it reads."""

    key: str
    task: str
    create: Any = None
    """The body of /create; most send none."""
    fields: dict[str, Any] = field(default_factory=dict)
    text: str = "observation"
    score: str = "reward"
    done: str = "done"
    reads_observation: bool = False
    """Its first observation is asked for with GET /observation."""


TOOL = Asks("env_idx", "id", {"id": 0}, reads_observation=True)
CLIENTS = {
    "textcraft": Asks(
        "id", "data_idx", {"minecraft_dir": "agentenv_textcraft/", "commands": None, "goal": None}
    ),
    "babyai": Asks("id", "data_idx", score="score"),
    "household": Asks("id", "game", fields={"world_type": "Text"}),
    "maze": Asks("id", "game"),
    "wordle": Asks("id", "seed"),
    "shop": Asks("env_idx", "session_id", text="state", reads_observation=True),
    "webnav": Asks("env_idx", "idx", fields={"seed": 0}, done="terminated", reads_observation=True),
    "sql": Asks("env_idx", "item_id", text="state", reads_observation=True),
    "deepsearch": Asks("env_idx", "id", {"id": 0}, reads_observation=True),
    **dict.fromkeys(("weather", "movie", "academia", "sheet", "todo"), TOOL),
}

WITHOUT_JAVA = [env_id for env_id in COUNTERPARTS if env_id != "sciworld"]
"""SciWorld's episodes in AgentGym's style are those of tests/envs/worlds/sciworld."""


def solved_game(env_id: str) -> Game:
    """Return a game of the expert, of the first task that it solves by AgentGym's rules."""
    tasks = registry.tasks(env_id, door(env_id).options)
    numbers = number_tasks(env_id, tasks)
    games = (asyncio.run(play(env_id, numbers[task.task_id])) for task in tasks[::7])
    return next(game for game in games if game is not None and game.solved)


async def drive(call: Caller, asks: Asks, game: Game, env_id: str) -> tuple[str, list[str], float]:
    """Play a game as AgentGym's client does; return what it read and the reward of its last answer."""
    _, created = await call("create", asks.create)
    handle = created if isinstance(created, int) else created[asks.key]
    status, begun = await call("reset", {asks.key: handle, asks.task: game.number, **asks.fields})
    assert status == 200, begun
    first = (
        (await call.read(f"observation?env_idx={handle}"))[1]
        if asks.reads_observation
        else begun["observation"]
    )
    if env_id == "household":
        first = f"{first}\nAVAILABLE ACTIONS: {','.join(begun['available_actions'])}"
    read, reward = [], 0.0
    for reply in game.replies:
        action = door(env_id).dialect.read(reply)
        status, stepped = await call("step", {asks.key: handle, "action": action})
        assert status == 200, stepped
        read.append(stepped[asks.text])
        reward = stepped[asks.score]
    assert stepped[asks.done] is True
    assert await call("close", {asks.key: handle}) == (200, True)
    assert await call("close", {asks.key: handle}) == (200, False)
    return first, read, reward


@pytest.mark.parametrize("env_id", WITHOUT_JAVA)
def test_agentgyms_client_plays_a_whole_episode(env_id: str) -> None:
    game = solved_game(env_id)

    async def scenario() -> None:
        async with caller_of(env_id, f"/{env_id}") as call:
            first, read, reward = await drive(call, CLIENTS[env_id], game, env_id)
        dialect = door(env_id).dialect
        assert first == game.first
        assert read == [dialect.write_observation(step.observation) for step in game.answers]
        assert reward >= dialect.solved_at

    asyncio.run(scenario())


@pytest.mark.parametrize("env_id", WITHOUT_JAVA)
async def test_the_first_observation_leaves_the_rules_to_the_client(env_id: str) -> None:
    environment = registry.make(env_id, door(env_id).options)
    task = registry.tasks(env_id, door(env_id).options)[0].task_id
    text = (await environment.reset(task)).text
    await environment.close()
    assert not any(
        rule in text for rule in ("Reply with", "Each turn", "Commands:", "Your response should")
    )


def told_by(env_id: str, number: int, **options: Any) -> Any:
    """Return what reset answers for one of AgentGym's numbers."""

    async def scenario() -> Any:
        asks = CLIENTS[env_id]
        async with server_of({env_id: options}) as url, ClientSession() as http:
            call = Caller(http, url)
            _, created = await call("create", asks.create)
            handle = created if isinstance(created, int) else created[asks.key]
            return await call("reset", {asks.key: handle, asks.task: number, **asks.fields})

    return asyncio.run(scenario())


def test_a_number_is_agentgyms() -> None:
    # Level 13, which is not listed.
    assert "Your goal: open the red door" in told_by("babyai", 12)[1]["observation"]
    assert "position 1, 7" in told_by("maze", 5)[1]["observation"]
    assert told_by("maze", 25)[1]["code"] == "unknown_task"  # it starts at its goal
    assert told_by("babyai", -1)[1]["code"] == "unknown_task"


@pytest.mark.parametrize(("env_id", "train"), [("household", 2_420), ("sql", 9_428)])
def test_numbers_that_agentgym_trains_on_are_tasks_to_train_on(env_id: str, train: int) -> None:
    tasks = registry.tasks(env_id)
    numbers = number_tasks(env_id, tasks)
    assert {numbers[task.task_id] < train for task in tasks if task.split == "train"} == {True}
    assert {numbers[task.task_id] < train for task in tasks if task.split == "test"} == {False}


def test_textcrafts_numbers_are_sorted_by_depth() -> None:
    tasks = registry.tasks("textcraft")
    numbers = number_tasks("textcraft", tasks)
    depths = {numbers[task.task_id]: task.category for task in tasks}
    assert [depths[number] for number in range(544)] == sorted(depths.values())
    assert sorted(depths) == list(range(544))


async def test_a_reset_without_a_task_is_refused_and_begins_no_first_task() -> None:
    async with caller_of("household", "/household") as call:
        _, created = await call("create")
        status, refused = await call("reset", {"id": created["id"], "data_idx": 3})
        assert (status, refused["code"]) == (400, "bad_request")
        assert "no game: it is the number of the task" in refused["error"]


def test_wordles_client_is_told_the_words(tmp_path: Path) -> None:
    words = tmp_path / "words.txt"
    words.write_text("panic\nsolar\nto\nshire\n")

    async def scenario(options: dict[str, Any]) -> list[str]:
        async with server_of({"wordle": options}) as url, ClientSession() as http:
            call = Caller(http, f"{url}/wordle")
            _, created = await call("create")
            return list((await call.read(f"filtered_vocab?id={created['id']}"))[1])

    assert asyncio.run(scenario({"words": str(words)})) == ["panic", "solar", "shire"]
    assert len(asyncio.run(scenario({}))) == 980


async def test_detail_and_available_actions_are_answered() -> None:
    async with caller_of("household", "/household") as call:
        _, created = await call("create")
        episode = created["id"]
        _, begun = await call("reset", {"id": episode, "game": 3, "world_type": "Text"})
        detail = (await call.read(f"detail?id={episode}"))[1]
        assert (detail["observation"], detail["done"], detail["deleted"]) == (
            begun["observation"],
            False,
            False,
        )
        assert (await call.read(f"available_actions?id={episode}"))[1] == begun["available_actions"]
        place = begun["available_actions"][0]
        assert place.startswith("go to ")
        _, stepped = await call("step", {"id": episode, "action": place})
        assert "AVAILABLE" not in stepped["observation"]
        assert (await call.read(f"detail?id={episode}"))[1]["observation"] == stepped["observation"]


async def test_every_available_action_of_the_household_does_something() -> None:
    environment = registry.make("household", door("household").options)
    observation = (await environment.reset("household-0003")).text
    for index in range(60):
        actions = observation.rpartition("AVAILABLE ACTIONS: ")[2].split(",")
        reply = f"Action: {actions[index % len(actions)]}"
        observation = (await answer(environment, door("household").dialect, reply)).observation
        assert not observation.startswith("Nothing happens")


def test_a_full_server_closes_what_a_client_that_never_closes_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def write_reset(call: Caller, number: int) -> int:
        episode: int = (await call("create", {"id": 0}))[1]
        assert (await call("reset", {"env_idx": episode, "id": number}))[0] == 200
        return episode

    async def scenario() -> None:
        async with caller_of("weather", "/weather", capacity=3) as call:
            first, second, third = [await write_reset(call, number) for number in range(3)]
            assert (await call("create", {"id": 0}))[0] == 429  # all three are played
            finish = 'Action: finish with Action Input: {"answer": "1"}'
            for episode in (second, first):
                assert (await call("step", {"env_idx": episode, "action": finish}))[1]["done"]
            await write_reset(call, 4)  # in the place of the second, which was left first
            assert (await call("reset", {"env_idx": second, "id": 1}))[0] == 404
            assert (await call("reset", {"env_idx": first, "id": 1}))[0] == 200
            monkeypatch.setattr(episodes, "LEFT_AFTER_S", 0.0)
            await write_reset(call, 5)  # all are played, and one was not called for long
            assert (await call("step", {"env_idx": third, "action": finish}))[0] == 404

    asyncio.run(scenario())


async def test_a_check_leaves_nothing_on_a_server_and_finds_nothing_wrong_with_it() -> None:
    async with caller_of("textcraft", "/textcraft") as call:
        options = {"url": call.base, "instructions": ""}
        report = await check("agentgym-textcraft", options)
        assert [
            found
            for found in report.checks
            if not found.passed and "has no expert" not in found.detail
        ] == []
        assert 'horizonrl_served_episodes{env="textcraft"} 0.0' in (await call.get("../metrics"))[1]
