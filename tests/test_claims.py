"""Numbers in the docs against the studies that they come from, as `docs/claims.toml` lists them."""

import json
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
STUDIES = ROOT / "docs" / "studies"
LISTED: Mapping[str, Any] = tomllib.loads((ROOT / "docs" / "claims.toml").read_text())
CLAIMS: list[Mapping[str, Any]] = LISTED["claim"]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FACTS = ("command", "seeds", "commit", "machine")
INTERVAL = re.compile(r"\(([+-]?\d[\d.]*)(?: to |-)([+-]?\d[\d.]*)(?: %)?[),]")
MOST_BYTES = 20_000_000
"""Of all committed studies and their pictures together."""


def value_at(results: Any, path: str) -> Any:
    """Return the value at a dotted path."""
    for step in path.split("."):
        if not isinstance(results, list):
            results = results[step]
        elif step.isdecimal():
            results = results[int(step)]
        else:
            results = next(
                entry for entry in results if step in (entry.get("variant"), entry.get("name"))
            )
    return results


def shown_as(value: float, how: str) -> str:
    """Return the number as it must stand in the text, without a percent sign."""
    if how.endswith("p"):
        return f"{100 * value:{how[:-1]}f}"
    return format(value, how).removesuffix("%")


def holds(text: str, number: str) -> bool:
    """Return whether a text holds a number: not as a part of another one, nor under another sign. `5-11` holds 11."""
    return (
        re.search(rf"(?<![\d.,+])(?<![^\d]-){re.escape(number)}(?!\d|[.,]\d)", f" {text}")
        is not None
    )


def wrong_numbers(claim: Mapping[str, Any], studies: Path) -> Iterator[str]:
    """Yield a sentence for each number that the claim's text does not hold."""
    for name, path, how in (entry.split() for entry in claim["numbers"]):
        try:
            expected = shown_as(
                value_at(json.loads((studies / f"{name}.json").read_text()), path), how
            )
        except (OSError, KeyError, IndexError, StopIteration, ValueError, TypeError) as error:
            yield f"{name}.json has no {path} for {how} ({type(error).__name__})"
            continue
        if not holds(claim["text"], expected):
            yield f"{claim['text']!r} does not hold {expected}, which {name}.json has at {path}"


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim["text"])
def test_a_page_holds_the_text_of_a_claim_and_the_text_the_studys_numbers(
    claim: Mapping[str, Any],
) -> None:
    page = " ".join((ROOT / claim["page"]).read_text().split())
    assert claim["text"] in page, f"{claim['page']}: change docs/claims.toml with the page"
    assert claim["numbers"]
    assert list(wrong_numbers(claim, STUDIES)) == []


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_every_interval_is_that_of_a_listed_claim_or_of_a_studys_page(page: str) -> None:
    # What a console printed stands in a block.
    lines = [line for line in (ROOT / page).read_text().splitlines() if not line.startswith("    ")]
    listed = " ".join(claim["text"] for claim in CLAIMS if claim["page"] == page)
    printed = " ".join(study.read_text() for study in STUDIES.glob("*.md"))
    intervals = list(INTERVAL.finditer(" ".join(lines)))
    assert len(intervals) >= 5
    assert [
        interval[0]
        for interval in intervals
        if interval[0] not in listed and f"({interval[1]}, {interval[2]})" not in printed
    ] == []


def rows(page: Path, head: str) -> list[Mapping[str, str]]:
    """Return the rows of the table of a page whose first column is called `head`."""
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.read_text().splitlines()
        if line.startswith("|")
    ]
    (at,) = (number for number, row in enumerate(cells) if row[0] == head)
    table = takewhile(lambda row: len(row) == len(cells[at]), cells[at + 2 :])
    return [dict(zip(cells[at], row, strict=True)) for row in table]


@pytest.mark.parametrize("gains", LISTED["gains"], ids=lambda gains: gains["study"])
def test_what_a_page_calls_significant_is(gains: Mapping[str, Any]) -> None:
    assert gains["text"] in " ".join((ROOT / gains["page"]).read_text().split())
    table = rows(STUDIES / f"{gains['study']}.md", "variant")
    assert {
        row["variant"].strip("`") for row in table if float(row["its p"].strip("<")) < 0.05
    } == set(gains["significant"])


def test_each_row_of_the_evidence_names_a_study_and_its_number_of_seeds() -> None:
    claims = {row["claim"]: row for row in rows(ROOT / "docs" / "evidence.md", "claim")}
    studied = [row for row in claims.values() if row["seeds"] != "-"]
    assert len(studied) >= 10
    for row in studied:
        study = json.loads((STUDIES / f"{row['study'].strip('`')}.json").read_text())
        assert int(row["seeds"]) == len(study["seeds"].split(",")), row
    assert all(row["refuted if"] and row["interval over"] for row in claims.values())


def test_a_pages_source_has_no_comment_for_a_number() -> None:
    commented = [page for page in PAGES if "<!-- claim" in page.read_text()]
    assert commented == [], "list the numbers in docs/claims.toml"


def test_a_committed_study_says_how_it_was_made_and_all_are_small() -> None:
    for study in STUDIES.glob("*.json"):
        assert [fact for fact in FACTS if fact not in json.loads(study.read_text())] == []
    assert sum(file.stat().st_size for file in STUDIES.rglob("*") if file.is_file()) < MOST_BYTES


def rate(success: dict[str, float]) -> float:
    return success["successes"] / success["episodes"]


@pytest.mark.parametrize("path", sorted(STUDIES.glob("*.json")), ids=lambda path: path.stem)
def test_what_a_study_says_of_its_variants_is_the_mean_of_its_runs(path: Path) -> None:
    study = json.loads(path.read_text())
    runs: dict[str, dict[int, Any]] = defaultdict(dict)
    for run in study["runs"]:
        runs[run["variant"]][run["seed"]] = run
    for row in study["variants"]:
        own = runs[row["variant"]]
        assert sorted(own) == sorted(row["seeds"])
        for end in ("start", "final"):
            assert fmean(rate(run[end]) for run in own.values()) == pytest.approx(row[end]["mean"])
        gains = [rate(run["final"]) - rate(run["start"]) for run in own.values()]
        assert fmean(gains) == pytest.approx(row["improvement"]["mean"])
        for cost in ("environment_steps", "generated_tokens"):
            assert fmean(run[cost] for run in own.values()) == pytest.approx(row[cost])
    for contrast in study["contrasts"]:
        if contrast["axis"] == "end":
            one, other = runs[contrast["variant"]], runs[contrast["against"]]
            paired = [
                rate(one[seed]["final"]) - rate(other[seed]["final"])
                for seed in one.keys() & other.keys()
            ]
            assert fmean(paired) == pytest.approx(contrast["difference"]["mean"])


RESULTS = {
    "variants": [
        {"variant": "long", "final": {"mean": 0.489}},
        {"variant": "short", "final": {"mean": -0.011}},
    ]
}


@pytest.mark.parametrize(
    ("text", "number", "wrong"),
    [
        ("ends at 48.9 % of", "s variants.long.final.mean .1%", None),
        ("49 % (47-52)", "s variants.0.final.mean .0%", None),
        ("(47-49 %)", "s variants.0.final.mean .0%", None),
        ("-1.1 points", "s variants.1.final.mean .1p", None),
        ("+48.9 points", "s variants.long.final.mean +.1p", None),
        ("1.1 points", "s variants.1.final.mean .1p", "does not hold -1.1"),
        ("fell by -48.9", "s variants.long.final.mean .1p", "does not hold 48.9"),
        ("148.9 and 48.92 %", "s variants.long.final.mean .1%", "does not hold 48.9"),
        ("48.9 %", "s variants.middle.final.mean .1%", "has no variants.middle.final.mean"),
        ("48.9 %", "gone variants.long.final.mean .1%", "gone.json has no"),
    ],
)
def test_a_number_that_differs_from_its_study_is_found(
    tmp_path: Path, text: str, number: str, wrong: str | None
) -> None:
    (tmp_path / "s.json").write_text(json.dumps(RESULTS))
    found = list(wrong_numbers({"text": text, "numbers": [number]}, tmp_path))
    assert (found == []) if wrong is None else (len(found) == 1 and wrong in found[0])
