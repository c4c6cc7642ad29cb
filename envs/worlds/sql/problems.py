"""Questions over databases of six domains, each with the query that answers it.

All domains have the same shape: people, things, and links between them. A question is a template of one difficulty
whose words and query are filled from the domain and the rows. It is kept if its query finds something worth asking.
"""

from dataclasses import dataclass
from functools import cache
from random import Random

from horizonrl.envs.api import TaskSpec
from horizonrl.envs.game import random_for, words
from horizonrl.envs.splits import lowest_hashes, split_tasks
from horizonrl.envs.worlds.sql.database import Database, Row

TRAIN, TEST = 9_428, 1_534
"""AgentGym's numbers of BIRD tasks."""
MAX_ANSWER_ROWS = 12
DIFFICULTIES = ("simple", "moderate", "challenging")


@dataclass(frozen=True, slots=True)
class Domain:
    """Table and columns of the people, of the things and of the links; `groups` are the words of `things[2]`."""

    people: tuple[str, str, str, str]
    things: tuple[str, str, str, str]
    links: tuple[str, str, str]
    groups: tuple[str, ...]


DOMAINS = {
    "library": Domain(
        ("members", "name", "town", "age"),
        ("books", "title", "genre", "pages"),
        ("loans", "days", "year"),
        words("Crime Travel Poetry History"),
    ),
    "school": Domain(
        ("students", "name", "town", "height"),
        ("courses", "title", "subject", "hours"),
        ("enrolments", "points", "year"),
        words("Music Physics Latin Sport"),
    ),
    "shop": Domain(
        ("customers", "name", "city", "age"),
        ("products", "label", "category", "price"),
        ("orders", "quantity", "year"),
        words("Garden Kitchen Toys Tools"),
    ),
    "clinic": Domain(
        ("patients", "name", "town", "weight"),
        ("doctors", "surname", "specialty", "fee"),
        ("visits", "minutes", "year"),
        words("Surgery Dentistry Paediatrics Cardiology"),
    ),
    "cinema": Domain(
        ("viewers", "name", "city", "age"),
        ("films", "title", "genre", "minutes"),
        ("tickets", "price", "year"),
        words("Comedy Drama Western Thriller"),
    ),
    "railway": Domain(
        ("passengers", "name", "town", "age"),
        ("trains", "label", "operator", "seats"),
        ("journeys", "distance", "year"),
        words("Northline Coastal Transalp Metro"),
    ),
}

Template = tuple[str, str]
_JOIN = "FROM {L} JOIN {P} ON {P}.id = {L}.{P}_id JOIN {T} ON {T}.id = {L}.{T}_id"
_MOST = "(SELECT MAX(n) FROM (SELECT COUNT(*) AS n FROM {L} GROUP BY {P}_id))"
TEMPLATES: dict[str, tuple[Template, ...]] = {
    "simple": (
        (
            "What is the {pname} of each of the {P} whose {pgroup} is {town!r}?",
            "SELECT {pname} FROM {P} WHERE {pgroup} = {town!r}",
        ),
        (
            "How many of the {T} have {tnumber} over {number}?",
            "SELECT COUNT(*) FROM {T} WHERE {tnumber} > {number}",
        ),
        (
            "What is the highest {pnumber} of the {P} whose {pgroup} is {town!r}?",
            "SELECT MAX({pnumber}) FROM {P} WHERE {pgroup} = {town!r}",
        ),
        (
            "Which different values of {tgroup} do the {T} with {tnumber} over {number} have?",
            "SELECT DISTINCT {tgroup} FROM {T} WHERE {tnumber} > {number}",
        ),
        (
            "Give the {tname} and the {tnumber} of each of the {T} whose {tgroup} is {group!r}.",
            "SELECT {tname}, {tnumber} FROM {T} WHERE {tgroup} = {group!r}",
        ),
    ),
    "moderate": (
        (
            "What is the {pname} of each of the {P} who have one of the {L} in {year}?",
            "SELECT DISTINCT {pname} " + _JOIN + " WHERE {year_} = {year}",
        ),
        (
            "How many of the {L} are of {T} whose {tgroup} is {group!r}?",
            "SELECT COUNT(*) " + _JOIN + " WHERE {tgroup} = {group!r}",
        ),
        (
            "For each {tgroup}: give it and the number of its {L}, if there are any.",
            "SELECT {tgroup}, COUNT(*) " + _JOIN + " GROUP BY {tgroup}",
        ),
        (
            "What is the total {amount} of the {L} of {person!r}?",
            "SELECT SUM({L}.{amount}) " + _JOIN + " WHERE {pname} = {person!r}",
        ),
        (
            "Which {T}, by {tname}, do the {P} whose {pgroup} is {town!r} have among their {L}?",
            "SELECT DISTINCT {tname} " + _JOIN + " WHERE {pgroup} = {town!r}",
        ),
    ),
    "challenging": (
        (
            "What is the {pname} of each of the {P} who have none of the {L} in {year}?",
            "SELECT {pname} FROM {P} WHERE id NOT IN (SELECT {P}_id FROM {L} WHERE {year_} = {year})",
        ),
        (
            "Which of the {P}, by {pname}, have the most {L}? Give all who are equal.",
            "SELECT {pname} " + _JOIN + " GROUP BY {P}.id HAVING COUNT(*) = " + _MOST,
        ),
        (
            "Give the {tname} of each of the {T} whose {tnumber} is above the average of those of the same {tgroup}.",
            "SELECT {tname} FROM {T} a WHERE {tnumber} > (SELECT AVG({tnumber}) FROM {T} WHERE {tgroup} = a.{tgroup})",
        ),
        (
            "Which of the {P}, by {pname}, have {L} of at least three different values of {tgroup}?",
            "SELECT {pname} " + _JOIN + " GROUP BY {P}.id HAVING COUNT(DISTINCT {tgroup}) >= 3",
        ),
        (
            "For each {pgroup}: give it and the total {amount} of the {L} of its {P}, if that is over {total}.",
            "SELECT {pgroup}, SUM({L}.{amount}) "
            + _JOIN
            + " GROUP BY {pgroup} HAVING SUM({L}.{amount}) > {total}",
        ),
    ),
}

_TOWNS = words("Alder Birkby Corran Dunmore Elsing")
_FIRST = words("Ada Ben Cleo Dov Eda Finn Gia Hal Ivo June Kai Lea")
_LAST = words("Abel Brook Crane Dahl Evers Frost Gold Hale")
_TITLES = words(
    "Amber Basalt Cedar Delta Ember Falcon Garnet Harbor Indigo Jasper Kestrel Lagoon Maple Nectar Onyx"
)


@dataclass(frozen=True, slots=True)
class Problem:
    tables: dict[str, tuple[str, ...]]
    rows: dict[str, list[Row]]
    question: str
    gold: str


@cache
def list_tasks() -> tuple[TaskSpec, ...]:
    """Return 10,962 tasks, 1,827 per domain, in alternating difficulties."""
    per_domain = (TRAIN + TEST) // len(DOMAINS)
    names = {
        f"{domain}-{n:04d}": DIFFICULTIES[n % len(DIFFICULTIES)]
        for domain in DOMAINS
        for n in range(per_domain)
    }
    return split_tasks(names, lowest_hashes(names, TEST))


def make_problem(task: TaskSpec) -> tuple[Problem, Database]:
    """Return a task's question with its database."""
    draw = random_for(task.task_id)
    domain = DOMAINS[task.task_id.split("-")[0]]
    while True:
        tables, rows = _fill(domain, draw)
        question, gold = _ask(domain, rows, draw, task.category)
        database = Database(tables, rows)
        answer = database.query(gold)
        if 0 < len(answer) <= MAX_ANSWER_ROWS and answer not in ([(0,)], [(None,)]):
            return Problem(tables, rows, question, gold), database
        database.close()


def _fill(domain: Domain, draw: Random) -> tuple[dict[str, tuple[str, ...]], dict[str, list[Row]]]:
    (people, *person), (things, *thing), (links, *link) = domain.people, domain.things, domain.links
    names = draw.sample([f"{first} {last}" for first in _FIRST for last in _LAST], 16)
    titles = draw.sample(_TITLES, 12)
    tables = {
        people: ("id INTEGER PRIMARY KEY", *_column_types(person)),
        things: ("id INTEGER PRIMARY KEY", *_column_types(thing)),
        links: (
            "id INTEGER PRIMARY KEY",
            *(f"{name} INTEGER" for name in (f"{people}_id", f"{things}_id", *link)),
        ),
    }
    rows: dict[str, list[Row]] = {
        people: [
            (n, name, draw.choice(_TOWNS), draw.randrange(15, 90))
            for n, name in enumerate(names, 1)
        ],
        things: [
            (n, name, draw.choice(domain.groups), draw.randrange(20, 400))
            for n, name in enumerate(titles, 1)
        ],
        links: [
            (
                n,
                draw.randrange(1, 17),
                draw.randrange(1, 13),
                draw.randrange(1, 40),
                draw.randrange(2018, 2024),
            )
            for n in range(1, 41)
        ],
    }
    return tables, rows


def _column_types(columns: list[str]) -> tuple[str, ...]:
    name, group, number = columns
    return f"{name} TEXT", f"{group} TEXT", f"{number} INTEGER"


def _ask(domain: Domain, rows: dict[str, list[Row]], draw: Random, difficulty: str) -> Template:
    """Draw a template and fill it."""
    links, amount, year = domain.links
    names: dict[str, object] = {"L": links, "amount": amount, "year_": f"{links}.{year}"}
    names |= zip(("P", "pname", "pgroup", "pnumber"), domain.people, strict=True)
    names |= zip(("T", "tname", "tgroup", "tnumber"), domain.things, strict=True)
    values = {
        "town": draw.choice(_TOWNS),
        "group": draw.choice(domain.groups),
        "person": draw.choice(rows[domain.people[0]])[1],
        "number": draw.randrange(40, 360),
        "year": draw.randrange(2018, 2024),
        "total": draw.randrange(60, 240),
    }
    question, gold = draw.choice(TEMPLATES[difficulty])
    return question.format(**names, **values), gold.format(**names, **values)
