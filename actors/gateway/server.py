"""The gateway's HTTP service: one address for all episodes of an actor, and a key for each of them.

    POST /v1/chat/completions    OpenAI's Chat Completions
    POST /v1/responses           OpenAI's Responses; what it names is of the episode
    POST /v1/messages            Anthropic's Messages; /count_tokens beside it samples nothing
    GET  /v1/models              the one model

The key comes as `Authorization: Bearer`, as `x-api-key` or `api-key`, or in the path: /e/KEY/v1/... Without the key of
an episode that is being played, nothing is served.
"""

import asyncio
import contextlib
import socket
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any

from aiohttp import web

from horizonrl.actors.chat.template import ChatTemplate
from horizonrl.actors.chat.tool_calls import ToolParser, parser_for
from horizonrl.actors.gateway import anthropic_messages, chat_completions, responses
from horizonrl.actors.gateway.calls import (
    CALLS_LEFT_HEADER,
    IGNORED_HEADER,
    RETRY_HEADER,
    TRAIN_HEADER,
    Answer,
    CallRefused,
    CallRequest,
    Replies,
    episode_over,
    invalid_request,
)
from horizonrl.actors.gateway.session import Call, Session
from horizonrl.actors.policy import Policy
from horizonrl.common.errors import ConfigError, MissingDependency
from horizonrl.common.lag import turn
from horizonrl.common.logs import get_logger
from horizonrl.common.metrics import GATEWAY_CALLS, Metrics
from horizonrl.common.texts import printable, read_object
from horizonrl.common.types import Ticket
from horizonrl.envs import registry

log = get_logger()

BODY_BYTES = 16 << 20
KEEP_ALIVE_S = 10.0
"""Interval of the comments of a stream that waits: proxies and clients close a silent one."""
REMEMBERED = 1024
"""Keys of ended episodes that are answered with 409 rather than 401."""
ORDINARY = ("episode_over", "too_many_calls")
"""Codes of refusals that tell of no defect in the program: calls at its end, and more at once than are served."""
SHOWN_CHARS = 300
MODEL = "policy"
MOST_NAMED, NAME_CHARS = 32, 64
"""Names in the header of what had no effect, and the characters of each."""
KEY_HEADERS = ("x-api-key", "api-key")
ANY_HOST = "0.0.0.0"


@dataclass(frozen=True, slots=True)
class Api:
    """How one API reads a body and writes an answer."""

    parse: Callable[[dict[str, Any], Replies], CallRequest]
    reply: Callable[[Answer, str, dict[str, Any]], dict[str, Any]]
    events: Callable[[Answer, str, dict[str, Any]], Iterator[str]]
    refusal: Callable[[CallRefused], dict[str, Any]] = CallRefused.body


APIS = {
    chat_completions.PATH: Api(
        chat_completions.parse, chat_completions.write_reply, chat_completions.write_events
    ),
    responses.PATH: Api(
        responses.parse_response_request, responses.write_response, responses.write_response_events
    ),
    anthropic_messages.PATH: Api(
        anthropic_messages.parse_messages_request,
        anthropic_messages.write_message,
        anthropic_messages.write_message_events,
        anthropic_messages.write_refusal,
    ),
}
Respond = Callable[[Api, web.Request, Session, bytes], Awaitable[web.StreamResponse]]
"""Answers a request's body under an episode's key. Raises CallRefused."""


@dataclass
class Gateway:
    """Serves a policy to the programs of this actor's episodes."""

    policy: Policy
    chat: ChatTemplate
    parser: ToolParser | None = None
    """Reads tool calls. None finds the chat template's own at the first request with tools, which takes seconds."""
    metrics: Metrics = field(default_factory=Metrics)
    host: str = "127.0.0.1"
    port: int = 0
    """The port that it listens on, once it is open; before, 0 asks for any free one."""

    def __post_init__(self) -> None:
        self._finding = asyncio.Lock()
        self._sessions: dict[str, Session] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._refusals = Counter[str]()
        """As those of a session, of requests that no episode's key came with."""

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator["Gateway"]:
        """Listen while the body runs."""
        app = web.Application(client_max_size=BODY_BYTES)
        for base in ("/v1", "/e/{key}/v1"):
            app.router.add_get(f"{base}/models/{{model:.+}}", self._models)
            for slash in ("", "/"):
                app.router.add_get(f"{base}/models{slash}", self._models)
                for path, api in APIS.items():
                    answer = partial(self._answer, self._sample, api)
                    app.router.add_post(f"{base}/{path}{slash}", answer)
            messages = anthropic_messages.PATH
            count = partial(self._answer, self._count, APIS[messages])
            app.router.add_post(f"{base}/{messages}/count_tokens", count)
        app.router.add_route("*", "/{path:.*}", self._unknown)
        # Episodes end before the gateway does: nothing is left to wait for.
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, self.host, self.port).start()
            self.port = runner.addresses[0][1]
            yield self
        finally:
            await runner.cleanup()

    @property
    def base_url(self) -> str:
        host = socket.gethostname() if self.host == ANY_HOST else self.host
        return f"http://{host}:{self.port}/v1"

    @contextlib.asynccontextmanager
    async def session(self, ticket: Ticket, index: int) -> AsyncIterator[Session]:
        """Serve an episode under a new key while the body runs; the key dies with it."""
        session = Session(self.policy, self.chat, ticket, index, self.metrics)
        self._sessions[session.key] = session
        try:
            yield session
        finally:
            self._ended[session.key] = None
            while len(self._ended) > REMEMBERED:
                self._ended.popitem(last=False)
            del self._sessions[session.key]
            await session.close()

    def _session(self, request: web.Request) -> Session:
        # The scheme is written as anyone likes.
        bearer = request.headers.get("Authorization", "").split()[-1:]
        sent = (request.match_info.get("key"), *map(request.headers.get, KEY_HEADERS), *bearer)
        keys = [key for key in sent if key]
        for key in keys:
            if (session := self._sessions.get(key)) is not None:
                return session
        if not self._ended.keys().isdisjoint(keys):
            raise episode_over()
        raise CallRefused(
            401,
            "invalid_api_key",
            "no episode has this key: send the OPENAI_API_KEY of the program",
        )

    async def _models(self, request: web.Request) -> web.StreamResponse:
        try:
            self._session(request)
        except CallRefused as refused:
            return self._refused(refused)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "horizonrl"}
        if "model" in request.match_info:  # any name is served
            return web.json_response(model | {"id": request.match_info["model"]})
        return web.json_response({"object": "list", "data": [model]})

    async def _answer(self, respond: Respond, api: Api, request: web.Request) -> web.StreamResponse:
        session: Session | None = None
        try:
            # Before the body is read: a stranger gets nothing done.
            session = self._session(request)
            return await respond(api, request, session, await _body(request))
        except CallRefused as refused:
            return self._refused(refused, session, api)
        except RecursionError:
            nested = "the body's objects and lists are nested too deeply"
            return self._refused(invalid_request(nested), session, api)

    async def _sample(
        self, api: Api, request: web.Request, session: Session, raw: bytes
    ) -> web.StreamResponse:
        body = _object(raw)
        await turn()  # tokenising a long conversation takes milliseconds
        asked = api.parse(body, session.replies)
        await session.refuse_overlong(asked)
        if asked.tools:
            session.parser = await self._tool_parser()
        call = session.begin(
            asked,
            sha256(request.path.encode() + raw).digest(),
            request.transport,
            retried=request.headers.get(RETRY_HEADER, "0").strip() not in ("", "0"),
            trained=_trained(request),
        )
        reply = self._stream if body.get("stream") else self._reply
        return await reply(api, request, body, call)

    async def _count(
        self, api: Api, request: web.Request, session: Session, raw: bytes
    ) -> web.StreamResponse:
        tokens = await session.count_tokens(api.parse(_object(raw), session.replies))
        return web.json_response({"input_tokens": tokens})

    async def _unknown(self, request: web.Request) -> web.StreamResponse:
        if request.method == "HEAD":  # of Claude Code, which asks whether anybody is there
            return web.Response(status=404)
        served = ", ".join(("models", *APIS))
        message = f"{request.method} {request.path} is not served; these are: {served}"
        return self._refused(CallRefused(404, "not_found", message))

    def _refused(
        self, refused: CallRefused, session: Session | None = None, api: Api | None = None
    ) -> web.Response:
        """Answer with a refusal; count it, mark its episode, and log the first one of its code there.

        A program may take it for an answer that has no words: its episode would end well, and nobody would know.
        """
        if refused.status < 500 and refused.code not in GATEWAY_CALLS:  # the session counts those
            self.metrics.count("gateway_calls_total", reason="refused")
            if refused.code not in ORDINARY:
                self._tell(refused.code, printable(str(refused), SHOWN_CHARS), session)
        body = (api.refusal if api else CallRefused.body)(refused)
        return web.json_response(body, status=refused.status)

    def _tell(self, code: str, reason: str, session: Session | None) -> None:
        ticket, refusals = None, self._refusals
        if session is not None:
            ticket, refusals = session.ticket, session.refusals
            session.last_refusal = reason
        refusals[code] += 1
        if refusals[code] == 1:
            log.warning(
                "gateway_refused",
                code=code,
                reason=reason,
                ticket=ticket and ticket.ticket_id,
                task=ticket and ticket.task.task_id,
            )

    async def _tool_parser(self) -> ToolParser:
        async with self._finding:
            if self.parser is None:
                try:
                    self.parser = await asyncio.to_thread(parser_for, self.chat)
                except (ConfigError, MissingDependency) as error:
                    raise CallRefused(400, "tools_unsupported", str(error), "tools") from None
        return self.parser

    async def _reply(
        self, api: Api, request: web.Request, body: dict[str, Any], call: Call
    ) -> web.StreamResponse:
        answer = await _await_answer(call)
        response = web.json_response(api.reply(answer, call.name, body), headers=_headers(answer))
        with _delivering(request, call):
            await response.prepare(request)
            await response.write_eof()
        return response

    async def _stream(
        self, api: Api, request: web.Request, body: dict[str, Any], call: Call
    ) -> web.StreamResponse:
        """Sample the whole reply, then send it as events; comments keep the connection until then."""
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        while not (await asyncio.wait({call.answered}, timeout=KEEP_ALIVE_S))[0]:
            try:
                if not response.prepared:
                    await response.prepare(request)
                await response.write(b": waiting\n\n")
            except ConnectionError:  # whoever comes back joins the call
                return response
        result = call.answered.result()
        if isinstance(result, CallRefused):
            if not response.prepared:
                raise result
            # The status is out: only an event can say it.
            with contextlib.suppress(ConnectionError):
                await response.write(chat_completions.sse(api.refusal(result), "error").encode())
                await response.write_eof()
            return response
        with _delivering(request, call):
            if not response.prepared:
                response.headers.update(_headers(result))
                await response.prepare(request)
            await response.write("".join(api.events(result, call.name, body)).encode())
            await response.write_eof()
        return response


async def _await_answer(call: Call) -> Answer:
    # Shielded: whoever joined the call waits for the same future.
    result = await asyncio.shield(call.answered)
    if isinstance(result, CallRefused):
        raise result
    return result


@contextlib.contextmanager
def _delivering(request: web.Request, call: Call) -> Iterator[None]:
    """Note whether the answer that the body writes had a client to read it."""
    delivered_before = call.sample.delivered
    # Before the write: the program may end the moment that it has the answer.
    call.sample.delivered = request.transport is not None and not request.transport.is_closing()
    try:
        yield
    except ConnectionError:
        call.sample.delivered = False
    finally:
        call.sample.delivered |= delivered_before


def _headers(answer: Answer) -> dict[str, str]:
    # A name is anything that a body has: no header takes a line break.
    names = ", ".join(printable(name, NAME_CHARS) for name in answer.ignored[:MOST_NAMED])
    ignored = {IGNORED_HEADER: names.replace("\n", "?")} if names else {}
    return {CALLS_LEFT_HEADER: str(answer.calls_left), **ignored}


def _trained(request: web.Request) -> bool:
    said = request.headers.get(TRAIN_HEADER, "1").strip()
    if said not in ("0", "1"):
        raise invalid_request(f"{TRAIN_HEADER} is 0 or 1, not {said!r:.100}", TRAIN_HEADER)
    return said == "1"


async def _body(request: web.Request) -> bytes:
    try:
        return await request.read()
    except (ConnectionError, web.RequestPayloadError):
        raise invalid_request("the body ended before it was whole") from None
    except web.HTTPRequestEntityTooLarge:
        raise CallRefused(
            413, "request_too_large", f"a body has at most {BODY_BYTES} bytes"
        ) from None


def _object(raw: bytes) -> dict[str, Any]:
    if (body := read_object(raw)) is None:
        raise invalid_request("the body is no JSON object")
    if not isinstance(body.get("stream") or False, bool):
        raise invalid_request("stream is true or false", "stream")
    if not isinstance(body.get("stream_options") or {}, dict):
        raise invalid_request("stream_options is an object", "stream_options")
    return body


@contextlib.asynccontextmanager
async def gateway_for(
    env_ids: Sequence[str], policy: Policy, chat: ChatTemplate, metrics: Metrics, host: str
) -> AsyncIterator[Gateway | None]:
    """Serve the policy if one of the environments is a program, and nothing otherwise."""
    if not any(map(registry.drives_itself, env_ids)):
        yield None
        return
    async with Gateway(policy, chat, None, metrics, host).open() as gateway:
        yield gateway
