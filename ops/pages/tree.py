"""`python -m horizonrl.ops.pages.tree`: write the file tree in CONTRIBUTING.md from the packages' docstrings."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "CONTRIBUTING.md"
PACKAGES = ("common", "broker", "envs", "actors", "learner", "ops")
BEGIN, END = "<!-- tree: made by `make generated` -->\n", "<!-- end of the tree -->\n"


def tree() -> str:
    """Return the tree as a Markdown table: one row per directory of the first two levels, with its purpose."""
    rows = ["| directory | holds |", "|---|---|"]
    for directory in directories():
        path = directory.relative_to(ROOT)
        if len(path.parts) <= 2:
            rows.append(f"| `{path.as_posix()}/` | {purpose(directory)} |")
    return "\n".join(rows) + "\n"


def directories() -> Iterator[Path]:
    """Yield every directory of the packages that holds Python, in the order of the packages."""
    for package in PACKAGES:
        yield from sorted({file.parent for file in (ROOT / package).rglob("*.py")})


def purpose(directory: Path) -> str:
    """Return the first paragraph of a package's docstring, on one line."""
    # Parsed and not imported: the tree is made without torch or vLLM.
    text = (
        ast.get_docstring(ast.parse((directory / "__init__.py").read_text(encoding="utf-8"))) or ""
    )
    return " ".join(text.partition("\n\n")[0].split())


def page() -> str:
    """Return CONTRIBUTING.md with the present tree."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + tree() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
