"""The documentation names code that is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "broker/PROTOCOL.md"]
LINK = re.compile(r"\]\((?!\w+:)([^)#]*)(?:#L(\d+))?[^)]*\)")
NAMED_LINE = re.compile(r"\[(\w+)\]\(([^)#]*\.py)#L(\d+)\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files(page: Path) -> None:
    for target, _ in LINK.findall(page.read_text()):
        assert not target or (page.parent / target).exists(), f"{target} does not exist"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_function_stands_at_the_line_that_is_named(page: Path) -> None:
    for name, target, number in NAMED_LINE.findall(page.read_text()):
        lines = (page.parent / target).read_text().splitlines()
        places = [at + 1 for at, line in enumerate(lines) if re.match(rf"\s*(def|class) {name}\b", line)]
        assert int(number) in places, f"{name} stands at {places}, not at {number}: mend the page"
