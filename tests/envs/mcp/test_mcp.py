"""Tools of real MCP servers, over stdin and stdout and over HTTP: played, graded, broken, ended."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from horizonrl.actors.chat.template import ChatTemplate
from horizonrl.actors.rollout.rollout import Rollout
from horizonrl.broker.nats.cluster import free_ports
from horizonrl.common.errors import ConfigError, EnvironmentFailure
from horizonrl.common.types import Kind, Sampling, StopReason, Task, Ticket
from horizonrl.envs import registry
from horizonrl.envs.api import ToolCall
from horizonrl.envs.check import check
from horizonrl.envs.mcp.env import McpTools, parse_arguments
from horizonrl.envs.mcp.session import Server, Session
from tests.actors.players import SayingPolicy
from tests.actors.rollout.test_replies import JsonCalls
from tests.templates import tool_tokenizer

pytestmark = pytest.mark.process

SERVER = Path(__file__).with_name("server.py")
COMMAND = (sys.executable, str(SERVER))
PATH = Path(__file__).with_name("tasks.jsonl")


@pytest.fixture
def path() -> Path:
    return PATH


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    (port,) = free_ports(1)
    with subprocess.Popen([*COMMAND, str(port)], stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60
        while not any(
            c.status == psutil.CONN_LISTEN for c in psutil.Process(process.pid).net_connections()
        ):
            assert process.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server does not listen"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
        process.kill()


@pytest.fixture(params=["stdio", "http"])
def options(request: pytest.FixtureRequest, path: Path) -> dict[str, Any]:
    server = (
        {"command": COMMAND}
        if request.param == "stdio"
        else {"url": request.getfixturevalue("url")}
    )
    return {"path": path, "grader": "tests.envs.mcp.graders:same", **server}


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name, json.dumps(arguments))


async def test_an_episode_calls_the_servers_tools_and_ends_with_its_server(
    options: dict[str, Any],
) -> None:
    before = children()
    environment = registry.make("mcp", options | {"grader": "tests.envs.mcp.graders:shelved"})
    assert isinstance(environment, McpTools)
    assert (await environment.reset("cup")).text == "Put a cup on the left."
    tools = {tool["function"]["name"]: tool["function"] for tool in environment.tools()}
    assert set(tools) == {"put", "look", "environment", "burn", "sleep"}
    assert tools["put"]["description"] == "Put a thing on a place of the shelf."
    assert set(tools["put"]["parameters"]["properties"]) == {"place", "thing"}
    assert (
        "nothing is on right" in (await environment.call(call("look", place="right"))).observation
    )
    step = await environment.call(call("put", place="left", thing="cup"))
    assert (step.observation, step.reward, step.terminated) == ("put cup on left", 0.0, False)
    step = await environment.step("It is done.")
    assert (step.reward, step.terminated, step.success) == (1.0, True, True)
    assert children() == before
    with pytest.raises(EnvironmentFailure, match="it is over"):
        await environment.call(call("look", place="left"))
    await environment.close()


async def test_the_agents_mistakes_are_answered(options: dict[str, Any]) -> None:
    environment = McpTools(**(options | {"show": ["put", "look"]}))
    await environment.reset("sum")
    assert [tool["function"]["name"] for tool in environment.tools()] == ["put", "look"]
    for wrong, answer in (
        (call("burn"), "There is no tool 'burn'. There are: put, look."),
        (ToolCall("put", "[1]"), "a JSON object"),
        (ToolCall("put", '{"place": NaN}'), "a JSON object"),
        (ToolCall("put", f'{{"place": {"9" * 400}}}'), "a JSON object"),
        (call("put"), "Error"),
        (call("put", place=["left"], thing={}), "Error"),
    ):
        assert answer in (await environment.call(wrong)).observation, wrong
    # What no encoding takes does not reach the server as it is.
    assert (
        await environment.call(ToolCall("put", '{"place": "\\ud800", "thing": "x"}'))
    ).observation == "put x on ?"
    assert (await environment.step("3")).success is False
    await environment.reset("sum")
    assert (await environment.step("2")).success is True
    await environment.close()


def test_it_keeps_the_contract_of_environments_over_http(path: Path, url: str) -> None:
    """Over stdio, `tests/contracts/test_environment.py` checks it."""
    options = {
        "path": path,
        "grader": "tests.envs.mcp.graders:same",
        "url": url,
        "show": ["put", "look"],
    }
    report = asyncio.run(check("mcp", options, ["sum"]))
    assert [found for found in report.checks if not found.passed] == []
    assert report.version.startswith("1 sha256:")


async def test_a_server_program_has_its_own_directory_and_of_our_environment_only_what_is_named(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HORIZONRL_SECRET", "x")
    monkeypatch.setenv("SHELF_TOKEN", "y")

    environment = McpTools(
        path=path,
        grader="tests.envs.mcp.graders:same",
        command=COMMAND,
        variables=("SHELF_TOKEN",),
    )
    await environment.reset("sum")
    names, directory, _ = (await environment.call(call("environment"))).observation.split()
    assert "HORIZONRL_SECRET" not in names
    assert {"PATH", "SHELF_TOKEN"} < set(names.split(","))
    assert Path(directory).is_dir()
    await environment.close()
    assert not Path(directory).exists()


def test_an_address_gets_the_named_token_and_no_error_shows_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHELF_TOKEN", "s3cret")
    seen: set[str | None] = set()

    async def refuse(request: web.Request) -> web.Response:
        seen.add(request.headers.get("Authorization"))
        raise web.HTTPUnauthorized

    async def scenario() -> None:
        app = web.Application()
        app.router.add_route("*", "/mcp", refuse)
        async with TestServer(app) as server:
            options = {
                "path": path,
                "grader": "tests.envs.mcp.graders:same",
                "url": str(server.make_url("/mcp")),
            }
            with pytest.raises(EnvironmentFailure) as failure:
                await registry.make("mcp", options | {"variables": ["SHELF_TOKEN"]}).reset("sum")
            assert "s3cret" not in str(failure.value)

    asyncio.run(scenario())
    assert seen == {"Bearer s3cret"}


async def test_a_server_that_dies_or_fails_to_start_is_the_environments_failure(path: Path) -> None:
    environment = McpTools(path=path, grader="tests.envs.mcp.graders:same", command=COMMAND)
    await environment.reset("sum")
    with pytest.raises(EnvironmentFailure, match="MCP server failed in burn"):
        await environment.call(call("burn"))
    with pytest.raises(EnvironmentFailure):
        await environment.call(call("look", place="left"))
    await environment.reset("sum")  # the next episode has a server of its own
    assert "nothing is on left" in (await environment.call(call("look", place="left"))).observation
    await environment.close()
    wrong = (sys.executable, "-c", "import sys; sys.exit('out of coffee')")
    environment = McpTools(path=path, grader="tests.envs.mcp.graders:same", command=wrong)
    with pytest.raises(EnvironmentFailure, match=r"no MCP server.*out of coffee"):
        await environment.reset("sum")
    await environment.close()


async def test_a_server_that_never_completes_its_handshake_is_ended(path: Path) -> None:
    before = children()
    silent = (sys.executable, "-c", "import time; time.sleep(600)")
    environment = McpTools(path=path, grader="tests.envs.mcp.graders:same", command=silent)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await environment.reset("sum")
    async with asyncio.timeout(10):  # as rollouts close
        await environment.close()
    assert children() == before


async def test_a_close_that_is_cancelled_still_ends_the_server(path: Path) -> None:
    before = children()
    environment = McpTools(path=path, grader="tests.envs.mcp.graders:same", command=COMMAND)
    await environment.reset("sum")
    await environment.call(call("look", place="left"))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await environment.close()
    async with asyncio.timeout(10):
        while children() != before:
            await asyncio.sleep(0.05)


async def test_a_cancelled_call_leaves_no_process(path: Path) -> None:
    before = children()
    environment = McpTools(path=path, grader="tests.envs.mcp.graders:same", command=COMMAND)
    await environment.reset("sum")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3):
            await environment.call(call("sleep"))
    await environment.close()
    assert children() == before


KILLED = """
import asyncio, os, signal, sys
from horizonrl.envs.api import ToolCall
from horizonrl.envs.mcp.env import McpTools

async def scenario():
    environment = McpTools(path=sys.argv[1], grader="json:dumps", command=[sys.executable, sys.argv[2]])
    await environment.reset("sum")
    print((await environment.call(ToolCall("environment", ""))).observation.split()[-1], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(scenario())
"""


def test_a_killed_actor_leaves_no_server(path: Path) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, path, SERVER], stdout=subprocess.PIPE, check=False
    )
    server = int(killed.stdout)
    deadline = time.monotonic() + 20
    while psutil.pid_exists(server) and psutil.Process(server).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the server outlived the program that started it"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("grader", "reason"), [("failing", "no red ink"), ("undecided", "returned None")]
)
def test_a_grader_that_fails_is_a_broken_episode(path: Path, grader: str, reason: str) -> None:
    chat = ChatTemplate(tool_tokenizer())
    policy = SayingPolicy(chat, "2", max_context_tokens=100_000)
    rollout = Rollout(policy, chat, None, step_timeout_s=60, parser=JsonCalls())
    ticket = Ticket(
        number=0,
        kind=Kind.TRAIN,
        task=Task(env_id="mcp", task_id="sum"),
        group_size=1,
        horizon_turns=2,
        sampling=Sampling(max_turn_tokens=200),
    )

    async def played(name: str) -> Any:
        environment = McpTools(path=path, grader=f"tests.envs.mcp.graders:{name}", command=COMMAND)
        try:
            return await rollout.episode(environment, ticket, 0)
        finally:
            await environment.close()

    episode = asyncio.run(played(grader))
    assert (episode.stop, episode.turns) == (StopReason.ENV_ERROR, ())
    assert reason in str(episode.error)
    assert asyncio.run(played("same")).episode_return == 1.0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"path": None}, "needs options.path"),
        ({"command": ()}, "options.command or options.url"),
        ({"url": "http://127.0.0.1:1/mcp"}, "not both"),
        ({"variables": ["NOT_SET_HERE"]}, "'NOT_SET_HERE' is not set"),
        (
            {"command": (), "url": "http://127.0.0.1:1/mcp", "variables": ["PATH", "HOME"]},
            "one bearer token",
        ),
        ({"grader": "nothing"}, "MODULE:FUNCTION"),
        ({"grader": "json:nothing"}, "has no function 'nothing'"),
        ({"grader": "tests.envs.mcp.test_mcp:PATH"}, "no function"),
    ],
)
def test_wrong_options_are_refused(path: Path, changes: dict[str, Any], reason: str) -> None:
    options = {"path": path, "grader": "json:dumps", "command": COMMAND}
    with pytest.raises(ConfigError, match=reason):
        registry.make("mcp", options | changes)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has no line"),
        ('{"task_id": "a"}', "line 1: prompt"),
        (
            '{"task_id": "a", "prompt": "b"}\n{"task_id": "a", "prompt": "b"}',
            "line 2: there is a task 'a' already",
        ),
        ("[", "line 1"),
    ],
)
def test_a_wrong_file_of_tasks_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "tasks.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=reason):
        registry.tasks("mcp", {"path": tmp_path / "tasks.jsonl"})


def test_tasks_have_their_split_and_category(path: Path) -> None:
    assert [
        (task.task_id, task.split, task.category) for task in registry.tasks("mcp", {"path": path})
    ] == [
        ("cup", "train", "all"),
        ("sum", "test", "sums"),
    ]


def test_arguments_are_what_every_server_reads() -> None:
    assert parse_arguments(call("put", a=1, b=[{"c": "\ud800"}])) == {"a": 1, "b": [{"c": "?"}]}
    assert parse_arguments(ToolCall("put", "")) == {}
    for odd in (
        "[" * 5000,
        "{" * 3000,
        '{"a": -Infinity}',
        f'{{"a": {1 << 63}}}',
        '{"a": "' + "x" * 10_000 + '"}',
    ):
        assert parse_arguments(ToolCall("put", odd)) is None


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


@pytest.mark.parametrize(
    ("answer", "read"),
    [
        (
            {"error": {"code": -32603, "message": "Entity with name nobody not found"}},
            "Error: Entity with name nobody",
        ),
        ({"error": {"code": -32601, "message": "Unknown tool: y"}}, "Error: Unknown tool: y"),
        ({"error": {"code": -32602, "message": "bad params"}}, "Error: bad params"),
        ({"result": {"content": [], "structuredContent": {"answer": 42}}}, '{"answer": 42}'),
        ({"result": {"content": [text("1 row")], "structuredContent": {"rows": [7]}}}, "1 row"),
        (
            {
                "result": {
                    "content": [
                        {
                            "type": "resource",
                            "resource": {"uri": "file:///a.txt", "text": "its words"},
                        }
                    ]
                }
            },
            "its words",
        ),
        (
            {
                "result": {
                    "content": [
                        {"type": "resource", "resource": {"uri": "file:///a.bin", "blob": "AAAA"}}
                    ]
                }
            },
            "[resource file:///a.bin]",
        ),
        (
            {
                "result": {
                    "content": [
                        {"type": "resource_link", "uri": "file:///b.txt", "name": "b"},
                        text("after"),
                    ]
                }
            },
            "[resource_link b file:///b.txt]\nafter",
        ),
        ({"result": {"content": [], "isError": True}}, "Error: "),
    ],
)
def test_what_servers_answer_reaches_the_agent_as_text(answer: dict[str, Any], read: str) -> None:
    async def scenario() -> str:
        session = Session(
            Server(command=(sys.executable, str(Path(__file__).with_name("raw_server.py"))))
        )
        await session.start()
        try:
            assert [tool.name for tool in await session.tools()] == ["say"]
            return await session.call("say", {"answer": json.dumps(answer)})
        finally:
            await session.stop()

    assert asyncio.run(scenario()).startswith(read)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"error": {"code": -32700, "message": "parse error"}}, "parse error"),
        (
            {"result": {"content": None}},
            r"its answer is not MCP's \(content: input should be a valid list\)",
        ),
    ],
)
def test_an_error_that_no_argument_causes_is_the_servers_failure(
    answer: dict[str, Any], said: str
) -> None:
    async def scenario() -> None:
        session = Session(
            Server(command=(sys.executable, str(Path(__file__).with_name("raw_server.py"))))
        )
        await session.start()
        try:
            await session.call("say", {"answer": json.dumps(answer)})
        finally:
            await session.stop()

    with pytest.raises(EnvironmentFailure, match=rf"failed in say: {said}$"):
        asyncio.run(scenario())
