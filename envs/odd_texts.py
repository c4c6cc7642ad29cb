"""Replies that no agent should write, but some will. `envs check` and the fuzz tests send them to every environment."""

import json
import re
from collections.abc import Iterator, Sequence
from random import Random

from horizonrl.envs.api import ToolCall, Tools

_QUOTED = re.compile(r"\"[^\"\n]*\"|'[^'\n]*'")
_DIGITS = re.compile(r"\d+")
LITERALS = (
    "9" * 5_000, "-" + "9" * 5_000, "0x" + "f" * 5_000, "1e999", "-1e999", "NaN", "Infinity", "1_0", "٣", "--1",
    '"\\ud800"', '"\\udfff\\ud800"', '"\\u0000"', "'\\ud800'", "b'x'", "1+2j", "true", "None", "null", "()", "[[]]",
    "[" * 3_000, "{" * 3_000, '{"a": 1}', '"x" * 10**9', '"' + "x" * 30_000 + '"', '"', "'", "\\", '"""',
)  # fmt: skip
"""Replacements for a literal in a call. Some are valid in JSON, some in Python, some in neither."""


def odd_texts(sensible: str) -> list[str]:
    """Return damaged, huge and binary texts in every script, derived from a sensible reply. Always the same texts."""
    draw = Random(0)
    noise = [
        "".join(chr(draw.randrange(0xD800)) for _ in range(draw.randrange(200))) for _ in range(20)
    ]
    cuts = [sensible[: draw.randrange(len(sensible) + 1)] for _ in range(10)]
    shuffled = ["".join(draw.sample(sensible, len(sensible))) for _ in range(10)]
    fixed = [
        "",
        " ",
        "\n\n",
        "\0",
        "Action:",
        "Action: Action:",
        "9" * 5_000,
        "٣ get ٣ \U0001f642",
        "{}[]()\\" * 50,
    ]
    changed = [sensible * 2, f"{sensible}\n{sensible}", sensible.upper(), sensible * 5_000]
    return [*fixed, *changed, *noise, *cuts, *shuffled, *_with_other_literals(sensible)]


def odd_calls(tools: Tools, sensible: Sequence[ToolCall]) -> list[ToolCall]:
    """Return calls of no tool, without arguments, with too many, and with odd ones. Always the same calls."""
    names = [tool["function"]["name"] for tool in tools]
    properties = {
        tool["function"]["name"]: tool["function"]["parameters"].get("properties", {})
        for tool in tools
    }
    odd = [
        "",
        "[]",
        "{",
        "null",
        "[" * 3_000,
        '{"no such argument": 1}',
        json.dumps({"x": "y" * 30_000}),
    ]
    calls = [
        ToolCall(name, arguments)
        for name in (*names, "", "no such tool", "\ud800\0")
        for arguments in odd
    ]
    values: tuple[object, ...] = (
        "",
        "\ud800\0",
        "9" * 5_000,
        10**400,
        -1,
        None,
        True,
        [],
        {"a": [{}]},
        1e308,
        '"\\\n',
    )
    for name in names:
        calls += [
            ToolCall(name, json.dumps(dict.fromkeys(properties[name], value))) for value in values
        ]
    damaged = [ToolCall(call.name, call.arguments[:-1]) for call in sensible]
    return [*calls, *damaged, *sensible]


def _with_other_literals(sensible: str) -> Iterator[str]:
    """Yield the reply with its last quoted text, then with its last number, replaced by each literal."""
    for pattern in (_QUOTED, _DIGITS):
        if matches := list(pattern.finditer(sensible)):
            for literal in LITERALS:
                yield sensible[: matches[-1].start()] + literal + sensible[matches[-1].end() :]
