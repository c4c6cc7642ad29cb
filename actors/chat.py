"""Token-exact chat: messages become ids, and generated ids stay what they are (token exactness).

Place in the flow: Observation → **ids** → Generation. The template renders the contents themselves, since it may strip
them, escape them or leave out empty ones. Text of the template may name special tokens; a content never becomes one,
whatever it contains: an environment, a tool or a model's own words cannot end a turn.
"""

import re
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol

from horizonrl.actors.messages import ChatMessage, Disguise, Tools, as_template_reads
from horizonrl.common.errors import ConfigError
from horizonrl.envs.api import ToolCall

USER, ANSWER, SYSTEM = "⟦user⟧", "⟦answer⟧", "⟦system⟧"
"""Stand for contents where a conversation's shape is in question; no tokenizer gives them a meaning."""
CALL = ToolCall("probe", '{"place": "⟦argument⟧"}')
TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "⟦description⟧",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
SHAPES = (("user",), ("tool",), ("tool", "tool"), ("tool", "user"))
"""What may follow a generation, by role, as it is proven at start."""


class Chat(Protocol):
    """What a rollout needs: a conversation as ids that grows by what was generated and by what answers it."""

    @property
    def stop_ids(self) -> tuple[int, ...]: ...

    def open(self, system: str | None, observation: str) -> tuple[int, ...]: ...

    def delta(self, last_output_ids: Sequence[int], observation: str) -> tuple[int, ...]: ...

    def decode(self, output_ids: Sequence[int]) -> str: ...

    def encode_turn(self, text: str) -> tuple[int, ...]: ...


class Tokenizer(Protocol):
    """What chat needs of a `transformers` tokenizer."""

    chat_template: Any
    eos_token_id: Any
    added_tokens_decoder: Any

    def apply_chat_template(self, conversation: Any, /, **options: Any) -> Any: ...

    def encode(self, text: Any, /, **options: Any) -> Any: ...

    def get_vocab(self) -> Any: ...

    def decode(self, token_ids: Any, /, **options: Any) -> Any: ...


class ChatTemplate:
    """The chat template of a tokenizer, applied one turn at a time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raise ConfigError for a template that cannot be kept token-exact.

        One that cannot hold a conversation with tools is fine until tools are given: `tools_problem` says why.
        """
        if not tokenizer.chat_template:
            raise ConfigError("the tokenizer has no chat template: use an instruction-tuned model's directory")
        self.tokenizer = tokenizer
        self._special = {
            str(token): int(token_id) for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        self._disguise = Disguise(self._special)
        # An alternation takes its first match, so a token that begins another one must come after it.
        longest_first = sorted(self._special, key=len, reverse=True)
        # An empty pattern would match everywhere; `(?!)` matches nowhere.
        self._special_text = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._problem = lru_cache(self._problem_of)
        # Before the first ticket: a text that the tokenizer changes would be changed in every episode of the run.
        if problem := self._problem(("user",)) or self._system_problem():
            raise ConfigError(problem)
        self._check_round_trip()
        self.tools_problem = self._tools_problem()
        """Why this template cannot hold a conversation with tools; empty if it can."""

    @classmethod
    def load(cls, model_dir: Path) -> "ChatTemplate":
        """Read the tokenizer and the chat template of a Hugging Face directory."""
        from transformers import AutoTokenizer  # seconds of import that a template made of a tokenizer does not need

        tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
        return cls(tokenizer)

    def open(self, system: str | None, observation: str) -> tuple[int, ...]:
        """Return the rendering of the first prompt, up to and including the generation prompt."""
        first = () if system is None else (ChatMessage("system", system),)
        return self.render((*first, ChatMessage("user", observation)))

    def delta(self, last_output_ids: Sequence[int], observation: str) -> tuple[int, ...]:
        """Return the ids that follow a generation: its turn's end unless sampled, the observation, the next prompt."""
        return self.extend(last_output_ids, (ChatMessage("user", observation),))

    def render(self, messages: Sequence[ChatMessage], tools: Tools = ()) -> tuple[int, ...]:
        """Return a whole conversation, up to and including the generation prompt.

        Raises ConfigError for tools that the template cannot show, and for a conversation that it refuses.
        """
        # A template that ignores tools would let the policy guess at them.
        if tools and self.tools_problem:
            raise ConfigError(self.tools_problem)
        mark = self._disguise.mark_for((*messages, *tools))
        return self._encode(self._written(messages, tools, mark), mark)

    def extend(self, last_output_ids: Sequence[int], messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """Return the ids that follow a generation: its turn's end unless sampled, the messages, the next prompt.

        The messages are results of tools, a user's message, or both in this order. Raises ConfigError for others, and
        for a shape which the template does not simply append.
        """
        if problem := self._problem(tuple(message.role for message in messages)):
            raise ConfigError(problem)
        # The last generation is an argument, not a text to encode: sampled ids are never edited (token exactness).
        mark = self._disguise.mark_for(messages)
        text = self._written((ChatMessage("user", USER), ChatMessage("assistant", ANSWER), *messages), (), mark)
        # Cut out of a whole conversation: a template may render the last turn in another way than the ones before.
        ids = self._encode(text.partition(ANSWER)[2], mark)
        # Only a turn that max_tokens cut off lacks its end: a second end of turn would be another prompt.
        closed = self.end_of_turn is not None and tuple(last_output_ids[-1:]) == (self.end_of_turn,)
        return ids[1:] if closed else ids

    def exceeds(self, text: str, tokens: int) -> bool:
        """Return whether a text alone has more than so many tokens. Takes a second per megabyte; for another thread."""
        if len(text) > tokens * self._longest_token:
            return True
        # The tokenizer's own batch leaves Python's lock to the event loop; `encode` keeps it.
        fast = getattr(self.tokenizer, "backend_tokenizer", None)
        ids = self._encode_plain(text) if fast is None else fast.encode_batch([text], add_special_tokens=False)[0].ids
        return len(ids) > tokens

    @cached_property
    def _longest_token(self) -> int:
        """Characters, at most: the vocabulary spells each byte as a character or more."""
        return max(map(len, self.tokenizer.get_vocab()))

    def decode(self, output_ids: Sequence[int]) -> str:
        """Return the text that an environment reads: special tokens, such as the end of the turn, are left out."""
        return self._decode(output_ids, skip_special_tokens=True)

    def spell(self, output_ids: Sequence[int]) -> str:
        """Return the text of a generation with its special tokens, which a call may be written with, but its end."""
        ids = list(output_ids)
        while ids and ids[-1] in self.stop_ids:
            ids.pop()
        return self._decode(ids, skip_special_tokens=False)

    def encode_turn(self, text: str) -> tuple[int, ...]:
        """Return the ids of a turn that was written rather than sampled, with the end-of-turn token."""
        # With the token that a policy samples to end a turn: otherwise a demonstration would not teach when to stop.
        return self._encode_plain(text) + self.stop_ids[:1]

    def encode_reply(self, reply: ChatMessage) -> tuple[int, ...]:
        """Return the ids of an assistant's message as the template writes it, calls and all, with the end of turn."""
        mark = self._disguise.mark_for((reply,))
        user, results = ChatMessage("user", USER), stand_ins(("tool",) * len(reply.calls) or ("user",))
        prompt = self._written((user,), ())
        text = self._written((user, reply, *results), (), mark)
        tail = self._tail(tuple(message.role for message in results), (user,), ())
        if not text.startswith(prompt) or not text.endswith(tail):
            raise ConfigError("the chat template writes a reply in another way than it asks for one")
        return self._encode(text[len(prompt) : len(text) - len(tail)], mark) + self.stop_ids[:1]

    @cached_property
    def end_of_turn(self) -> int | None:
        """The token with which the template closes an assistant's turn, if it closes it with one."""
        match = self._special_text.match(self._tail(("user",), (ChatMessage("user", USER),), ()))
        return self._special[match.group()] if match else None

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end a generation: the end of the turn first, then the tokenizer's end of text."""
        ids = (self.end_of_turn, self.tokenizer.eos_token_id)
        return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))

    def _written(self, messages: Sequence[ChatMessage], tools: Tools, mark: str = "") -> str:
        """Return the template's text. Special tokens that contents spell are broken by the mark."""
        from jinja2 import TemplateError  # comes with the templates

        conversation = self._disguise.hide(as_template_reads(messages), mark)
        given = self._disguise.hide(list(tools), mark) or None
        try:
            text = self.tokenizer.apply_chat_template(
                conversation, tools=given, add_generation_prompt=True, tokenize=False
            )
        except (TemplateError, TypeError) as error:
            roles = ", ".join(message.role for message in messages[:8])
            raise ConfigError(f"the chat template refuses a conversation of {roles}: {error}") from None
        return str(text)

    def _encode(self, text: str, mark: str) -> tuple[int, ...]:
        """Encode the template's text with its special tokens, and everything else as plain text.

        Plain text between two special tokens is encoded in one go, as the tokenizer itself would do it: content and
        template may share a token ("\\n" and "\\n").
        """
        ids: list[int] = []
        start = 0
        for special in self._special_text.finditer(text):
            if mark and text[max(0, special.start() - 1) : special.start()] == mark:  # spelled by a content
                continue
            ids += self._encode_plain(text[start : special.start()].replace(mark, ""))
            ids.append(self._special[special.group()])
            start = special.end()
        return (*ids, *self._encode_plain(text[start:].replace(mark, "")))

    def _encode_plain(self, text: str) -> tuple[int, ...]:
        if not text:
            return ()
        # split_special_tokens keeps an observation with `<|im_end|>` in it from ending a turn. add_special_tokens would
        # put a beginning of text before every part; where one belongs, it is in the template's text.
        return tuple(self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        # The clean-up removes spaces before punctuation: the environment would read a text that was not sampled.
        return str(
            self.tokenizer.decode(
                list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    def _tail(self, shape: Sequence[str], before: Sequence[ChatMessage], tools: Tools) -> str:
        """Return what the template writes after an assistant's content. Raises ConfigError if it is not appended."""
        after = stand_ins(shape)
        whole = self._written((*before, ChatMessage("assistant", ANSWER), *after), tools)
        head, answered, tail = whole.partition(ANSWER)
        missing = ["assistant"] * (not answered) + [m.role for m in after if m.content not in tail]
        if missing:
            raise ConfigError(f"the chat template leaves out {missing[0]} messages: it cannot hold a conversation")
        prompt, last = self._written(before, tools), before[-1].content
        if not head.startswith(prompt[: prompt.rfind(last) + len(last)]):
            raise ConfigError(
                f"the chat template changes what it wrote before when {' and '.join(shape)} messages follow"
            )
        return tail

    def _problem_of(self, shape: tuple[str, ...]) -> str:
        """Return why messages of these roles cannot follow a generation; empty if they can.

        They can if what the template appends depends neither on the conversation so far, nor on its calls and tools.
        """
        if not re.fullmatch("(tool )*(user )?", "".join(f"{role} " for role in shape)) or not shape:
            return f"{' and '.join(shape) or 'no'} messages cannot follow a reply: give tools' results, then a user's"
        user, answer, called = (
            ChatMessage("user", USER),
            ChatMessage("assistant", "⟦earlier⟧"),
            ChatMessage("tool", "⟦result⟧"),
        )
        with_calls = ChatMessage("assistant", "⟦earlier⟧", (CALL,))
        histories: list[tuple[tuple[ChatMessage, ...], Tools]] = [((user,), ()), ((user, answer, user), ())]
        if "tool" in shape:
            histories += [((user,), (TOOL,)), ((user, with_calls, called), (TOOL,))]
        try:
            tails = {self._tail(shape, *history) for history in histories}
            if len(tails) > 1:
                return f"what the chat template appends for {' and '.join(shape)} messages depends on what came before"
            if "tool" in shape and not self._written_with_calls(shape).endswith(tails.pop()):
                return f"what the chat template appends for {' and '.join(shape)} messages depends on the calls"
        except ConfigError as error:
            return str(error)
        return ""

    def _written_with_calls(self, shape: Sequence[str]) -> str:
        user, results = ChatMessage("user", USER), stand_ins(shape)
        try:
            calling = ChatMessage("assistant", ANSWER, (CALL,) * shape.count("tool"))
            return self._written((user, calling, *results), (TOOL,))
        except ConfigError:  # a template of one call a turn, whose policy may write two all the same
            return self._written((user, ChatMessage("assistant", ANSWER, (CALL,)), *results), (TOOL,))

    def _system_problem(self) -> str:
        messages = (ChatMessage("system", SYSTEM), ChatMessage("user", USER))
        try:
            lost = SYSTEM not in self._written(messages, ())
        except ConfigError:  # it says so itself when one is given
            return ""
        return "the chat template leaves out system messages: it cannot hold a conversation" if lost else ""

    def _tools_problem(self) -> str:
        user, calling = ChatMessage("user", USER), ChatMessage("assistant", ANSWER, (CALL,))
        try:
            text = self._written((user, calling, ChatMessage("tool", "⟦result⟧")), (TOOL,))
            if "⟦description⟧" not in text:
                return "the chat template shows no tools: take a model whose template does, or another action format"
            if "⟦argument⟧" not in text:
                return "the chat template leaves out the calls of tools: it cannot hold a conversation with them"
            if self._tail(("user",), (user,), (TOOL,)) != self._tail(("user",), (user,), ()):
                return "what the chat template appends for a user's message depends on the tools"
        except ConfigError as error:
            return str(error)
        return next(filter(None, map(self._problem, SHAPES)), "")

    def _check_round_trip(self) -> None:
        """Raise ConfigError if encoding by parts does not reproduce the template's text."""
        conversation = (ChatMessage("user", "Hello, world."),)
        meant = self._written(conversation, ())
        written = self._decode(self.render(conversation), skip_special_tokens=False)
        if written != meant:
            raise ConfigError(f"this tokenizer does not keep its chat template's text: {meant!r} became {written!r}")


def stand_ins(shape: Sequence[str]) -> tuple[ChatMessage, ...]:
    """Return messages of these roles, each with a content of its own."""
    return tuple(ChatMessage("tool" if role == "tool" else "user", f"⟦{place}⟧") for place, role in enumerate(shape))
