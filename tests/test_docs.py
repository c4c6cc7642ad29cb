"""The documentation names code and places that are there, and its site builds.

A link within the site is checked twice: as the site has it, by `mkdocs build --strict`, and as a repository shows it.
"""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
ROOT = Path(__file__).parents[1]
PLACES = ("*.md", "docs/**/*.md", "examples/*.md", "examples/*/*.md", "broker/*.md")
PAGES = [page for places in PLACES for page in ROOT.glob(places)]
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)[^)]*\)")
ANCHORED = re.compile(r"\]\((?!\w+:)([^)#\s]*)#([^)\s]+)\)")
FENCED = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
FETCHED = re.compile(
    r"<(?:script|img|iframe|source)[^>]*\ssrc=[\"']?(?:https?:)?//|<link[^>]*\shref=[\"']?(?:https?:)?//|url\([\"']?https?:"
)
"""What a browser would fetch from elsewhere."""
SYMBOL = re.compile(r"\[`?([\w.]+)`?\]\((?!\w+:)([^)#\s]*\.py)\)")
"""A link from the name of something in the code to the file that defines it."""


def found_on_pages(wrong: Callable[[Path, str], Iterable[str]]) -> list[str]:
    """Return what a function of a page and of its text finds on all of them."""
    return [
        f"{page.relative_to(ROOT)}: {finding}"
        for page in PAGES
        for finding in wrong(page, page.read_text())
    ]


def test_links_lead_to_files() -> None:
    def wrong(page: Path, text: str) -> list[str]:
        return [link for link in LINK.findall(text) if link and not (page.parent / link).exists()]

    assert found_on_pages(wrong) == []


def test_a_linked_symbol_is_defined_in_its_file() -> None:
    def wrong(page: Path, text: str) -> Iterator[str]:
        for name, target in SYMBOL.findall(text):
            code = (page.parent / target).read_text()
            for part in [] if name.endswith(".py") else name.split("."):
                defined = rf"^\s*(?:(?:async )?def|class) {part}\b|^\s*{part}\b(?: = |: )"
                if not re.search(defined, code, re.MULTILINE):
                    yield f"{target} defines no {part}"

    assert found_on_pages(wrong) == []


def test_a_page_names_no_line_of_a_file() -> None:
    """Lines move: a link leads to a file, with a symbol's name."""
    assert found_on_pages(lambda page, text: re.findall(r"\]\([^)]*#L\d+\)", text)) == []


def test_a_row_is_part_of_a_table() -> None:
    """An empty line ends a table: the rows below it would show their bars."""

    def wrong(page: Path, text: str) -> list[str]:
        tables = re.findall(r"(?:^ *\|.*\n)+", FENCED.sub("", text), re.MULTILINE)
        return [rows for rows in tables if not re.match(r".*\n[ |:-]*-[ |:-]*\n", rows)]

    assert found_on_pages(wrong) == []


def test_links_lead_to_sections() -> None:
    def wrong(page: Path, text: str) -> Iterator[str]:
        for target, anchor in ANCHORED.findall(FENCED.sub("", text)):
            there = (page.parent / target).resolve() if target else page
            if anchor not in anchors(there):
                yield f"{target}#{anchor}: {there.name} has {', '.join(sorted(anchors(there)))}"

    assert found_on_pages(wrong) == []


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's sections, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*?)\s*$", FENCED.sub("", page.read_text()), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in titles]
    slugs = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in plain]
    before: Counter[str] = Counter()
    found = set()
    for slug in slugs:
        found.add(f"{slug}-{before[slug]}" if before[slug] else slug)
        before[slug] += 1
    return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built so that a broken link is an error."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    done = subprocess.run(  # without --quiet, which hides the warnings from --strict too
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_fetches_nothing_from_elsewhere(site: Path) -> None:
    pages = {file.relative_to(site).as_posix(): file for file in site.rglob("*.html")}
    assert {
        "index.html",
        "protocol.html",
        "contributing.html",
        "environments/textcraft.html",
    } <= pages.keys()
    for name, file in [*pages.items(), *((str(file), file) for file in site.rglob("*.css"))]:
        assert not FETCHED.search(file.read_text()), name


def test_formulas_are_mathml(site: Path) -> None:
    page = (site / "algorithms.html").read_text()
    assert page.count("<math") > 50
    assert 'class="arithmatex"' not in page


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")
def test_the_sites_search_works_from_the_disk(site: Path) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url.partition(":")[0]))
        page.goto((site / "environments" / "your-own.html").as_uri())
        page.click(".md-search__input")
        page.keyboard.type("staleness")
        expect(page.locator(".md-search-result__meta")).to_contain_text(
            "matching documents", timeout=20_000
        )
        # The results are drawn a while after their number.
        expect(
            page.locator("a.md-search-result__link[href*='invariants.html']").first
        ).to_be_attached(timeout=20_000)
        assert set(asked) <= {"file", "blob", "data"}
        browser.close()


def test_the_readmes_environment_passes_the_check(tmp_path: Path) -> None:
    """The class of the README, installed as a package would be: a module and an entry point."""
    code = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    (tmp_path / "readme_guess.py").write_text("".join(code))
    package = tmp_path / "readme_guess-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: readme-guess\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[horizonrl.envs]\nguess = readme_guess:Guess\n")
    done = subprocess.run(
        [Path(sys.executable).with_name("horizonrl"), "envs", "check", "guess"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NO" not in done.stdout
