"""Real clients, unmodified, in processes of their own: what they play is trained with the ids that were sampled."""

import asyncio
import importlib.util
import json
import os
from pathlib import Path

import pytest

from horizonrl.actors.rollout.rollout import Rollout, play
from horizonrl.common.types import Episode, StopReason
from horizonrl.envs import registry
from tests.actors.gateway.served import (
    CHAT,
    Remembering,
    assert_trained_is_sampled,
    gateway_of,
    ticket,
)

CLIENTS = Path(__file__).with_name("clients.py")


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def calls_then_stops(read: str) -> str:
    """Take the four steps of the game, then end with words."""
    return call("say", text="even") if read.count("even, again") < 4 else "I am done."


def calls_then_answers(read: str) -> str:
    """As smolagents wants it: the end is a call too."""
    return (
        call("say", text="even")
        if read.count("even, again") < 4
        else call("final_answer", answer="done")
    )


def codes(read: str) -> str:
    steps = "for _ in range(4):\n    print(say('even'))\nfinal_answer('done')"
    return f"Thought: four steps.\n<code>\n{steps}\n</code>"


def says(read: str) -> str:
    return "even"


@pytest.mark.process
@pytest.mark.parametrize(
    ("client", "package", "answer", "calls", "branches"),
    [
        ("openai_chat", "openai", calls_then_stops, 5, 1),
        ("openai_streaming", "openai", calls_then_stops, 5, 1),
        ("anthropic_tools", "anthropic", calls_then_stops, 5, 1),
        ("anthropic_streaming", "anthropic", calls_then_stops, 5, 1),
        ("openai_agents", "agents", calls_then_stops, 5, 1),
        ("openai_agents_streaming", "agents", calls_then_stops, 5, 1),
        ("smolagents_tools", "smolagents", calls_then_answers, 5, 5),
        ("smolagents_code", "smolagents", codes, 1, 1),
        ("langgraph_agent", "langgraph", calls_then_stops, 5, 1),
        ("langchain_batch", "langchain_openai", says, 4, 4),
        ("pydantic_ai_agent", "pydantic_ai", calls_then_stops, 5, 1),
    ],
)
def test_a_client_plays_an_environment_of_ours_and_its_sampled_ids_are_the_trained_ones(
    client: str, package: str, answer: object, calls: int, branches: int
) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install 'horizonrl[agents]'")
    policy = Remembering(answer, max_context_tokens=100_000)  # type: ignore[arg-type]

    async def scenario() -> Episode:
        async with gateway_of(policy) as served:
            rollout = Rollout(policy, CHAT, None, 5.0, gateway=served)
            options = {"program": f"{CLIENTS}:{client}", "tasks": f"{CLIENTS}:rounds"}
            return await play(lambda: registry.make("program", options), rollout, ticket(8), 0)

    episode = asyncio.run(scenario())
    assert episode.error is None
    assert (episode.stop, episode.success, episode.episode_return) == (
        StopReason.TERMINATED,
        True,
        2.0,
    )
    assert (len(episode.turns), 1 + len(episode.branches)) == (calls, branches)
    assert all(turn.trained for turn in episode.turns)
    assert_trained_is_sampled(episode, policy, stops=package == "smolagents")


MINI_SWE = "HORIZONRL_TEST_MINI_SWE_PYTHON"
"""A Python that has it: `uv venv mini`, `uv pip install --python mini/bin/python mini-swe-agent==2.4.6 mcp`, and then
`HORIZONRL_TEST_MINI_SWE_PYTHON=mini/bin/python pytest tests/actors/gateway/test_clients.py -k mini`."""


def works(read: str) -> str:
    if '"returncode": 0' not in read:
        return call("bash", command="echo 42 > answer.txt")
    return call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")


@pytest.mark.process
@pytest.mark.skipif(
    MINI_SWE not in os.environ, reason=f"mini-swe-agent needs its own environment: set {MINI_SWE}"
)
def test_mini_swe_agent_solves_a_task_with_its_shell(tmp_path: Path) -> None:
    policy = Remembering(works, max_context_tokens=100_000)
    (tmp_path / "tasks.jsonl").write_text('{"id": "one", "question": "Write 42 to answer.txt."}\n')
    program = [os.environ[MINI_SWE], str(Path(__file__).with_name("mini_swe.py"))]

    async def scenario() -> Episode:
        async with gateway_of(policy) as served:
            rollout = Rollout(policy, CHAT, None, 5.0, gateway=served)
            options = {"program": program, "tasks": f"{tmp_path}/tasks.jsonl"}
            return await play(lambda: registry.make("program", options), rollout, ticket(8), 0)

    episode = asyncio.run(scenario())
    assert episode.error is None
    assert (episode.stop, episode.episode_return, len(episode.turns)) == (
        StopReason.TERMINATED,
        1.0,
        2,
    )
    assert episode.branches == ()
    assert_trained_is_sampled(episode, policy)


CLAUDE = "HORIZONRL_TEST_CLAUDE_CODE"
"""Claude Code's program: `npm install @anthropic-ai/claude-code`, and then
`HORIZONRL_TEST_CLAUDE_CODE=node_modules/.bin/claude pytest tests/actors/gateway/test_clients.py -k claude`."""


@pytest.mark.process
@pytest.mark.skipif(CLAUDE not in os.environ, reason=f"Claude Code is npm's: set {CLAUDE}")
def test_claude_code_solves_a_task_with_its_shell(tmp_path: Path) -> None:
    commands = iter(("echo 42 > answer.txt; ls", ""))

    def answer(read: str) -> str:
        command = next(commands)
        return call("Bash", command=command, description="Work") if command else "I am done."

    policy = Remembering(answer, max_context_tokens=200_000)
    (tmp_path / "tasks.jsonl").write_text('{"id": "one"}\n')
    (tmp_path / "grader.py").write_text(
        "import os, pathlib\n"
        "def grade(task, answer):\n"
        "    written = pathlib.Path(os.environ['PROGRAM_DIRECTORY'], 'answer.txt').read_text()\n"
        "    return float(written == '42\\n' and answer.strip() == 'I am done.')\n"
    )
    program = [os.path.abspath(os.environ[CLAUDE]), "--print", "Write 42 to answer.txt."]

    async def scenario() -> Episode:
        async with gateway_of(policy) as served:
            rollout = Rollout(policy, CHAT, None, 5.0, gateway=served)
            options = {
                "program": [*program, "--allowedTools", "Bash", "--model", "policy"],
                "tasks": f"{tmp_path}/tasks.jsonl",
                "grader": f"{tmp_path}/grader.py:grade",
                "environment": {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
            }
            return await play(lambda: registry.make("program", options), rollout, ticket(8), 0)

    episode = asyncio.run(scenario())
    assert episode.error is None
    assert (episode.stop, episode.episode_return) == (StopReason.TERMINATED, 1.0)
    assert (len(episode.turns), episode.branches) == (2, ())
    assert_trained_is_sampled(episode, policy)
