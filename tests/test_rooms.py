"""What the layout of the packages promises: files depend on one another one way, and entry points are not libraries."""

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("common", "broker", "envs", "actors", "learner", "ops")


def modules() -> dict[str, Path]:
    """Return the file of every module, by its import name."""
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    names = [
        ".".join(("horizonrl", *file.relative_to(ROOT).with_suffix("").parts)) for file in files
    ]
    return dict(zip((name.removesuffix(".__init__") for name in names), files, strict=True))


def imported(tree: ast.AST, names: Mapping[str, object]) -> Iterator[str]:
    """Yield the modules that a file imports: at its top, inside of functions, and for type checking alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in names or node.module in names:
                    yield inner if inner in names else node.module


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return modules of which each imports the one before it and the first is the last; empty without a circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_two_files_import_each_other_directly_or_through_others() -> None:
    files = modules()
    graph = {
        name: {*imported(ast.parse(file.read_text()), files)} - {name}
        for name, file in files.items()
    }
    assert sum(map(len, graph.values())) > 500, "the imports are found"
    assert circle(graph) == []


def room(file: Path) -> str:
    """Return the folder below a package, or the package itself for a file that stands there."""
    return "/".join(file.relative_to(ROOT).parts[:-1][:2])


@pytest.mark.parametrize("package", PACKAGES)
def test_the_rooms_of_a_package_are_layers(package: str) -> None:
    """Rooms import one way, as files do; a file that stands beside the rooms is one of its own."""
    files = modules()
    graph: dict[str, set[str]] = {}
    for name, file in files.items():
        if file.relative_to(ROOT).parts[0] == package:
            own = room(file) if room(file) != package else name
            graph.setdefault(own, set())
            for target in imported(ast.parse(file.read_text()), files):
                other = room(files[target]) if room(files[target]) != package else target
                if files[target].relative_to(ROOT).parts[0] == package and other != own:
                    graph[own].add(other)
    assert len(graph) > 3
    assert circle(graph) == []


def test_configuration_stops_at_the_first_level_of_a_role() -> None:
    """Below it, modules take values, sections or the schedule: none can read what it was not given."""
    readers = set()
    for name, file in modules().items():
        if name.startswith(("horizonrl.actors.", "horizonrl.learner.")) and file.stem != "__init__":
            imports = [
                node
                for node in ast.walk(ast.parse(file.read_text()))
                if isinstance(node, ast.ImportFrom)
            ]
            if any(alias.name == "RunConfig" for node in imports for alias in node.names):
                readers.add(name.removeprefix("horizonrl."))
    assert readers == {
        "actors.main",
        "learner.main",
        "learner.controller.main",
        "learner.disk",
        "learner.settings",
    }


def test_no_file_of_ops_imports_from_the_command_lines_main() -> None:
    files = modules()
    for name, file in files.items():
        assert "horizonrl.ops.cli.main" not in imported(ast.parse(file.read_text()), files), name


@pytest.mark.parametrize(
    ("graph", "found"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, set()),
        ({"a": {"b"}, "b": {"c"}, "c": {"a"}}, {"a", "b", "c"}),
        ({"a": {"b"}, "b": {"a"}, "c": {"a"}}, {"a", "b"}),
    ],
)
def test_a_circle_is_found_and_named(graph: dict[str, set[str]], found: set[str]) -> None:
    assert set(circle(graph)) == found
