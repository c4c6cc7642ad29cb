"""A small MCP server: a shelf of words. `python server.py` speaks stdio, `python server.py PORT` HTTP on loopback."""

import os
import sys
import time

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("shelf")
shelf: dict[str, str] = {}


@server.tool()
def put(place: str, thing: str) -> str:
    """Put a thing on a place of the shelf."""
    shelf[place] = thing
    return f"put {thing} on {place}"


@server.tool()
def look(place: str) -> str:
    """Tell what is on a place of the shelf."""
    if place not in shelf:
        raise ToolError(f"nothing is on {place}")
    return shelf[place]


@server.tool()
def environment() -> str:
    """Tell the names of the environment variables, the directory and the process."""
    return f"{','.join(sorted(os.environ))} {os.getcwd()} {os.getpid()}"


@server.tool()
def burn() -> str:
    """End the server's process."""
    os._exit(3)


@server.tool()
def sleep() -> str:
    """Do not answer for a minute."""
    time.sleep(60)
    return "awake"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
