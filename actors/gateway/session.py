"""One episode of a program: its budget of calls, its retries, and what it has sampled.

Place in the flow: Ticket → **calls** → Episode. A call is reserved without an await in between, so that parallel calls
never exceed the horizon; it is sampled in a task of its own, so that it outlives a client that hangs up and retries.
"""

import asyncio
import json
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from secrets import token_hex, token_urlsafe
from typing import TypeVar

from horizonrl.actors.chat.messages import ChatMessage
from horizonrl.actors.chat.template import ChatTemplate
from horizonrl.actors.chat.tool_calls import NoCalls, ToolParser
from horizonrl.actors.episode_ends import REFUSAL_STOPS
from horizonrl.actors.gateway.calls import (
    Answer,
    CallRefused,
    CallRequest,
    PastReply,
    SampledToken,
    episode_over,
)
from horizonrl.actors.gateway.matching import MatchingGraph, SampledCall, TooManyBranches
from horizonrl.actors.policy import Generation, Policy
from horizonrl.common.errors import ConfigError, ContextFull, EngineDead, PolicyFailure
from horizonrl.common.logs import get_logger
from horizonrl.common.metrics import Metrics
from horizonrl.common.types import StopReason, Ticket, VersionSpan

log = get_logger()
T = TypeVar("T")

MOST_IN_FLIGHT = 64
"""Calls of one episode at once. One more is answered with 429, which clients try again."""
KEY_BYTES = 16
LIKELY_CHARS = 8
"""Characters per token, generously. Only a request that is longer for its context is counted before its turn."""


@dataclass(eq=False, slots=True)
class Call:
    request: CallRequest
    sample: SampledCall
    prompt: tuple[int, ...]
    max_tokens: int
    calls_left: int
    """Of the episode's horizon, after this one."""
    client: asyncio.BaseTransport | None
    """The connection that last asked for it. None: it was gone before the call began."""
    answered: asyncio.Future[Answer | CallRefused] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    name: str = field(default_factory=lambda: token_hex(12))
    """Of its reply: the same for everyone who joins it."""

    @property
    def lost(self) -> bool:
        """Whether its client has gone without the answer, or before there is one."""
        failed = self.answered.done() and isinstance(self.answered.result(), CallRefused)
        gone = self.client is None or self.client.is_closing()
        return gone and not failed and not self.sample.delivered


@dataclass
class Session:
    """Serves the calls of one episode until `close`."""

    policy: Policy
    chat: ChatTemplate
    ticket: Ticket
    index: int
    metrics: Metrics = field(default_factory=Metrics)
    parser: ToolParser = field(default_factory=NoCalls)
    """Reads the calls of replies to requests that have tools."""
    key: str = field(default_factory=lambda: token_urlsafe(KEY_BYTES))
    """128 random bits: who has them plays this episode."""
    graph: MatchingGraph = field(default_factory=MatchingGraph)
    replies: dict[str, PastReply] = field(default_factory=dict)
    """Those that have been sampled, by name."""
    generate_s: float = 0.0
    cut: StopReason | None = None
    """Set by a refusal after which no further call can succeed, or by a full context until the next call succeeds."""
    failure: PolicyFailure | None = None
    """The engine's failure of a call after which none has succeeded."""

    def __post_init__(self) -> None:
        self.over = asyncio.Event()
        """Set when no further call can be served: by the horizon, or by an engine that is gone."""
        self.refusals = Counter[str]()
        """How many requests were refused as wrong, by code."""
        self.last_refusal: str | None = None
        self._reserved = 0
        self._begun = 0
        self._in_flight: set[asyncio.Task[Answer | CallRefused]] = set()
        self._calls: dict[bytes, list[Call]] = defaultdict(list)
        self._closed = False
        self._counting = asyncio.Lock()

    def begin(
        self,
        request: CallRequest,
        digest: bytes,
        client: asyncio.BaseTransport | None,
        *,
        retried: bool,
        trained: bool,
    ) -> Call:
        """Reserve a call and begin to sample it, or join the one that it repeats. Raises CallRefused.

        Parallel samples have requests of equal `digest`: a retry repeats a call that its client has lost, and is a new
        one if no client has.
        """
        if self._closed:
            raise episode_over()
        lost = (call for call in self._calls.get(digest, ()) if call.lost)
        if retried and (repeated := next(lost, None)) is not None:
            self._count("replayed")
            repeated.client = client  # so that the next retry is another's
            return repeated
        self._admit()
        sample = self._reserve(request)
        sample.trained = trained
        wanted = self.ticket.sampling.max_turn_tokens
        wanted = wanted if request.max_tokens is None else max(1, min(wanted, request.max_tokens))
        prompt = self._fitting(sample, wanted)
        self._reserved += 1
        self.metrics.count("gateway_parameters_ignored_total", len(request.ignored))
        calls_left = self.ticket.horizon_turns - self._reserved
        call = Call(request, sample, prompt, wanted, calls_left, client)
        self._calls[digest].append(call)
        task = asyncio.get_running_loop().create_task(self._run(call))
        self._in_flight.add(task)
        task.add_done_callback(partial(self._end, call))
        return call

    async def refuse_overlong(self, request: CallRequest) -> None:
        """Refuse a request that is far too long before it is rendered here, which would hold up all other episodes."""
        limit, chars = self.policy.max_context_tokens, _chars(request)
        if chars <= LIKELY_CHARS * limit:
            return
        if await self._in_thread(self.chat.overflows, request, limit):
            message = f"the conversation has {chars} characters: more than the {limit} tokens of the context hold"
            raise self._refused(_too_long(message))

    async def count_tokens(self, request: CallRequest) -> int:
        """Return how many tokens the prompt of a call has that continues nothing. Raises CallRefused."""
        return len(await self._in_thread(self.chat.render, request))

    async def _in_thread(
        self, render: Callable[..., T], request: CallRequest, *arguments: int
    ) -> T:
        """Render a request outside the event loop, in one thread per episode. Raises CallRefused."""
        async with self._counting:
            try:
                return await asyncio.to_thread(render, request.messages, request.tools, *arguments)
            except ConfigError as error:
                raise _unrenderable(error) from None

    async def close(self) -> None:
        """Serve nothing more; end what is being sampled."""
        self._closed = True
        running = list(self._in_flight)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def exhausted(self) -> None:
        """Wait until no further call can be served, and those within the horizon have been sampled."""
        await self.over.wait()
        while self._in_flight:
            await asyncio.wait(self._in_flight)

    @property
    def answered(self) -> int:
        """Calls whose answer a program has read, or could have."""
        return sum(sample.delivered for sample in self.graph.samples)

    def _admit(self) -> None:
        if self.failure is not None and isinstance(self.failure, EngineDead):
            raise _unavailable(self.failure)
        horizon = self.ticket.horizon_turns
        if self._reserved >= horizon:
            # Not 429, which clients try again: the same call will never succeed.
            message = f"the episode's horizon is {horizon} model calls: none is left"
            raise self._refused(CallRefused(400, "horizon_reached", message))
        if len(self._in_flight) >= MOST_IN_FLIGHT:
            raise CallRefused(
                429, "too_many_calls", f"{MOST_IN_FLIGHT} calls of this episode are in flight"
            )

    def _reserve(self, request: CallRequest) -> SampledCall:
        """Return the call's sample with what is rendered for it."""
        try:
            sample = self.graph.reserve(request.messages, request.tools)
        except TooManyBranches as error:
            raise self._refused(CallRefused(400, "too_many_branches", str(error))) from None
        try:
            sample.tail = self._announce_turns(sample.tail)
            if sample.parent is not None and sample.parent.generation is not None:
                try:
                    sample.appended_ids = self.chat.extend(
                        sample.parent.generation.ids, sample.tail
                    )
                    return sample
                except ConfigError:  # the template cannot append this: a conversation of its own
                    sample = self.graph.root(sample)
                    sample.tail = self._announce_turns(sample.tail)
            sample.appended_ids = self.chat.render(sample.tail, request.tools)
        except TooManyBranches as error:  # of `root`, which has released the call
            raise self._refused(CallRefused(400, "too_many_branches", str(error))) from None
        except ConfigError as error:
            self.graph.release(sample)
            raise _unrenderable(error) from None
        except BaseException:
            self.graph.release(sample)
            raise
        return sample

    def _announce_turns(self, tail: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
        """Return what the policy reads: with its remaining turns, where the ticket says so (`rollout.announced`)."""
        if not self.ticket.announce_horizon or not tail:
            return tail
        note = f"\n[{self.ticket.horizon_turns - self._reserved} turns left]"
        return (*tail[:-1], replace(tail[-1], content=tail[-1].content + note))

    def _fitting(self, sample: SampledCall, wanted: int) -> tuple[int, ...]:
        ids, limit = sample.prompt_ids(), self.policy.max_context_tokens
        # A whole turn must fit: one that the context cut would look as if the agent had stopped there.
        if len(ids) + wanted > limit:
            self.graph.release(sample)
            raise self._refused(
                _too_long(
                    f"the conversation has {len(ids)} tokens: with {wanted} of the reply it exceeds "
                    f"the maximum context length of {limit} tokens"
                )
            )
        return ids

    def _refused(self, refusal: CallRefused) -> CallRefused:
        """Return a refusal that may end the episode, once it is counted."""
        self._count(refusal.code)
        self.cut = REFUSAL_STOPS[refusal.code]
        if self.cut is not StopReason.CONTEXT:
            self.over.set()
        return refusal

    async def _run(self, call: Call) -> Answer | CallRefused:
        """Sample a call; return its answer, whatever happens."""
        try:
            answer = self._record(call, await self._generate(call))
            self.failure, self.cut = None, None if self.cut is StopReason.CONTEXT else self.cut
            self._count("answered")
            return answer
        except ContextFull as error:  # the engine counts otherwise than we do
            return self._refused(_too_long(str(error)))
        except PolicyFailure as error:
            self.failure = error
            self._count("engine_failed")
            if isinstance(error, EngineDead):
                self.over.set()
            return _unavailable(error)
        except Exception as error:
            log.error("gateway_call_failed", error=repr(error), exc_info=True)
            self.failure = PolicyFailure(f"the gateway failed: {type(error).__name__}: {error}")
            return CallRefused(500, "gateway_failed", str(self.failure))

    def _end(self, call: Call, task: asyncio.Task[Answer | CallRefused]) -> None:
        """Answer a call. Not part of its task, of which no line runs if it is cancelled before its first step."""
        self._in_flight.discard(task)
        result = episode_over() if task.cancelled() else task.result()
        if isinstance(result, CallRefused):
            self.graph.release(call.sample)
            self._reserved -= 1  # nothing was sampled
        else:
            self.replies[call.name] = PastReply(call.request, result)
        call.answered.set_result(result)

    async def _generate(self, call: Call) -> Generation:
        sampling = self.ticket.sampling
        # As in a rollout: 4096 exceeds the most calls of an episode, so no two of a group share a seed.
        seed = None if sampling.seed is None else (sampling.seed + self.index) * 4096 + self._begun
        self._begun += 1
        started = time.monotonic()
        try:
            return await self.policy.generate(
                call.prompt,
                max_tokens=call.max_tokens,
                temperature=sampling.temperature,
                stop_ids=self.chat.stop_ids,
                seed=seed,
            )
        finally:
            self.generate_s += time.monotonic() - started

    def _record(self, call: Call, generation: Generation) -> Answer:
        request = call.request
        reads_calls = bool(request.tools) and request.may_call
        # A family's call syntax may be of special tokens, which the text for people leaves out.
        written = self.chat.spell if reads_calls else self.chat.decode
        text = written(generation.ids)
        cut_short = (
            len(generation.ids) >= call.max_tokens and generation.ids[-1] not in self.chat.stop_ids
        )
        matches = [(text.find(word), word) for word in request.stop if word in text]
        stopped_by = None
        if matches:
            generation = _until(generation, _tokens_until(generation.ids, request.stop, written))
            end, stopped_by = min(matches)
            text, cut_short = text[:end], False
        parsed = (self.parser if reads_calls else NoCalls()).parse(
            self.chat.thought + text, request.tools
        )
        reply = ChatMessage("assistant", parsed.content, parsed.calls, parsed.reasoning)
        self.graph.complete(call.sample, generation, reply, self.chat.decode(generation.ids))
        tokens: tuple[SampledToken, ...] = ()
        if request.logprobs:
            pairs = zip(generation.ids, generation.logprobs, strict=True)
            tokens = tuple(
                SampledToken(self.chat.decode((token,)), logprob) for token, logprob in pairs
            )
        return Answer(
            content=parsed.content,
            reasoning=parsed.reasoning,
            calls=parsed.calls,
            finish="tool_calls" if parsed.calls else "length" if cut_short else "stop",
            stopped_by=stopped_by,
            prompt_tokens=len(call.prompt),
            reply_tokens=len(generation.ids),
            tokens=tokens,
            calls_left=call.calls_left,
            ignored=request.ignored,
        )

    def _count(self, reason: str) -> None:
        self.metrics.count("gateway_calls_total", reason=reason)


def _tokens_until(
    ids: Sequence[int], stop: Sequence[str], written: Callable[[Sequence[int]], str]
) -> int:
    """Return how many tokens it takes until the text has one of the stop strings. Their ids are kept: sampled."""
    lengths = range(1, len(ids) + 1)
    return lengths[
        bisect_left(
            lengths, True, key=lambda length: any(word in written(ids[:length]) for word in stop)
        )
    ]


def _chars(request: CallRequest) -> int:
    """Return about how many characters a request is rendered with."""
    chars = len(json.dumps(request.tools, ensure_ascii=False)) if request.tools else 0
    for message in request.messages:
        arguments = sum(len(call.arguments) for call in message.calls)
        # An empty message has a role all the same.
        chars += len(message.content) + len(message.reasoning) + arguments + LIKELY_CHARS
    return chars


def _unavailable(error: PolicyFailure) -> CallRefused:
    return CallRefused(503, "engine_failed", f"the inference engine failed this call: {error}")


def _unrenderable(error: ConfigError) -> CallRefused:
    return CallRefused(400, "invalid_conversation", str(error), "messages")


def _too_long(message: str) -> CallRefused:
    return CallRefused(400, "context_length_exceeded", message, "messages")


def _until(generation: Generation, tokens: int) -> Generation:
    """Return the first tokens of a generation."""
    spans: list[VersionSpan] = []
    missing = tokens
    for span in generation.spans:
        if missing > 0:
            spans.append(span.model_copy(update={"tokens": min(span.tokens, missing)}))
            missing -= span.tokens
    return Generation(generation.ids[:tokens], generation.logprobs[:tokens], tuple(spans))
