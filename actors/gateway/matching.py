"""Which recorded sequence a call continues. Pure: no I/O, no clock, no tokenizer.

A program sends its whole conversation with every call. What was sampled must not be tokenised again (token exactness),
so a call is matched to a recorded reply by its messages, and then goes on from that reply's own ids:

    root      a conversation that continues no reply: its prompt is rendered whole
    extend    the reply that it continues is the last of its branch: the branch grows
    fork      the reply has been continued before (parallel calls, an edited history): a new branch begins with a copy
              of the ids up to that reply

A reply is continued by any messages that are not replies, as far as the chat template appends them. Messages are
compared by role, flattened content and calls, not by the ids that clients give to calls; arguments by their canonical
JSON, replies without the white space around them. Reasoning that a client leaves out matches, other reasoning does not.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from horizonrl.actors.chat.messages import ChatMessage, ToolCall
from horizonrl.actors.policy import Generation
from horizonrl.common.types import MAX_BRANCHES, Branch, Episode, StopReason, Turn


class TooManyBranches(ValueError):
    """The episode has as many branches as a record holds."""


@dataclass(eq=False, slots=True)
class SampledCall:
    """One sampled call, from its reservation on; `generation` and `reply` are None until it is complete."""

    messages: tuple[ChatMessage, ...]
    """The conversation that the program sent."""
    chain: bytes
    """The digest of tools and messages."""
    parent: "SampledCall | None"
    """The reply that it continues."""
    tail: tuple[ChatMessage, ...]
    """What follows the parent's reply, as the policy reads it; everything for a root."""
    forks: bool
    """Whether it begins a branch although it has a parent."""
    appended_ids: tuple[int, ...] = ()
    """What was rendered for it: the tail and the generation prompt, or the whole prompt of a root."""
    generation: Generation | None = None
    reply: ChatMessage | None = None
    text: str = ""
    trained: bool = True
    delivered: bool = False
    """Whether its answer was written to a client that was still there."""

    @property
    def opens(self) -> bool:
        """Whether its turn is the first one of a branch."""
        return self.parent is None or self.forks

    def prompt_ids(self) -> tuple[int, ...]:
        """Return every id that the policy reads for this call."""
        parts: list[tuple[int, ...]] = []
        sample: SampledCall | None = self
        while sample is not None:
            parts.append(sample.appended_ids)
            sample = sample.parent
            if sample is not None:
                assert sample.generation is not None
                parts.append(sample.generation.ids)
        return tuple(token for part in reversed(parts) for token in part)


@dataclass
class MatchingGraph:
    """The calls of one episode."""

    samples: list[SampledCall] = field(default_factory=list)
    """The complete ones, in the order in which they were completed: the turns of the episode."""
    _replies: dict[bytes, list[SampledCall]] = field(default_factory=lambda: defaultdict(list))
    """By the digest of the conversation that ends with the reply."""
    _continued: set[int] = field(default_factory=set)
    """Replies whose branch has grown, or is growing, beyond them."""
    _branches: int = 0
    """Branches, those in the making included."""

    def reserve(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()
    ) -> SampledCall:
        """Return the place of a call in the graph. Raises TooManyBranches.

        The caller ends it with `complete` or `release`.
        """
        messages = tuple(messages)
        chains = _chains(messages, tools)
        for length in range(len(messages) - 1, 0, -1):
            if messages[length - 1].role == "assistant" and _continues(messages[length:]):
                reply = self._best(self._replies.get(chains[length], ()), messages[:length])
                if reply is not None:
                    return self._claim(
                        SampledCall(messages, chains[-1], reply, messages[length:], forks=False)
                    )
        return self._claim(SampledCall(messages, chains[-1], None, messages, forks=False))

    def root(self, sample: SampledCall) -> SampledCall:
        """Give up a place for one that continues nothing, where the template cannot append what the call asks for."""
        self.release(sample)
        return self._claim(
            SampledCall(sample.messages, sample.chain, None, sample.messages, forks=False)
        )

    def complete(
        self, sample: SampledCall, generation: Generation, reply: ChatMessage, text: str
    ) -> None:
        """Record what was sampled and what the program gets to read of it."""
        sample.generation, sample.reply, sample.text = generation, reply, text
        self.samples.append(sample)
        self._replies[_link(sample.chain, reply)].append(sample)

    def release(self, sample: SampledCall) -> None:
        """Free the place of a call that failed."""
        if sample.opens:
            self._branches -= 1
        else:
            self._continued.discard(id(sample.parent))

    def _claim(self, sample: SampledCall) -> SampledCall:
        sample.forks = sample.parent is not None and id(sample.parent) in self._continued
        if sample.opens:
            if self._branches >= MAX_BRANCHES:
                raise TooManyBranches(
                    f"the episode has {MAX_BRANCHES} branches, the most that a record holds"
                )
            self._branches += 1
        else:
            self._continued.add(id(sample.parent))
        return sample

    def _best(
        self, candidates: Iterable[SampledCall], history: Sequence[ChatMessage]
    ) -> SampledCall | None:
        """Return the reply that a history ends with: of equal ones the first that nothing has continued yet."""
        fitting = [sample for sample in candidates if _same_reasoning(sample, history)]
        fitting = [sample for sample in fitting if _same_white_space(sample, history)] or fitting
        free = [sample for sample in fitting if id(sample) not in self._continued]
        return next(iter(free or fitting), None)

    def episode(self, index: int, stop: StopReason, **fields: Any) -> Episode:
        """Return the episode of the complete calls; the last one gets `reward`, all of the episode's."""
        branches: list[Branch] = []
        positions: dict[int, int] = {}
        turns: list[Turn] = []
        turn_of: dict[int, int] = {}
        reward = fields.pop("reward", 0.0)
        for number, sample in enumerate(self.samples):
            generation, parent = sample.generation, sample.parent
            assert generation is not None
            if sample.opens or parent is None:
                positions[id(sample)] = len(branches)
                read = sample.tail if parent is None else sample.messages
                branches.append(Branch(prompt_ids=sample.prompt_ids(), prompt=transcript(read)))
            else:
                positions[id(sample)] = positions[id(parent)]
                before = turn_of[id(parent)]
                observed = {
                    "observation_ids": sample.appended_ids,
                    "observation": transcript(sample.tail),
                }
                turns[before] = turns[before].model_copy(update=observed)
            turn_of[id(sample)] = number
            turns.append(
                Turn(
                    output_ids=generation.ids,
                    logprobs=generation.logprobs,
                    spans=generation.spans,
                    reward=reward if number == len(self.samples) - 1 else 0.0,
                    text=sample.text,
                    branch=positions[id(sample)],
                    # An answer that nobody read has changed nothing: it is counted, and not trained.
                    trained=sample.trained and sample.delivered,
                )
            )
        first = branches[0] if branches else None
        return Episode(
            index=index,
            stop=stop,
            prompt_ids=first.prompt_ids if first else (),
            prompt=first.prompt if first else "",
            branches=tuple(branches[1:]),
            turns=tuple(turns),
            **fields,
        )


def transcript(messages: Sequence[ChatMessage]) -> str:
    """Return messages as text for people: one alone as it is, several with their roles."""
    if len(messages) == 1 and messages[0].role == "user":
        return messages[0].content
    lines: list[str] = []
    for message in messages:
        lines.append(f"[{message.role}] {message.content}")
        lines += [f"  {call.name}({call.arguments})" for call in message.calls]
    return "\n".join(lines)


def _continues(tail: Sequence[ChatMessage]) -> bool:
    """Return whether messages may follow a reply within its branch: if there are some, and no other reply."""
    return bool(tail) and all(message.role != "assistant" for message in tail)


def _same_reasoning(sample: SampledCall, history: Sequence[ChatMessage]) -> bool:
    """Return whether the reasoning that a history repeats is the one that was served."""
    repeated = ((reply.reasoning, said.reasoning) for reply, said in _replies(sample, history))
    return all(reasoning in ("", sampled) for sampled, reasoning in repeated)


def _same_white_space(sample: SampledCall, history: Sequence[ChatMessage]) -> bool:
    return all(reply.content == said.content for reply, said in _replies(sample, history))


def _replies(
    sample: SampledCall, history: Sequence[ChatMessage]
) -> Iterator[tuple[ChatMessage, ChatMessage]]:
    """Yield each reply of a branch up to a sample, with the message that repeats it."""
    last: SampledCall | None = sample
    while last is not None:
        assert last.reply is not None
        yield last.reply, history[len(last.messages)]
        last = last.parent


def _chains(messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Return the digests of the conversation's beginnings, from no message to all of them."""
    chains = [sha256(json.dumps(list(tools), sort_keys=True, default=str).encode()).digest()]
    for message in messages:
        chains.append(_link(chains[-1], message))
    return chains


def _link(chain: bytes, message: ChatMessage) -> bytes:
    # Clients trim what a model says.
    content = message.content.strip() if message.role == "assistant" else message.content
    return sha256(
        chain + json.dumps([message.role, content, spelled(message.calls)]).encode()
    ).digest()


def spelled(calls: Sequence[ToolCall]) -> list[tuple[str, str]]:
    """Return names and arguments as they are compared."""
    return [(call.name, canonical(call.arguments)) for call in calls]


def _number(text: str) -> float | int:
    """Return a number as JavaScript has it, where 1.0 is 1."""
    number = float(text)
    return int(number) if number.is_integer() else number


def canonical(arguments: str) -> str:
    """Return the one spelling of a call's arguments; those that are no JSON are spelled as they are."""
    try:
        return json.dumps(
            json.loads(arguments, parse_float=_number), sort_keys=True, separators=(",", ":")
        )
    except (ValueError, RecursionError):
        return arguments
