"""What of an agent's answer may reach reasoning-gym's scorers, some of which evaluate it as Python.

Four scorers call `eval` on the answer, five call sympy's `parse_expr`, which evaluates too. An agent's words are never
executed here: the first get a reader of literals instead, the others only plain arithmetic of bounded size.
"""

import ast
import re
import sys
from typing import Any

OPEN, CLOSE = "<answer>", "</answer>"
LITERALS = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
"""Datasets whose scorers call `eval`, for lists of numbers or characters."""
EXPRESSIONS = (
    "countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration",
)  # fmt: skip
"""Datasets whose scorers call `parse_expr`."""
MOST_CHARS = 4_000
"""The longest answer that is scored. The longest known one has fewer than 2,000 characters."""
MOST_EXPRESSION_CHARS = 400
MOST_POWERS_OF_BRACKETS = 4
_BIG_EXPONENT = re.compile(r"\d\.?[eE][-+]?\d{4}")
"""`Fraction("1e99999999")` takes minutes."""
_FUNCTIONS = "sin|cos|tan|sec|csc|cot|asin|acos|atan|sinh|cosh|tanh|exp|log|ln|sqrt|pi|Abs"
_EXPRESSION = re.compile(
    rf"(?:\d{{1,9}}(?:\.\d{{1,9}})?(?![\d.])|(?:{_FUNCTIONS}|[A-Za-z])(?![A-Za-z_\d.])|[-+*/^()\s,])+"
)
_SMALL = r"\s*(?:-?\d{1,2}|[A-Za-z]|\(\s*-?\d{1,2}\s*(?:/\s*\d{1,2}\s*)?\))(?![\d.]|\s*(?:\*\*|\^))"
_BIG_POWER = re.compile(rf"(?:\*\*|\^)(?!{_SMALL})")
_BRACKET_POWER = re.compile(r"\)\s*(?:\*\*|\^)")


def answer_part(reply: str) -> str:
    """Return the last tagged answer of a reply with its tags, or an empty text; in one pass, however many tags."""
    end = reply.rfind(CLOSE)
    start = reply.rfind(OPEN, 0, max(0, end))
    return reply[start : end + len(CLOSE)] if 0 <= start < end else ""


def may_be_scored(name: str, answer: str) -> bool:
    """Return whether the scorer of the dataset `name` may see the answer."""
    if len(answer) > MOST_CHARS or _BIG_EXPONENT.search(answer):
        return False
    return name not in EXPRESSIONS or is_plain_arithmetic(answer)


def is_plain_arithmetic(text: str) -> bool:
    """Return whether a text is arithmetic with known functions, and with powers that stay small."""
    return (
        len(text) <= MOST_EXPRESSION_CHARS
        and _EXPRESSION.fullmatch(text) is not None
        and _BIG_POWER.search(text) is None
        and len(_BRACKET_POWER.findall(text)) <= MOST_POWERS_OF_BRACKETS
    )


def read_literals_only(name: str, dataset: Any) -> None:
    """Make the scorer of a dataset read literals where it would evaluate an answer."""
    if name in LITERALS:
        vars(sys.modules[type(dataset).__module__])["eval"] = ast.literal_eval
