"""Token-exact chat: messages become ids, and generated ids stay what they are (token exactness).

Place in the flow: Observation → **ids** → Generation. The template renders the contents themselves, since it may strip
them, escape them or leave out empty ones. Text of the template may name special tokens; a content never becomes one,
whatever it contains: an environment, a tool or a model's own words cannot end a turn. The markers of roles are special
here, also where the tokenizer does not say so.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol

from horizonrl.actors.chat.messages import (
    THINK,
    THOUGHT,
    ChatMessage,
    Disguise,
    Tools,
    as_template_reads,
)
from horizonrl.common.errors import ConfigError
from horizonrl.common.model_dir import model_config
from horizonrl.envs.api import ToolCall

USER, ANSWER, SYSTEM = "⟦user⟧", "⟦answer⟧", "⟦system⟧"
"""Stand for contents where a conversation's shape is in question; no tokenizer gives them a meaning."""
CALL = ToolCall("probe", '{"place": "⟦argument⟧"}')
TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "⟦description⟧",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}},
            "required": ["place"],
        },
    },
}
SPACE = r"[^\S\x1c-\x1f]*"
"""White space as tokenizers know it."""
SHAPES = (("user",), ("tool",), ("tool", "tool"))
"""What follows a generation where an environment is played with tools, by role, as it is proven at start."""


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

    def __init__(self, tokenizer: Tokenizer, end_ids: Sequence[int] = ()) -> None:
        """Raise ConfigError for a template that cannot be kept token-exact.

        `end_ids` end a generation too. A template that cannot hold a conversation with tools is fine until tools are
        given: `tools_problem` says why.
        """
        if not tokenizer.chat_template:
            raise ConfigError(
                "the tokenizer has no chat template: use an instruction-tuned model's directory"
            )
        self.tokenizer = tokenizer
        self._end_ids = tuple(end_ids)
        # The template's own text shows what is to be hidden.
        self._disguise = self._tool_disguise = Disguise(())
        talk, tool_use = self._own_tokens()
        self._own = talk | tool_use
        tokens = tokenizer.added_tokens_decoder.items()
        self._special = {
            str(token): int(token_id)
            for token_id, token in tokens
            if token.special or str(token) in talk | tool_use
        }
        special = {str(token) for _, token in tokens if token.special}
        self._disguise, self._tool_disguise = Disguise(special | talk), Disguise(self._special)
        self._inside, self._inside_turn = (
            _inside(self._special.keys() - special),
            _inside(talk - special),
        )
        self._special_text = _as_written(
            {str(token): token for _, token in tokens if str(token) in self._special}
        )
        self._problem = lru_cache(self._find_problem)
        # Before the first ticket: a text that the tokenizer changes would be changed in every episode of the run.
        if problem := self._problem(("user",)) or self._system_problem():
            raise ConfigError(problem)
        self._check_parts()
        self.tools_problem = self._tools_problem()
        """Why this template cannot hold a conversation with tools; empty if it can."""

    @classmethod
    def load(cls, model_dir: Path) -> "ChatTemplate":
        """Read the tokenizer and the chat template of a Hugging Face directory."""
        chat = cls(_load_tokenizer(model_dir), end_ids_of(model_dir))
        if (model_dir / "config.json").is_file():
            chat.check_vocabulary(model_config(model_dir))
        return chat

    def check_vocabulary(self, config: Mapping[str, Any]) -> None:
        """Raise ConfigError if a conversation may have tokens that the model of this configuration does not know."""
        text = config.get("text_config")
        size = config.get("vocab_size") or (
            text.get("vocab_size") if isinstance(text, dict) else None
        )
        # No content becomes a special token, so one that the template does not write is never used: Gemma 3 has one
        # for images beyond the embedding of its text models.
        special = {
            str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special
        }
        unused = special - self._own
        beyond = [
            (token_id, token)
            for token, token_id in self.tokenizer.get_vocab().items()
            if size and token_id >= size and (token not in unused or token_id in self.stop_ids)
        ]
        if beyond:
            token_id, token = min(beyond)
            raise ConfigError(
                f"the tokenizer has {len(beyond)} tokens that the model does not know, such as {token!r} with id "
                f"{token_id}, while config.json says vocab_size = {size}: take the model's own tokenizer, or resize "
                "the embedding (resize_token_embeddings) and train it"
            )

    def open(self, system: str | None, observation: str) -> tuple[int, ...]:
        """Return the rendering of the first prompt, up to and including the generation prompt."""
        user = ChatMessage("user", observation)
        if system is None:
            return self.render((user,))
        try:
            return self.render((ChatMessage("system", system), user))
        except ConfigError as error:
            raise ConfigError(
                f"rollout.system_prompt cannot be given to this model: {error}"
            ) from None

    def delta(self, last_output_ids: Sequence[int], observation: str) -> tuple[int, ...]:
        """Return the ids that follow a generation: its turn's end unless sampled, the observation, the next prompt."""
        return self.extend(last_output_ids, (ChatMessage("user", observation),))

    def render(self, messages: Sequence[ChatMessage], tools: Tools = ()) -> tuple[int, ...]:
        """Return a whole conversation, up to and including the generation prompt.

        Raises ConfigError for tools that the template cannot show, and for a conversation that it refuses.
        """
        return self._encode(*self._mark(messages, tools))

    def extend(
        self, last_output_ids: Sequence[int], messages: Sequence[ChatMessage]
    ) -> tuple[int, ...]:
        """Return the ids that follow a generation: its turn's end unless sampled, the messages, the next prompt.

        The messages are results of tools, then those of users and the system. Raises ConfigError for others, and for a
        shape which the template does not simply append.
        """
        if problem := self._problem(tuple(message.role for message in messages)):
            raise ConfigError(problem)
        # The last generation is an argument, not a text to encode: sampled ids are never edited (token exactness).
        mark = self._disguise.mark_for(messages)
        text = self._write(
            (ChatMessage("user", USER), ChatMessage("assistant", ANSWER), *messages), (), mark
        )
        # Cut out of a whole conversation: a template may render the last turn in another way than the ones before.
        tail = text.partition(ANSWER)[2]
        last = tuple(last_output_ids[-1:])
        if last and set(last) <= set(self.stop_ids):
            # Only a turn that max_tokens cut off lacks its end: a second end of turn would be another prompt. The
            # space that Llama 2's template writes before it is the policy's to sample, too.
            ids = self._encode(tail.lstrip(), mark)
            if ids[:1] == last:
                return ids[1:]
        return self._encode(tail, mark)

    def overflows(self, messages: Sequence[ChatMessage], tools: Tools, tokens: int) -> bool:
        """Return whether a whole conversation has more than so many tokens. For another thread, as `exceeds` is.

        Raises ConfigError as `render` does.
        """
        if self.exceeds("\n".join(message.content for message in messages), tokens):
            return True
        text, mark = self._mark(messages, tools)
        return self.exceeds(text.replace(mark, ""), tokens)

    def exceeds(self, text: str, tokens: int) -> bool:
        """Return whether a text alone has more than so many tokens. Takes a second per megabyte; for another thread."""
        if len(text) > tokens * self._longest_token:
            return True
        # The tokenizer's own batch leaves Python's lock to the event loop; `encode` keeps it.
        fast = getattr(self.tokenizer, "backend_tokenizer", None)
        ids = (
            self._encode_plain(text)
            if fast is None
            else fast.encode_batch([text], add_special_tokens=False)[0].ids
        )
        return len(ids) > tokens

    @cached_property
    def _longest_token(self) -> int:
        """Characters, at most: the vocabulary spells each byte as a character or more."""
        return max(map(len, self.tokenizer.get_vocab()))

    def decode(self, output_ids: Sequence[int]) -> str:
        """Return the text that an environment reads: the end of the turn and other special tokens are left out."""
        return self._decode(self._without_end(output_ids), skip_special_tokens=True)

    def spell(self, output_ids: Sequence[int]) -> str:
        """Return the text of a generation with its special tokens, which a call may be written with, but its end."""
        return self._decode(self._without_end(output_ids), skip_special_tokens=False)

    def _without_end(self, output_ids: Sequence[int]) -> list[int]:
        ids = list(output_ids)
        while ids and ids[-1] in self.stop_ids:
            ids.pop()
        return ids

    def encode_turn(self, text: str) -> tuple[int, ...]:
        """Return the ids of a turn that was written rather than sampled, with the end-of-turn token."""
        # With the token that a policy samples to end a turn: otherwise a demonstration would not teach when to stop.
        return self._encode_plain(text, self._inside_turn) + self.stop_ids[:1]

    def encode_reply(self, reply: ChatMessage) -> tuple[int, ...]:
        """Return the ids of an assistant's message as the template writes it, calls and all, with the end of turn."""
        mark = self._disguise.mark_for((reply,))
        user, results = (
            ChatMessage("user", USER),
            stand_ins(("tool",) * len(reply.calls) or ("user",)),
        )
        prompt = self._write((user,), ())
        text = self._write((user, reply, *results), (), mark)
        tail = self._tail(tuple(message.role for message in results), (user,), ())
        if not text.startswith(prompt) or not text.endswith(tail):
            raise ConfigError(
                "the chat template writes a reply in another way than it asks for one"
            )
        # Where a role's marker ends the turn before it, that of results ends one with calls.
        end = self._first_special(tail)
        ids = self._encode(text[len(prompt) : len(text) - len(tail)], mark)
        return (*ids, end) if end is not None and end in self.stop_ids else ids + self.stop_ids[:1]

    @cached_property
    def thought(self) -> str:
        """The tag of a thought that the generation prompt has begun; a reply goes on inside it. Else empty."""
        # A closing tag that is a special token is missing from decoded text, where everything would be a thought.
        prompt = self._write((ChatMessage("user", USER),), ())
        return THINK if prompt.rstrip().endswith(THINK) and THOUGHT not in self._special else ""

    @cached_property
    def end_of_turn(self) -> int | None:
        """The token with which the template closes an assistant's turn, if it closes it with one."""
        return self._first_special(self._tail(("user",), (ChatMessage("user", USER),), ()))

    def _first_special(self, text: str) -> int | None:
        match = self._special_text.match(text)
        return self._special[match[match.lastindex or 0]] if match else None

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end a generation: the end of the turn first, then the tokenizer's and the model's own."""
        ids = (self.end_of_turn, self.tokenizer.eos_token_id, *self._end_ids)
        return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))

    def _mark(self, messages: Sequence[ChatMessage], tools: Tools) -> tuple[str, str]:
        """Return the template's text of a whole conversation, and the mark that breaks what its contents spell."""
        # A template that ignores tools would let the policy guess at them.
        if tools and self.tools_problem:
            raise ConfigError(self.tools_problem)
        mark = self._disguise.mark_for((*messages, *tools))
        return self._write(messages, tools, mark), mark

    def _write(self, messages: Sequence[ChatMessage], tools: Tools, mark: str = "") -> str:
        """Return the template's text. Special tokens that contents spell are broken by the mark."""
        from jinja2 import TemplateError  # comes with the templates

        conversation = [
            (self._tool_disguise if entry["role"] == "tool" else self._disguise).hide(entry, mark)
            for entry in as_template_reads(messages)
        ]
        shown_tools = self._tool_disguise.hide(list(tools), mark) or None
        try:
            text = self.tokenizer.apply_chat_template(
                conversation, tools=shown_tools, add_generation_prompt=True, tokenize=False
            )
        except (TemplateError, TypeError) as error:
            roles = ", ".join(message.role for message in messages[:8])
            raise ConfigError(
                f"the chat template refuses a conversation of {roles}: {error}"
            ) from None
        return str(text)

    def _encode(self, text: str, mark: str) -> tuple[int, ...]:
        """Encode the template's text with its special tokens, and everything else as plain text.

        Plain text between two special tokens is encoded in one go, as the tokenizer itself would do it: content and
        template may share a token ("\\n" and "\\n").
        """
        ids: list[int] = []
        start = 0
        for special in self._special_text.finditer(text):
            token = special.lastindex or 0
            begin = special.start(token)
            if mark and text[max(0, begin - 1) : begin] == mark:  # spelled by a content
                continue
            ids += self._encode_plain(text[start : special.start()].replace(mark, ""))
            ids.append(self._special[special[token]])
            start = special.end()
        return (*ids, *self._encode_plain(text[start:].replace(mark, "")))

    def _encode_plain(self, text: str, inside: re.Pattern[str] | None = None) -> tuple[int, ...]:
        # split_special_tokens keeps an observation with `<|im_end|>` in it from ending a turn. Tokens that a tokenizer
        # does not call special need a cut. add_special_tokens would put a beginning of text before every part; where
        # one belongs, it is in the template's text.
        return tuple(
            token_id
            for part in (inside or self._inside).split(text)
            if part
            for token_id in self.tokenizer.encode(
                part, add_special_tokens=False, split_special_tokens=True
            )
        )

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        # The clean-up removes spaces before punctuation: the environment would read a text that was not sampled.
        return str(
            self.tokenizer.decode(
                list(ids),
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        )

    def _own_tokens(self) -> tuple[set[str], set[str]]:
        """Return the tokens that the template itself writes in a conversation, and those in one with tools.

        The former are the markers of roles, which not every tokenizer calls special: no content writes them. The latter
        may be tags such as `<tool_call>`: no tool writes them, but a program that explains tools in its own words does,
        and so does a demonstration. What a policy thinks between is neither.
        """
        user, answer = ChatMessage("user", USER), ChatMessage("assistant", ANSWER)
        calling = ChatMessage("assistant", ANSWER, (CALL,))
        system, result = ChatMessage("system", SYSTEM), ChatMessage("tool", "⟦result⟧")
        # Some tokenizers have white space as such tokens, which every content may write.
        tokens = {str(token) for token in self.tokenizer.added_tokens_decoder.values()}
        tokens = {token for token in tokens if len(token.strip()) > 1} - {THINK, THOUGHT}

        def named(*messages: ChatMessage, tools: Tools = ()) -> set[str]:
            try:
                text = self._write(messages, tools)
            except ConfigError:  # what it refuses is never rendered
                return set()
            return {token for token in tokens if token in text}

        return named(system, user) | named(user, answer, user), named(
            user, calling, result, tools=(TOOL,)
        )

    def _tail(self, shape: Sequence[str], before: Sequence[ChatMessage], tools: Tools) -> str:
        """Return what the template writes after an assistant's content. Raises ConfigError if it is not appended."""
        after = stand_ins(shape)
        whole = self._write((*before, ChatMessage("assistant", ANSWER), *after), tools)
        head, answered, tail = whole.partition(ANSWER)
        missing = ["assistant"] * (not answered) + [m.role for m in after if m.content not in tail]
        if missing:
            raise ConfigError(
                f"the chat template leaves out {missing[0]} messages: it cannot hold a conversation"
            )
        prompt, last = self._write(before, tools), before[-1].content
        if not head.startswith(prompt[: prompt.rfind(last) + len(last)]):
            raise ConfigError(
                f"the chat template changes what it wrote before when {' and '.join(shape)} messages follow"
            )
        return tail

    def _find_problem(self, shape: tuple[str, ...]) -> str:
        """Return why messages of these roles cannot follow a generation; empty if they can.

        They can if what the template appends depends neither on the conversation so far, nor on its calls and tools.
        """
        if (
            not re.fullmatch("(tool )*((user|system) )*", "".join(f"{role} " for role in shape))
            or not shape
        ):
            return f"{' and '.join(shape) or 'no'} messages cannot follow a reply: give tools' results, then a user's"
        user, answer, called = (
            ChatMessage("user", USER),
            ChatMessage("assistant", "⟦earlier⟧"),
            ChatMessage("tool", "⟦result⟧"),
        )
        with_calls = ChatMessage("assistant", "⟦earlier⟧", (CALL,))
        histories: list[tuple[tuple[ChatMessage, ...], Tools]] = [
            ((user,), ()),
            ((user, answer, user), ()),
        ]
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
            return self._write((user, calling, *results), (TOOL,))
        except ConfigError:
            # A template of one call a turn, whose policy may write two all the same.
            return self._write((user, ChatMessage("assistant", ANSWER, (CALL,)), *results), (TOOL,))

    def _system_problem(self) -> str:
        messages = (ChatMessage("system", SYSTEM), ChatMessage("user", USER))
        try:
            lost = SYSTEM not in self._write(messages, ())
        except ConfigError:  # it says so itself when one is given
            return ""
        return (
            "the chat template leaves out system messages: it cannot hold a conversation"
            if lost
            else ""
        )

    def _tools_problem(self) -> str:
        user, calling = ChatMessage("user", USER), ChatMessage("assistant", ANSWER, (CALL,))
        try:
            text = self._write((user, calling, ChatMessage("tool", "⟦result⟧")), (TOOL,))
            if "⟦description⟧" not in text:
                return "the chat template shows no tools: take a model whose template does, or another action format"
            if "⟦argument⟧" not in text:
                return "the chat template leaves out the calls of tools: it cannot hold a conversation with them"
            if self._tail(("user",), (user,), (TOOL,)) != self._tail(("user",), (user,), ()):
                return "what the chat template appends for a user's message depends on the tools"
        except ConfigError as error:
            return str(error)
        return next(filter(None, map(self._problem, SHAPES)), "")

    def _check_parts(self) -> None:
        """Raise ConfigError if encoding by parts does not give the ids that the tokenizer gives the whole text."""
        conversation = (ChatMessage("user", "Hello, world."),)
        ours = list(self.render(conversation))
        # Ids and not texts: where a decoder writes a space after a special token (Llama 2), the ids are right.
        theirs = self.tokenizer.apply_chat_template(
            as_template_reads(conversation),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
        if ours != list(theirs):
            raise ConfigError(
                "this tokenizer encodes a text between special tokens in another way than the same text by itself: "
                f"{self._write(conversation, ())!r} became {self._decode(ours, skip_special_tokens=False)!r}"
            )


def end_ids_of(model_dir: Path) -> tuple[int, ...]:
    """Return the ids with which a model's own generation settings end a reply."""
    file = model_dir / "generation_config.json"
    ids = (
        json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
    )
    return () if ids is None else tuple(ids) if isinstance(ids, list) else (ids,)


def _as_written(tokens: Mapping[str, Any]) -> re.Pattern[str]:
    """Return a pattern that matches each of these tokens, its last group, with the white space that it takes along.

    Phi-3's tokenizer drops what follows `<|user|>`, although its template writes a line break there.
    """
    # An alternation takes its first match, so a token that begins another one must come after it.
    longest_first = sorted(tokens.items(), key=lambda item: len(item[0]), reverse=True)
    forms = (
        f"{SPACE if token.lstrip else ''}({re.escape(text)}){SPACE if token.rstrip else ''}"
        for text, token in longest_first
    )
    # An empty pattern would match everywhere; `(?!)` matches nowhere.
    return re.compile("|".join(forms) or "(?!)")


def _inside(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches after the first character of each of these tokens, where a cut breaks it."""
    # An empty pattern would match everywhere; `(?!)` matches nowhere.
    cuts = (f"(?<={re.escape(token[0])})(?={re.escape(token[1:])})" for token in tokens)
    return re.compile("|".join(cuts) or "(?!)")


def stand_ins(shape: Sequence[str]) -> tuple[ChatMessage, ...]:
    """Return messages of these roles, each with a content of its own."""
    return tuple(ChatMessage(role, f"⟦{index}⟧") for index, role in enumerate(shape))  # type: ignore[arg-type]


def _load_tokenizer(model_dir: Path) -> Any:
    """Return what transformers' `AutoTokenizer` makes of a directory."""
    # Imports here: a template that is made of a tokenizer needs none of them.
    if _names_plain_tokenizer(model_dir):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(model_dir)
    from transformers import AutoTokenizer

    # Beside a tekken.json, transformers would take Mistral's own tokenizer, which has no chat template.
    return AutoTokenizer.from_pretrained(model_dir, mistral_format=False)


def _names_plain_tokenizer(model_dir: Path) -> bool:
    """Return whether this is a Llama whose tokenizer has no class of its own, as in the models that we make.

    For it `AutoTokenizer` has no exceptions; and its import takes seconds, since it imports torch too.
    """
    written = model_dir / "tokenizer_config.json"
    if not (model_dir / "config.json").is_file() or not written.is_file():
        return False
    tokenizer = json.loads(written.read_text(encoding="utf-8"))
    return (
        model_config(model_dir).get("model_type") == "llama"
        and tokenizer.get("tokenizer_class") in ("PreTrainedTokenizerFast", "TokenizersBackend")
        and "auto_map" not in tokenizer
    )
