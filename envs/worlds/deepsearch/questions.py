"""Questions about the fictional world, modelled on seven question sets, and the comparison of answers.

nq          one hop, as typed into a search box         popqa       one hop about people, who share names
triviaqa    two hops from another name of an entity     bamboogle   two hops
hotpotqa    two hops, or a comparison of two entities   musique     three or four hops
2wiki       family ties, or a comparison over two hops each

Every question has exactly one answer: a relation has one value, no name is used twice, and of the pages on the way only
the last one has the answer.
"""

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from random import Random

from horizonrl.envs.api import TaskSpec
from horizonrl.envs.game import random_for
from horizonrl.envs.splits import lowest_hashes, split_tasks
from horizonrl.envs.worlds.deepsearch.world import RELATIONS, Entity, World

A_FAMILY = 600
TEST = {
    "nq": 58,
    "triviaqa": 57,
    "popqa": 57,
    "hotpotqa": 57,
    "2wiki": 57,
    "musique": 57,
    "bamboogle": 57,
}
"""Test questions by family: 400, as AgentGym-RL's."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = re.compile(r"[^\w\s]")
_YEARS = {
    "birth year": "Who was born first, {} or {}?",
    "founding year": "Which was founded first, {} or {}?",
    "publication year": "Which was published first, {} or {}?",
    "release year": "Which came out first, {} or {}?",
}


@dataclass(frozen=True, slots=True)
class Question:
    spec: TaskSpec
    text: str
    answers: tuple[str, ...]
    """All answers that count as right. The expert gives the first one."""
    searches: tuple[str, ...]
    """What to look up, in order, to know the answer."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A question without its place in the list."""

    text: str
    answers: tuple[str, ...]
    searches: tuple[str, ...]

    @property
    def goal(self) -> Hashable:
        """What is looked up and answered: another family may ask for it in other words."""
        return self.answers, frozenset(self.searches)


def make_questions(world: World) -> tuple[Question, ...]:
    """Return the questions of every family, no text twice."""
    drafts: dict[str, Draft] = {}
    families: dict[str, str] = {}
    test: set[str] = set()
    for family, make in FAMILIES.items():
        draw, by_text = random_for(family), dict[str, Draft]()
        while len(by_text) < A_FAMILY:
            if draft := make(world, draw):
                by_text.setdefault(draft.text, draft)
        task_ids = [f"{family}-{number:03d}" for number in range(A_FAMILY)]
        drafts |= zip(task_ids, by_text.values(), strict=True)
        families |= dict.fromkeys(task_ids, family)
        test |= lowest_hashes(task_ids, TEST[family])
    goals = {task_id: draft.goal for task_id, draft in drafts.items()}
    return tuple(
        Question(spec, draft.text, draft.answers, draft.searches)
        for spec, draft in zip(split_tasks(families, test, goals), drafts.values(), strict=True)
    )


def follow(world: World, start: str, relations: Sequence[str]) -> tuple[str, ...]:
    """Return the names from the start along the relations to the last one's value."""
    path = [start]
    for relation in relations:
        path.append(world[path[-1]].facts[relation])
    return tuple(path)


def normalize(answer: str) -> str:
    """Return an answer in lower case without punctuation, articles and repeated spaces, as usual for exact match."""
    return " ".join(_ARTICLES.sub(" ", _PUNCTUATION.sub("", answer.lower())).split())


def _walk(
    world: World, draw: Random, start: Entity, hops: int, first: Sequence[str] = ()
) -> Draft | None:
    """Draw a chain of relations from an entity, beginning with `first`. Returns None if it leads nowhere new."""
    relations: list[str] = []
    path = [start.name]
    for hop in range(hops):
        here = world.get(path[-1])
        if here is None:
            return None
        relation = first[hop] if hop < len(first) else draw.choice([*here.facts, ""])
        if relation not in here.facts or (hop < hops - 1 and not RELATIONS[relation].noun):
            return None
        relations.append(relation)
        path.append(here.facts[relation])
    values = {value for name in path[:-2] for value in world[name].facts.values()}
    if len({*path}) < len(path) or path[-1] in values:
        return None
    text = start.name
    for relation in relations[:-1]:
        text = RELATIONS[relation].noun.format(text)
    return Draft(
        RELATIONS[relations[-1]].ask.format(text), list_names(world, path[-1]), tuple(path[:-1])
    )


def list_names(world: World, name: str) -> tuple[str, ...]:
    """Return a name, and the alias of its entity if it has one."""
    entity = world.get(name)
    return (name, entity.alias) if entity and entity.alias else (name,)


def _any(
    world: World, draw: Random, fits: Callable[[Entity], object] = lambda entity: True
) -> Entity:
    entities = list(world.values())
    while not fits(entity := draw.choice(entities)):
        pass
    return entity


def _nq(world: World, draw: Random) -> Draft | None:
    draft = _walk(world, draw, _any(world, draw, lambda entity: entity.kind != "person"), 1)
    return draft and Draft(draft.text.lower().rstrip("?"), draft.answers, draft.searches)


def _triviaqa(world: World, draw: Random) -> Draft | None:
    start = _any(world, draw, lambda entity: entity.alias)
    draft = _walk(world, draw, start, 2)
    return draft and Draft(
        draft.text.replace(start.name, start.alias),
        draft.answers,
        (start.alias, *draft.searches[1:]),
    )


def _popqa(world: World, draw: Random) -> Draft | None:
    return _walk(world, draw, _any(world, draw, lambda entity: entity.kind == "person"), 1)


def _hotpotqa(world: World, draw: Random) -> Draft | None:
    if draw.random() < 0.5:
        return _walk(world, draw, _any(world, draw), 2)
    relation = draw.choice(list(_YEARS))
    one, other = (_any(world, draw, lambda entity: relation in entity.facts) for _ in range(2))
    return _first(world, relation, (one, one), (other, other))


def _2wiki(world: World, draw: Random) -> Draft | None:
    if draw.random() < 0.5:
        ties = (
            draw.choice(("father", "mother")),
            draw.choice(("father", "mother", "birthplace", "studies")),
        )
        return _walk(
            world, draw, _any(world, draw, lambda entity: "father" in entity.facts), 2, ties
        )
    one, other = (_any(world, draw, lambda entity: entity.kind == "film") for _ in range(2))
    directors = (world[film.facts["director"]] for film in (one, other))
    return _first(world, "birth year", *zip((one, other), directors, strict=True))


def _first(
    world: World, relation: str, one: tuple[Entity, Entity], other: tuple[Entity, Entity]
) -> Draft | None:
    """Compare two things by their years, or by the years of their related entities. Returns None for equal years."""
    years = [int(end.facts[relation]) for _, end in (one, other)]
    if years[0] == years[1]:
        return None
    winner = (one, other)[years[0] > years[1]][0].name
    names = [thing.name for thing, _ in (one, other)]
    film = one[0] is not one[1]
    form = "Which film has the director who was born first, {} or {}?" if film else _YEARS[relation]
    searches = dict.fromkeys(entity.name for pair in (one, other) for entity in pair)
    return Draft(form.format(*names), list_names(world, winner), tuple(searches))


def _musique(world: World, draw: Random) -> Draft | None:
    return _walk(world, draw, _any(world, draw), draw.choice((3, 4)))


def _bamboogle(world: World, draw: Random) -> Draft | None:
    return _walk(
        world, draw, _any(world, draw, lambda entity: entity.kind not in ("city", "country")), 2
    )


FAMILIES: dict[str, Callable[[World, Random], Draft | None]] = {
    "nq": _nq,
    "triviaqa": _triviaqa,
    "popqa": _popqa,
    "hotpotqa": _hotpotqa,
    "2wiki": _2wiki,
    "musique": _musique,
    "bamboogle": _bamboogle,
}
