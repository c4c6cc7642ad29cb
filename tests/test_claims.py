"""Numbers in the docs against the studies that they come from.

A number is followed by an invisible comment `<!-- claim: NAME PATH FORMAT -->`: the value at PATH in
`docs/studies/NAME.json`, formatted with Python's FORMAT, must be what stands before it; `.1p` is a difference in
percentage points. A step of PATH is a key, an
index of a list, or the `variant` or `name` of one of its entries.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
STUDIES = ROOT / "docs" / "studies"
CLAIM = re.compile(r"(?P<shown>[^\s|(\[]*(?: %)?)<!-- claim: (?P<study>\S+) (?P<path>\S+) (?P<format>\S+) -->")
FACTS = ("command", "seeds", "commit", "machine")
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
            results = next(entry for entry in results if step in (entry.get("variant"), entry.get("name")))
    return results


def shown_as(value: float, how: str) -> str:
    """Return the value as it must stand in the text: as Python formats it, with a space before the percent sign."""
    if how.endswith("p"):
        return f"{100 * value:{how[:-1]}f}"
    return re.sub("%$", " %", format(value, how))


def wrong_claims(text: str, studies: Path) -> Iterator[str]:
    """Yield a sentence for each number that is not what its study says."""
    # What a page shows as code is an example.
    text = re.sub(r"(?m)^    .*$|`[^`]*`", "", text)
    found = list(CLAIM.finditer(text))
    if len(found) != text.count("<!-- claim:"):
        yield "a comment begins with `<!-- claim:` and is not `<!-- claim: NAME PATH FORMAT -->`"
    for claim in found:
        study = studies / f"{claim['study']}.json"
        try:
            expected = shown_as(value_at(json.loads(study.read_text()), claim["path"]), claim["format"])
        except (OSError, KeyError, IndexError, StopIteration, ValueError, TypeError) as error:
            place, why = f"{claim['path']} for {claim['format']}", type(error).__name__
            yield f"{claim['shown']}: {study.name} has no {place} ({why})"
            continue
        if claim["shown"] != expected:
            yield f"{claim['shown']} should be {expected}, which {study.name} has at {claim['path']}"


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda p: p.name)
def test_a_claimed_number_is_that_of_its_study(page: Path) -> None:
    assert list(wrong_claims(page.read_text(), STUDIES)) == []


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
    for run in study.get("runs", []):  # `sampling` counts groups, and has none
        runs[run["variant"]][run["seed"]] = run
    for row in study.get("variants", []):
        own = runs[row["variant"]]
        assert sorted(own) == sorted(row["seeds"])
        for end in ("start", "final"):
            assert fmean(rate(run[end]) for run in own.values()) == pytest.approx(row[end]["mean"])
        gains = [rate(run["final"]) - rate(run["start"]) for run in own.values()]
        assert fmean(gains) == pytest.approx(row["improvement"]["mean"])
        for cost in ("environment_steps", "generated_tokens"):
            assert fmean(run[cost] for run in own.values()) == pytest.approx(row[cost])
    for contrast in study.get("contrasts", []):
        if contrast["axis"] == "end":
            one, other = runs[contrast["variant"]], runs[contrast["against"]]
            paired = [rate(one[seed]["final"]) - rate(other[seed]["final"]) for seed in one.keys() & other.keys()]
            assert fmean(paired) == pytest.approx(contrast["difference"]["mean"])


RESULTS = {"variants": [{"variant": "long", "final": {"mean": 0.489}}, {"variant": "short", "final": {"mean": 0.418}}]}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("ends at 48.9 %<!-- claim: s variants.long.final.mean .1% --> of", None),
        (
            "| 48.9 %<!-- claim: s variants.0.final.mean .1% --> | 42 %<!-- claim: s variants.1.final.mean .0% --> |",
            None,
        ),
        ("48.9<!-- claim: s variants.long.final.mean .1p --> points", None),
        ("48.8 %<!-- claim: s variants.long.final.mean .1% -->", "48.8 % should be 48.9 %"),
        ("48.9 %<!-- claim: s variants.middle.final.mean .1% -->", "has no variants.middle.final.mean"),
        ("48.9 %<!-- claim: gone variants.long.final.mean .1% -->", "gone.json has no"),
        ("48.9 %<!-- claim: s variants.long.final.mean -->", "is not `<!-- claim: NAME PATH FORMAT -->`"),
        ("    an example: 1 %<!-- claim: gone x .1% -->", None),
    ],
)
def test_a_number_that_differs_from_its_study_is_found(tmp_path: Path, text: str, wrong: str | None) -> None:
    (tmp_path / "s.json").write_text(json.dumps(RESULTS))
    found = list(wrong_claims(text, tmp_path))
    assert (found == []) if wrong is None else (len(found) == 1 and wrong in found[0])
