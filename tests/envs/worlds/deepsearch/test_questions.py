"""The questions are what they claim: one answer each, and every page on the way found first."""

from collections import Counter
from hashlib import sha256

import pytest

from horizonrl.envs.worlds.deepsearch.library import load
from horizonrl.envs.worlds.deepsearch.questions import FAMILIES, TEST, normalize
from horizonrl.envs.worlds.deepsearch.world import build_world

WORLD = build_world()
INDEX, QUESTIONS = load(None, None, "full")
COMPACT, _ = load(None, None, "compact")


def test_the_list_is_the_one_that_was_frozen() -> None:
    listed = repr([(q.spec, q.text, q.answers, q.searches) for q in QUESTIONS.by_id.values()])
    assert sha256(listed.encode()).hexdigest()[:16] == "c0a547c8c02a9eb9"


def test_every_family_has_its_share_of_400_test_questions() -> None:
    test = Counter(q.spec.category for q in QUESTIONS.by_id.values() if q.spec.split == "test")
    assert test == TEST
    assert test.total() == 400
    assert len(QUESTIONS.by_id) == 600 * len(FAMILIES)


def test_no_name_stands_for_two_entities() -> None:
    names = [name for entity in WORLD.values() for name in (entity.name, entity.alias) if name]
    assert len({normalize(name) for name in names}) == len(names)


def test_a_search_for_a_name_on_the_way_finds_its_page_first_in_either_style() -> None:
    real = {entity.alias: entity.name for entity in WORLD.values() if entity.alias}
    names = dict.fromkeys(name for q in QUESTIONS.by_id.values() for name in q.searches)
    for index in (INDEX, COMPACT):
        assert [index.search(name, 1)[0].title for name in names] == [
            real.get(name, name) for name in names
        ]


def test_every_way_can_be_read_off_the_pages_and_ends_in_the_answer() -> None:
    for question in QUESTIONS.by_id.values():
        pages = [INDEX.search(name, 1)[0] for name in question.searches]
        known = question.text.lower()
        for name, page in zip(question.searches, pages, strict=True):
            assert name.lower() in known, f"{question.spec.task_id}: nothing leads to {name}"
            known += page.text.lower()
        assert any(answer.lower() in known for answer in question.answers)


@pytest.mark.parametrize("family", ["triviaqa", "bamboogle", "musique"])
def test_no_page_before_the_last_says_the_answer(family: str) -> None:
    for question in (q for q in QUESTIONS.by_id.values() if q.spec.category == family):
        early = " ".join(INDEX.search(name, 1)[0].text for name in question.searches[:-1]).lower()
        assert len(question.searches) == (2 if family != "musique" else len(question.searches)) > 1
        assert f" {question.answers[0].lower()}," not in early


@pytest.mark.parametrize(
    "query", ['title:"x', "-Ada AND (", "\0" * 400, "a" * 5_000, "*", "[1 TO 3]", ""]
)
def test_signs_of_a_query_language_mean_nothing(query: str) -> None:
    assert len(INDEX.search(query, 3)) <= 3


def test_an_answer_is_judged_without_case_articles_and_punctuation() -> None:
    assert normalize(" The  Silent Harbour, of Tral!") == "silent harbour of tral"
