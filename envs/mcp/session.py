"""One connection to an MCP server: a program that it starts and ends, or an address."""

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from httpx2 import AsyncClient, Timeout
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import (
    CONNECTION_CLOSED,
    INVALID_REQUEST,
    PARSE_ERROR,
    REQUEST_TIMEOUT,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ResourceLink,
    TextContent,
    TextResourceContents,
    Tool,
)
from pydantic import ValidationError

from horizonrl.common.errors import EnvironmentFailure, first_error
from horizonrl.common.scratch import scratch

STOP_S = 20.0
"""The protocol's own grace periods for a program that does not end take less."""
CONNECT_S, READ_S = 30.0, 300.0
"""The SDK's own: a stream of events may be silent for long."""
MOST_PAGES = 100
SERVERS_FAULT = (CONNECTION_CLOSED, REQUEST_TIMEOUT, PARSE_ERROR, INVALID_REQUEST)
"""Errors that no argument of the agent causes. Servers answer its mistakes with any other code: an unknown entity and a
wrong type with -32603, an unknown tool with -32601."""
TAIL_CHARS = 400
"""Of what a failed server wrote to stderr."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where a server is: a command that is started for each session, or a url that is there already."""

    command: tuple[str, ...] = ()
    url: str | None = None
    directory: Path | None = None
    """Where the command runs; by default a directory of its own, which is removed with it."""
    variables: tuple[str, ...] = ()
    """Names of environment variables: passed to the command; of a url only one, whose value is its bearer token."""


class Session:
    """A connection, held by a task of its own, because it must be closed by the task that opened it."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._client: Client | None = None
        self._holding: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()

    async def start(self) -> None:
        """Connect. Raises EnvironmentFailure."""
        connected = asyncio.get_running_loop().create_future()
        self._holding = asyncio.create_task(self._hold(connected))
        self._client = await connected

    async def tools(self) -> list[Tool]:
        """Return the server's tools, in its order. Raises EnvironmentFailure."""
        client, tools, cursor = self._require_client(), list[Tool](), None
        try:
            for _ in range(MOST_PAGES):
                page = await client.list_tools(cursor=cursor)
                tools += page.tools
                if not (cursor := page.next_cursor):  # some servers end with an empty one
                    return tools
        except Exception as error:
            raise EnvironmentFailure(f"the MCP server lists no tools: {leaf(error)}") from error
        raise EnvironmentFailure(f"the MCP server lists more than {MOST_PAGES} pages of tools")

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the text of a tool's result, or of its error. Raises EnvironmentFailure if the server fails."""
        client = self._require_client()
        try:
            result = await client.call_tool(name, dict(arguments))
        except MCPError as error:
            if error.error.code in SERVERS_FAULT:
                raise EnvironmentFailure(
                    f"the MCP server failed in {name}: {error.error.message}"
                ) from error
            return f"Error: {error.error.message}"
        except Exception as error:
            raise EnvironmentFailure(f"the MCP server failed in {name}: {leaf(error)}") from error
        text = _result_text(result)
        return f"Error: {text}" if result.is_error and not text.startswith("Error") else text

    async def stop(self) -> None:
        """Disconnect, and end the program if there is one. Calling it again does nothing."""
        holding, self._holding = self._holding, None
        if holding is None:
            return
        self._stopping.set()
        if self._client is None:  # a handshake that may never end
            holding.cancel()
        try:
            # Not cancelled: a program that is being ended is waited for.
            await asyncio.wait({holding}, timeout=STOP_S)
        finally:
            holding.cancel()
        await asyncio.wait({holding}, timeout=STOP_S)

    def _require_client(self) -> Client:
        if self._client is None or self._holding is None or self._holding.done():
            raise EnvironmentFailure("the MCP server is gone")
        return self._client

    async def _hold(self, connected: "asyncio.Future[Client]") -> None:
        async with AsyncExitStack() as stack:
            folder = stack.enter_context(scratch())
            stderr = stack.enter_context(
                (folder / "stderr").open("w+", encoding="utf-8", errors="replace")
            )
            try:
                client = await stack.enter_async_context(await self._make(stack, folder, stderr))
                if not connected.done():  # who waited for it may have been cancelled
                    connected.set_result(client)
                await self._stopping.wait()
            # The failure is the episode's: `connected` passes it on, or the next call fails.
            except Exception as error:  # noqa: BLE001
                if not connected.done():
                    connected.set_exception(
                        EnvironmentFailure(f"no MCP server: {leaf(error)}{tail(stderr)}")
                    )
                    connected.exception()  # nobody may be waiting any more

    async def _make(self, stack: AsyncExitStack, folder: Path, stderr: TextIO) -> Client:
        values = {name: os.environ[name] for name in self._server.variables}
        if self._server.url is not None:
            headers = [("Authorization", f"Bearer {token}") for token in values.values()]
            http = await stack.enter_async_context(
                AsyncClient(headers=headers, timeout=Timeout(CONNECT_S, read=READ_S))
            )
            return Client(streamable_http_client(self._server.url, http_client=http))
        work = folder / "work"
        work.mkdir()
        # Bound to this process: a killed actor leaves no server behind.
        command = [
            sys.executable,
            "-m",
            "horizonrl.common.children",
            str(os.getpid()),
            *self._server.command,
        ]
        parameters = StdioServerParameters(
            command=command[0],
            args=command[1:],
            cwd=self._server.directory or work,
            # The SDK passes on HOME, PATH and the like: no other key of ours reaches a server.
            env={"PYTHONUNBUFFERED": "1"} | values,
        )
        return Client(stdio_client(parameters, errlog=stderr))


def _result_text(result: CallToolResult) -> str:
    """Return what an agent reads of a result: its texts, or its structured content if it has no other."""
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(_text_of_block(block) for block in result.content)


def _text_of_block(block: ContentBlock) -> str:
    match block:
        case TextContent():
            return block.text
        case EmbeddedResource(resource=TextResourceContents() as resource):
            return resource.text
        case EmbeddedResource():
            return f"[resource {block.resource.uri}]"
        case ResourceLink():
            return f"[resource_link {block.name} {block.uri}]"
    return f"[{block.type}]"


def leaf(error: BaseException) -> str:
    """Return the text of an error, or of the first one in a group."""
    first = first_error(error)
    if isinstance(first, ValidationError):
        wrong = first.errors(include_url=False)[0]
        key = ".".join(map(str, wrong["loc"]))
        return f"its answer is not MCP's ({key}: {wrong['msg'].lower()})"
    return f"{type(first).__name__}: {first}"


def tail(stderr: TextIO) -> str:
    stderr.seek(0)
    written = stderr.read().strip()
    return f"; it wrote: {written[-TAIL_CHARS:]}" if written else ""


def select_tools(tools: Sequence[Tool], names: Sequence[str]) -> list[Tool]:
    """Return the tools of these names; all of them without names. Raises EnvironmentFailure for an unknown one."""
    listed = {tool.name: tool for tool in tools}
    if missing := [name for name in names if name not in listed]:
        raise EnvironmentFailure(
            f"the MCP server has no tool {missing[0]!r}; it has {', '.join(listed)}"
        )
    return [listed[name] for name in names or listed]
