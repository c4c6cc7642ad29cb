"""The rules of the house that a test can hold: rooms, names, and the tree that CONTRIBUTING.md shows."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from horizonrl.ops.pages import tree

ROOT = Path(__file__).parents[1]
PACKAGES = tree.PACKAGES
SOURCES = [
    file for package in (*PACKAGES, "tests", "examples") for file in (ROOT / package).rglob("*.py")
]


def name(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def test_contributing_shows_the_tree_as_it_is() -> None:
    assert tree.PAGE.read_text() == tree.page(), "run `make generated`"


def test_contributing_leads_from_behaviour_to_files_that_are_there() -> None:
    page = tree.PAGE.read_text()
    table = page[page.index("| behaviour | file |") : page.index("## The tree")]
    rows = re.findall(r"^\| [^|]+ \| (`.*`) \|$", table, re.MULTILINE)
    files = [file for row in rows for file in re.findall(r"`([^`]+)`", row)]
    assert 15 <= len(rows) <= 40
    assert [file for file in files if not (ROOT / file).is_file()] == []
    assert {file.partition("/")[0] for file in files} == set(tree.PACKAGES)


def test_a_directory_says_what_it_is_for() -> None:
    silent = [name(each) for each in tree.directories() if not tree.purpose(each)]
    assert silent == [], "each __init__.py has a docstring"


def test_nobody_imports_helpers_from_a_main() -> None:
    """A `main` is wiring: it may be run and called, but it holds nothing that others need."""
    found = [
        f"{name(file)}: {line.strip()}"
        for package in PACKAGES
        for file in (ROOT / package).rglob("*.py")
        for line in file.read_text().splitlines()
        if re.match(r"\s*from horizonrl\.[\w.]*\bmain import (?!main\b|run\b|run_\w+$)", line)
    ]
    assert found == []


PRONOUNS = {"place", "each", "found", "given", "own", "known", "left", "told"}
"""Names that say nothing of what they hold. On the maps of the worlds, a place is a thing."""


@pytest.mark.parametrize("package", PACKAGES)
def test_no_name_is_a_pronoun(package: str) -> None:
    stumbles = [
        f"{name(file)}:{line}: {word}"
        for file in (ROOT / package).rglob("*.py")
        for word, line in bound_names(ast.parse(file.read_text()))
        if word in PRONOUNS and not (word == "place" and "worlds" in file.parts)
    ]
    assert stumbles == []


def bound_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the variables and parameters of a file with their lines. Fields are read with what they belong to."""
    fields = {id(line.target) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
              for line in node.body if isinstance(line, ast.AnnAssign)}  # fmt: skip
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Name)
            and isinstance(node.ctx, ast.Store)
            and id(node) not in fields
        ):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno


def test_no_variable_is_a_preposition() -> None:
    """A loop over `of` or `at` makes a reader stumble."""
    loops = re.compile(r"\bfor (?:of|at|to|by)\b(?:, \w+)* in\b")
    found = [
        f"{name(file)}:{place}"
        for file in SOURCES
        for place, line in numbered(file)
        if loops.search(line)
    ]
    assert found == []


def numbered(file: Path) -> list[tuple[int, str]]:
    return list(enumerate(file.read_text().splitlines(), 1))
