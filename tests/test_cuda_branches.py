"""Every place of product code that asks which device it is on is in the table of `cuda_branches.py`, with its tests.

Knows the words that ask. That a test takes the branch is what its author says; that it passes, the suite says.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.cuda_branches import BRANCHES

ROOT = Path(__file__).parents[1]
PACKAGES = ("actors", "broker", "common", "envs", "learner", "ops")
BENCH = ROOT / "ops/bench"

NAMES = ("has_gpu", "sees_gpu", "on_gpu", "on_cpu", "on_flash", "visible_gpus", "ask_nvidia_smi")
ATTRIBUTES = re.compile(
    r"(?:^|\.)((?:torch\.cuda|torch\.accelerator|current_platform)\.\w+"
    r"|(?:device\.type|version\.cuda|is_cuda|pin_memory)$)"
)
TEXTS = ("cuda", "nvidia-smi")
"""What asks: names, attributes, and texts that something is compared with or a command begins with.
Not `Accelerator.is_cpu` of `horizonrl plan`, whose arithmetic is about other machines and runs on any."""


def question(node: ast.AST) -> str | None:
    """Return what an expression asks about a device, or calls of a GPU; None if it does neither."""
    match node:
        case ast.Name(id=name, ctx=ast.Load()) if name in NAMES:
            return name
        case ast.keyword(arg="pin_memory"):
            return "pin_memory"
        case ast.Attribute():
            words = ATTRIBUTES.search(ast.unparse(node))
            return words[1] if words else None
        case ast.Compare(left=left, comparators=[*others]) if not any(
            map(question, (left, *others))
        ):
            return _text((left, *others))
        case ast.List(elts=elements):
            return _text(elements)
    return None


def _text(nodes: list[ast.expr] | tuple[ast.expr, ...]) -> str | None:
    return next(
        (node.value for node in nodes if isinstance(node, ast.Constant) and node.value in TEXTS),
        None,
    )


def questions(tree: ast.AST, function: str = "") -> Iterator[tuple[str, int]]:
    """Yield `function question` and its line, for each question in the code below a node."""
    for node in ast.iter_child_nodes(tree):
        if asked := question(node):
            yield f"{function} {asked}", getattr(node, "lineno", 0)
        inside = function
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = f"{function}.{node.name}".removeprefix(".")
        yield from questions(node, inside)


def places() -> dict[str, str]:
    """Return `module:function question` of each place in product code, with its file and line."""
    found = {}
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    for file in files:
        if BENCH in file.parents:
            continue
        path = file.relative_to(ROOT)
        module = ".".join(path.with_suffix("").parts)
        for asked, line in questions(ast.parse(file.read_text())):
            found.setdefault(f"{module}:{asked}", f"{path}:{line}")
    return found


@cache
def suite_names(file: str) -> set[str]:
    """Return the tests of a file below `tests/`, without those that the suite leaves out or lets skip."""
    tree = ast.parse((ROOT / "tests" / file).read_text())
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and not any(
            word in ast.unparse(mark) for mark in node.decorator_list for word in (".slow", ".skip")
        )
    }


def test_every_branch_on_a_device_has_tests_in_the_table() -> None:
    new = [f"{line}: {place}" for place, line in places().items() if place not in BRANCHES]
    assert new == [], (
        "each needs a test that takes it on a CPU, and a row in tests/cuda_branches.py"
    )


def test_every_row_of_the_table_is_a_branch_of_the_code() -> None:
    assert set(BRANCHES) - set(places()) == set(), (
        "is in tests/cuda_branches.py and not in the code"
    )


def test_the_tests_of_a_branch_are_in_the_suite() -> None:
    assert all(BRANCHES.values())
    tests = {test.partition("::") for tests in BRANCHES.values() for test in tests}
    assert [name for file, _, name in tests if name not in suite_names(file)] == []


@pytest.mark.parametrize(
    ("code", "asked"),
    [
        ("if tensor.device.type == 'cuda': pass", ["device.type"]),
        ("if 'cuda' == kind: pass", ["cuda"]),
        ("rows = ROWS_BYTES[device.type]", ["device.type"]),
        (
            "fast = q.is_cuda and torch.cuda.get_device_capability(q)",
            ["is_cuda", "torch.cuda.get_device_capability"],
        ),
        ("on_gpu = has_gpu(torch)", ["has_gpu"]),
        ("place = 'a' if on_gpu else 'b'", ["on_gpu"]),
        ("empty(3, pin_memory=True).pin_memory()", ["pin_memory", "pin_memory"]),
        ("if vllm.platforms.current_platform.is_cpu(): pass", ["current_platform.is_cpu"]),
        ("built = 'no' if torch.version.cuda is None else 'yes'", ["version.cuda"]),
        ("run(['nvidia-smi', '-L'])", ["nvidia-smi"]),
        ("kind = settings.type; device = torch.device('cuda', 0)", []),
    ],
)
def test_a_question_is_found_in_each_of_its_forms(code: str, asked: list[str]) -> None:
    assert sorted(words.strip() for words, _ in questions(ast.parse(code))) == asked
