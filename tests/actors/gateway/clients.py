"""Programs on the clients that people use, unmodified: each plays Parity with a tool that takes its steps."""

import asyncio
import json
import os
from collections.abc import Callable
from typing import Any

from horizonrl.envs.program.game import Game

QUESTION = "Take all steps of the game with the tool `say`, then stop."


def playing(play: Callable[[Game, Callable[[str], str]], object], task: dict[str, Any]) -> None:
    with Game("parity", task["round"]) as game:

        def say(text: str) -> str:
            """Say a text in the game.

            Args:
                text: What you say.
            """
            return "over" if game.over else game.step(text).observation

        play(game, say)


SCHEMA: Any = {
    "type": "function",
    "function": {
        "name": "say",
        "description": "Say a text in the game.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string"}},
            "required": ["text"],
        },
    },
}


def openai_chat(task: dict[str, Any], stream: bool = False) -> None:
    from openai import OpenAI

    def play(game: Game, say: Callable[[str], str]) -> None:
        messages: list[Any] = [{"role": "user", "content": f"{game.observation} {QUESTION}"}]
        with OpenAI() as client:
            while True:
                if stream:
                    with client.chat.completions.stream(
                        model="m", messages=messages, tools=[SCHEMA]
                    ) as events:
                        message: Any = events.get_final_completion().choices[0].message
                else:
                    reply = client.chat.completions.create(
                        model="m", messages=messages, tools=[SCHEMA]
                    )
                    message = reply.choices[0].message
                messages.append(
                    message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})
                )
                for call in messages[-1].get("tool_calls", ()):
                    text = json.loads(call["function"]["arguments"])["text"]
                    messages.append(
                        {"role": "tool", "tool_call_id": call["id"], "content": say(text)}
                    )
                if not message.tool_calls:
                    return

    playing(play, task)


def openai_streaming(task: dict[str, Any]) -> None:
    openai_chat(task, stream=True)


def anthropic_tools(task: dict[str, Any], stream: bool = False) -> None:
    from anthropic import Anthropic

    function = SCHEMA["function"]
    tool: Any = {name: function[name] for name in ("name", "description")}
    tool["input_schema"] = function["parameters"]

    def play(game: Game, say: Callable[[str], str]) -> None:
        options: Any = {"model": "m", "max_tokens": 999, "tools": [tool], "messages": []}
        options["messages"].append({"role": "user", "content": f"{game.observation} {QUESTION}"})
        with Anthropic() as client:
            while True:
                if stream:
                    with client.messages.stream(**options) as events:
                        reply = events.get_final_message()
                else:
                    reply = client.messages.create(**options)
                calls = [block for block in reply.content if block.type == "tool_use"]
                if not calls:
                    return
                results = [
                    {"type": "tool_result", "tool_use_id": call.id, "content": say(**call.input)}
                    for call in calls
                ]
                options["messages"] += [
                    {"role": "assistant", "content": reply.content},
                    {"role": "user", "content": results},
                ]

    playing(play, task)


def anthropic_streaming(task: dict[str, Any]) -> None:
    anthropic_tools(task, stream=True)


def openai_agents(task: dict[str, Any], stream: bool = False) -> None:
    from agents import Agent, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)

    def play(game: Game, say: Callable[[str], str]) -> None:
        agent = Agent(
            name="player", instructions=QUESTION, tools=[function_tool(say)], model="gpt-4o"
        )

        async def streamed() -> None:
            result = Runner.run_streamed(agent, game.observation)
            async for _ in result.stream_events():
                pass

        if stream:
            asyncio.run(streamed())
        else:
            Runner.run_sync(agent, game.observation)

    playing(play, task)


def openai_agents_streaming(task: dict[str, Any]) -> None:
    openai_agents(task, stream=True)


def smolagents_agent(kind: str, task: dict[str, Any]) -> None:
    import smolagents

    def play(game: Game, say: Callable[[str], str]) -> None:
        model = smolagents.OpenAIModel(
            model_id="m",
            api_base=os.environ["OPENAI_BASE_URL"],
            api_key=os.environ["OPENAI_API_KEY"],
        )
        agent = getattr(smolagents, kind)
        agent(tools=[smolagents.tool(say)], model=model, verbosity_level=0).run(
            f"{game.observation} {QUESTION}"
        )

    playing(play, task)


def smolagents_tools(task: dict[str, Any]) -> None:
    smolagents_agent("ToolCallingAgent", task)


def smolagents_code(task: dict[str, Any]) -> None:
    smolagents_agent("CodeAgent", task)


def langgraph_agent(task: dict[str, Any]) -> None:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    def play(game: Game, say: Callable[[str], str]) -> None:
        tools = [tool(say)]
        model = ChatOpenAI(model="m").bind_tools(tools)
        graph = StateGraph(MessagesState)
        graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
        graph.add_node("tools", ToolNode(tools))
        graph.add_edge(START, "model")
        graph.add_conditional_edges("model", tools_condition)
        graph.add_edge("tools", "model")
        graph.compile().invoke({"messages": [("user", f"{game.observation} {QUESTION}")]})

    playing(play, task)


def langchain_batch(task: dict[str, Any]) -> None:
    """Four parallel conversations of one call each."""
    from langchain_openai import ChatOpenAI

    def play(game: Game, say: Callable[[str], str]) -> None:
        for reply in ChatOpenAI(model="m").batch(
            [f"{number}. {game.observation}" for number in range(4)]
        ):
            say(str(reply.content))

    playing(play, task)


def pydantic_ai_agent(task: dict[str, Any]) -> None:
    from pydantic_ai import Agent

    def play(game: Game, say: Callable[[str], str]) -> None:
        Agent("openai-chat:m", instructions=QUESTION, tools=[say]).run_sync(game.observation)

    playing(play, task)


def rounds() -> list[dict[str, str]]:
    return [{"id": "one", "round": "round-00"}]
