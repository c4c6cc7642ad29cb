"""The text of each generated token, as far as the run's tokenizer is at hand.

A token may be a part of a character. Such ones are decoded together, the text stands with the last of them, and the
ones before it have none. What does not join to the text that the run has written is not used: another tokenizer.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

UNFINISHED = "\ufffd"
"""What a part of a character decodes to."""


class Pieces(NamedTuple):
    texts: list[str]
    """One a token, in order."""
    special: list[int]
    """Places of the tokens that are no text, such as the end of a turn."""


class TokenTexts:
    """The tokenizer of a model directory."""

    def __init__(self, model_dir: Path) -> None:
        from tokenizers import Tokenizer  # torch stays out: the light core may write a report

        self._tokenizer: Any = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        self._known: dict[int, str] = {}

    @classmethod
    def find(cls, model_dir: Path) -> "TokenTexts | None":
        """Return the tokenizer of a directory; None without the file or without the package that reads it."""
        try:
            return cls(model_dir) if (model_dir / "tokenizer.json").is_file() else None
        except ImportError:
            return None

    def pieces(self, ids: Sequence[int], text: str) -> Pieces | None:
        """Part a turn into its tokens' texts; None when the tokens do not join to `text`, the turn as recorded."""
        special = [index for index, token in enumerate(ids) if token in self._special]
        # Token by token first, since that is cached. Only a character of several tokens, or a tokenizer whose text
        # depends on the token before, needs the slow way.
        for texts in ([self._text(token) for token in ids], self._in_order(ids)):
            if "".join(part for index, part in enumerate(texts) if index not in special) == text:
                return Pieces(texts, special)
        return None

    def _text(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._decode([token])
        return self._known[token]

    def _in_order(self, ids: Sequence[int]) -> list[str]:
        """Decode each token after the one before it, and parts of a character together."""
        texts: list[str] = []
        # Where the last whole piece begins, and the one that is being put together.
        before, start = (0, 0)
        for end in range(1, len(ids) + 1):
            # Together with the piece before it: some tokenizers drop the space with which a text begins.
            piece = self._decode(ids[before:end]).removeprefix(self._decode(ids[before:start]))
            # At the end no token follows that could complete the character.
            if end < len(ids) and piece.endswith(UNFINISHED):
                texts.append("")
                continue
            texts.append(piece)
            before, start = start, end
        return texts

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    @cached_property
    def _special(self) -> frozenset[int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)
