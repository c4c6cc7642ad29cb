"""What a task is, and how it is judged: by the answer that `stop` gives and by what is left on the servers."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from horizonrl.envs.worlds.webnav.world import World

_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_SPARE_CHARS = 60
"""How much longer than what it must include an answer may be, so that a whole page is none."""


@dataclass(frozen=True, slots=True)
class Type:
    """Fill the textbox of this name; with `enter`, press Enter after it."""

    name: str
    text: str
    enter: bool = False


@dataclass(frozen=True, slots=True)
class Home:
    """Go to the page that lists the sites."""


Plan = tuple[str | Type | Home, ...]
"""A text is the name of what is clicked."""


@dataclass(frozen=True, slots=True)
class Answer:
    kind: Literal["exact", "must_include", "number"]
    value: str
    rivals: tuple[str, ...] = ()
    """What else one could answer: an answer that must include the value may include none of these beside it."""

    def accepts(self, answer: str) -> bool:
        """Say whether an answer is right; capitals, quotes and thousands' commas do not matter."""
        plain, value = _plain(answer), _plain(self.value)
        match self.kind:
            case "exact":
                return plain == value
            case "must_include":
                return len(plain) <= len(value) + _SPARE_CHARS and self._named(plain) == {value}
            case "number":
                numbers = dict.fromkeys(
                    float(number) for number in _NUMBER.findall(answer.replace(",", ""))
                )
                return list(numbers) == [float(self.value)]

    def _named(self, plain: str) -> set[str]:
        """Return which of the value and its rivals a text names as whole words; the longest counts, not its parts."""
        names = sorted({_plain(name) for name in (self.value, *self.rivals)}, key=len, reverse=True)
        return set(re.findall(rf"(?<!\S)(?:{'|'.join(map(re.escape, names))})(?!\S)", plain))


@dataclass(frozen=True, slots=True)
class Task:
    intent: str
    plan: Plan
    """What leads there from the task's first page."""
    answer: Answer | None = None
    effect: Callable[[World], object] | None = None
    """Does to a fresh world what the agent shall do to the one that it is given."""


def _plain(words: str) -> str:
    return " ".join(re.sub(r"[^\w:@.-]+", " ", words.lower()).split()).strip(".")
