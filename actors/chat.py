"""Token-exact chat: observations become ids, and generated ids stay what they are (token exactness).

Place in the flow: Observation → **ids** → Generation. The template is rendered around sentinels, once; what a
conversation appends is then assembled from the template's own text and the observation. Text of the template may name
special tokens; text of an observation never becomes one, whatever it contains: an environment cannot end a turn.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from horizonrl.common.errors import ConfigError

SYSTEM, USER, ASSISTANT, NEXT = "⟦system⟧", "⟦user⟧", "⟦assistant⟧", "⟦next⟧"
"""Stand for the messages' contents while the template is rendered; no tokenizer gives them a meaning."""
PADDING = "  "
"""Put around a sentinel to see whether the template strips that content."""


class Chat(Protocol):
    """What a rollout needs: a conversation as ids that grows by what was generated and by observations."""

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

    def decode(self, token_ids: Any, /, **options: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class Place:
    """Where a message's content goes, and what the template strips from it."""

    name: str
    strip_left: bool
    strip_right: bool

    def fit(self, content: str) -> str:
        content = content.lstrip() if self.strip_left else content
        return content.rstrip() if self.strip_right else content


Part = str | Place
"""The template's own text, or the place of a content."""


class ChatTemplate:
    """The chat template of a tokenizer, applied one turn at a time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Render the template around sentinels. Raises ConfigError for a template that cannot be kept token-exact."""
        if not tokenizer.chat_template:
            raise ConfigError("the tokenizer has no chat template: use an instruction-tuned model's directory")
        self._tokenizer = tokenizer
        self._special = {
            str(token): int(token_id) for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        # An alternation takes its first match, so a token that begins another one must come after it.
        longest_first = sorted(self._special, key=len, reverse=True)
        # An empty pattern would match everywhere; `(?!)` matches nowhere.
        self._special_text = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        # Two renderings, because a template may add a system message of its own where none is given.
        self._open = self._render([("user", USER)])
        self._open_with_system = self._render([("system", SYSTEM), ("user", USER)])
        conversation = self._render([("user", USER), ("assistant", ASSISTANT), ("user", NEXT)])
        # Cut out of a whole conversation: a template may render the last turn in another way than the ones before.
        self._tail = conversation[1 + _place_of(ASSISTANT, conversation) :]
        # Before the first ticket: a text that the tokenizer changes would be changed in every episode of the run.
        self._check_round_trip()

    @classmethod
    def load(cls, model_dir: Path) -> "ChatTemplate":
        """Read the tokenizer and the chat template of a Hugging Face directory."""
        from transformers import AutoTokenizer  # seconds of import that a template made of a tokenizer does not need

        tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
        return cls(tokenizer)

    def open(self, system: str | None, observation: str) -> tuple[int, ...]:
        """Return the rendering of the first prompt, up to and including the generation prompt."""
        if system is None:
            return self._encode(self._open, {USER: observation})
        return self._encode(self._open_with_system, {SYSTEM: system, USER: observation})

    def delta(self, last_output_ids: Sequence[int], observation: str) -> tuple[int, ...]:
        """Return the ids that follow a generation: its turn's end unless sampled, the observation, the next prompt."""
        # The last generation is an argument, not a text to encode: sampled ids are never edited (token exactness).
        ids = self._encode(self._tail, {NEXT: observation})
        # Only a turn that max_tokens cut off lacks its end: a second end of turn would be another prompt.
        closed = self.end_of_turn is not None and tuple(last_output_ids[-1:]) == (self.end_of_turn,)
        return ids[1:] if closed else ids

    def decode(self, output_ids: Sequence[int]) -> str:
        """Return the text that an environment reads: special tokens, such as the end of the turn, are left out."""
        return self._decode(output_ids, skip_special_tokens=True)

    def encode_turn(self, text: str) -> tuple[int, ...]:
        """Return the ids of a turn that was written rather than sampled, with the end-of-turn token."""
        # With the token that a policy samples to end a turn: otherwise a demonstration would not teach when to stop.
        return self._encode_plain(text) + self.stop_ids[:1]

    @cached_property
    def end_of_turn(self) -> int | None:
        """The token with which the template closes an assistant's turn, if it closes it with one."""
        first = self._tail[0]
        match = self._special_text.match(first) if isinstance(first, str) else None
        return self._special[match.group()] if match else None

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end a generation: the end of the turn first, then the tokenizer's end of text."""
        ids = (self.end_of_turn, self._tokenizer.eos_token_id)
        return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))

    def _render(self, messages: Sequence[tuple[str, str]]) -> list[Part]:
        """Render messages whose contents are sentinels, and cut the text at these."""
        # Templates strip contents without saying so. If the padding is gone, `Place.fit` strips observations alike.
        conversation = [{"role": role, "content": PADDING + content + PADDING} for role, content in messages]
        text = self._tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        parts: list[Part] = []
        for _, sentinel in messages:
            before, found, text = text.partition(sentinel)
            if not found:
                raise ConfigError(
                    f"the chat template leaves out {sentinel[1:-1]} messages: it cannot hold a conversation"
                )
            kept_left, kept_right = before.endswith(PADDING), text.startswith(PADDING)
            parts += [before.removesuffix(PADDING), Place(sentinel, not kept_left, not kept_right)]
            text = text.removeprefix(PADDING)
        return [*parts, text]

    def _encode(self, parts: Sequence[Part], contents: Mapping[str, str]) -> tuple[int, ...]:
        """Encode the template's text with its special tokens, and contents as plain text.

        Plain text between two special tokens is encoded in one go, as the tokenizer itself would do it: content and
        template may share a token ("\\n" and "\\n").
        """
        ids: list[int] = []
        plain = ""
        for part in parts:
            if isinstance(part, Place):
                plain += part.fit(contents[part.name])
                continue
            # Special tokens are looked for in the template's text alone, never in a content.
            start = 0
            for special in self._special_text.finditer(part):
                ids += self._encode_plain(plain + part[start : special.start()])
                ids.append(self._special[special.group()])
                plain, start = "", special.end()
            plain += part[start:]
        return (*ids, *self._encode_plain(plain))

    def _encode_plain(self, text: str) -> tuple[int, ...]:
        if not text:
            return ()
        # split_special_tokens keeps an observation with `<|im_end|>` in it from ending a turn. add_special_tokens would
        # put a beginning of text before every part; where one belongs, it is in the template's text.
        return tuple(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        # The clean-up removes spaces before punctuation: the environment would read a text that was not sampled.
        return str(
            self._tokenizer.decode(
                list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    def _check_round_trip(self) -> None:
        """Raise ConfigError if encoding by parts does not reproduce the template's text."""
        written = self._decode(self.open("Be brief.", "Hello, world."), skip_special_tokens=False)
        conversation = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello, world."}]
        meant = self._tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        if written != meant:
            raise ConfigError(f"this tokenizer does not keep its chat template's text: {meant!r} became {written!r}")


def _place_of(name: str, parts: Sequence[Part]) -> int:
    return next(index for index, part in enumerate(parts) if isinstance(part, Place) and part.name == name)
