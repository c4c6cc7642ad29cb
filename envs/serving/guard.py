"""Who may call an environment server: programs, but no page in a browser.

A page that is open in a browser can send requests to every server that the browser reaches. The browser names the page
in `Origin` and sends JSON to another origin only after a preflight request. A page whose own host name is made to point
to this server (DNS rebinding) still has that name in `Host`.
"""

import ipaddress
import socket
from collections.abc import Awaitable, Callable, Collection
from functools import lru_cache
from urllib.parse import urlsplit

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def list_names(host: str) -> frozenset[str]:
    """Return the names under which clients may call a server on `host`. An IP address needs no name."""
    return frozenset(
        {"localhost", host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}
    )


def guard_handler(handler: Handler, names: Collection[str]) -> Handler:
    """Return a handler that rejects what a page in a browser can send: a foreign origin, an unknown host, a form."""

    async def answer(request: web.Request) -> web.StreamResponse:
        host = _name(f"//{request.host}")
        if not (host in names or _is_address(host)):
            raise web.HTTPMisdirectedRequest(
                text=f"the server is not {host!r}: name it with --allow-host, or call it by its address\n"
            )
        origin = request.headers.get("Origin")
        if origin is not None and _name(origin) != host:
            raise web.HTTPForbidden(text=f"pages of {origin!r} may not call this server\n")
        # Browsers send forms and plain text to other origins without a preflight request.
        if (
            request.method == "POST"
            and request.body_exists
            and request.content_type != "application/json"
        ):
            raise web.HTTPUnsupportedMediaType(
                text=f"a body is application/json, not {request.content_type}\n"
            )
        return await handler(request)

    return answer


# Both are asked about the same few hosts with every call.
@lru_cache
def _name(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").lower()
    except ValueError:
        return ""


@lru_cache
def _is_address(host: str) -> bool:
    """Return whether a host is an IP address, which no page can have as its own name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
