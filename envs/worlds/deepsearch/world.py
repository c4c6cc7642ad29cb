"""The fictional world: entities and the typed facts about them. It is built from one seeded generator, always the same.

A relation is a function: for each entity it has one value, which is another entity's name, a year or a word. So a chain
of relations from one entity has exactly one end, and an agent can follow it by reading one page per relation.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from horizonrl.envs.game import words

Kind = Literal["person", "city", "country", "firm", "university", "film", "book", "festival"]


@dataclass(frozen=True, slots=True)
class Relation:
    """One kind of fact, in the words of the questions and of the pages. `{}` is the entity; the value follows `says`.

    `noun` names the value in a longer question. It is empty for years and words, from which no relation leads on.
    """

    ask: str
    noun: str
    says: str


_TABLE = """\
birthplace | Where was {} born? | the city where {} was born | was born in
birth year | In which year was {} born? | | was born in the year
father | Who is the father of {}? | the father of {} | is a child of the father
mother | Who is the mother of {}? | the mother of {} | has the mother
occupation | What is the occupation of {}? | | works as a
studies | Where did {} study? | the university where {} studied | studied at the
country | In which country is {}? | the country where {} lies | lies in
river | Which river runs through {}? | | stands on the river
mayor | Who is the mayor of {}? | the mayor of {} | has the mayor
capital | What is the capital of {}? | the capital of {} | has the capital
currency | What is the currency of {}? | | pays with the
founder | Who founded {}? | the founder of {} | was founded by
seat | In which city is the seat of {}? | the city where {} has its seat | has its seat in
founding year | In which year was {} founded? | | was founded in the year
rector | Who is the rector of {}? | the rector of {} | has the rector
university seat | Where is {}? | the city of {} | stands in
director | Who directed {}? | the director of {} | was directed by
source | Which book is {} based on? | the book that {} is based on | is based on
release year | In which year did {} come out? | | came out in the year
author | Who wrote {}? | the author of {} | was written by
publication year | In which year was {} published? | | was published in the year
host city | Where is {} held? | the city where {} is held | is held in
patron | Who is the patron of {}? | the patron of {} | has the patron
"""
RELATIONS = {
    name: Relation(*cells)
    for name, *cells in (re.split(" *[|] *", line) for line in _TABLE.splitlines())
}


@dataclass(frozen=True, slots=True)
class Entity:
    name: str
    kind: Kind
    alias: str
    """Another name, or an empty text. No two entities share a name or an alias."""
    facts: dict[str, str] = field(default_factory=dict)
    """The values by relation, in the order in which a page tells them."""


World = dict[str, Entity]
"""The entities by name."""

_ONSETS = words("b br d dr f fl g gr h j k kl l m n p pr r s st t tr v w z")
_CODAS = ("", "", "l", "m", "n", "r", "s", "th")
_INDUSTRIES = words(
    "Shipyards Mills Foundry Breweries Press Glassworks Tramways Textiles Mines Instruments"
)
_OCCUPATIONS = words(
    "painter botanist surveyor composer chemist printer lawyer sculptor geologist poet weaver baker"
)
_ADJECTIVES = words(
    "Silent Crimson Broken Distant Hollow Gilded Bitter Northern Frozen Hidden Last Burning Pale Iron"
)
_NOUNS = words(
    "Harbour Orchard Lantern Mirror Winter Bridge Garden Voyage Letter Tower River Crown Station Shadow"
)
_EPITHETS = words("Elder Bold Grey Quiet Wise Tall Younger Stern Swift Just")


def build_world(seed: int = 0, people: int = 900) -> World:
    """Build the world: 24 countries, 120 cities, three generations of people, and what they lead and make."""
    maker = _Maker(Random(seed))
    for _ in range(24):
        maker.add_country(cities=5)
    couples: list[tuple[str, str]] = []
    for generation in range(3):
        born = [
            maker.add_person(generation, couples, sex=index % 2) for index in range(people // 3)
        ]
        couples = list(zip(born[::2], born[1::2], strict=True))
    for _ in range(200):
        maker.add_firm()
    for _ in range(300):
        maker.add_book()
    for _ in range(300):
        maker.add_film()
    for _ in range(100):
        maker.add_festival()
    maker.appoint()
    return maker.world


class _Maker:
    """Draws one entity after another. Names are drawn until one is new."""

    def __init__(self, draw: Random) -> None:
        self._draw = draw
        self._names: dict[str, None] = {}
        self._first_names = [[self._word(2) for _ in range(30)] for _ in range(2)]
        self._surnames = [self._word(2) for _ in range(160)]
        self._names_by_kind: dict[Kind, list[str]] = {}
        self.world: World = {}

    def add_country(self, cities: int) -> None:
        country = self._add(
            "country", lambda: self._word(2) + self._draw.choice(("ia", "land", "mark"))
        )
        towns = [self._add_city(country.name) for _ in range(cities)]
        country.facts.update(
            {"capital": towns[0], "currency": self._new(lambda: self._word(1).lower() + "al")}
        )
        for town in towns[:2]:
            self._add_university(town)

    def _add_university(self, town: str) -> None:
        university = self._add("university", lambda: f"University of {town}")
        university.facts["university seat"] = town

    def _add_city(self, country: str) -> str:
        def name() -> str:
            return self._word(1) + self._draw.choice(("ton", "ford", "burg", "mere", "dale"))

        city = self._add("city", name, alias=lambda: f"Old {name()}")
        city.facts.update({"country": country, "river": self._new(lambda: self._word(2))})
        return city.name

    def add_person(self, generation: int, couples: list[tuple[str, str]], sex: int) -> str:
        """Add a child of one of the couples, or in the first generation a person without parents."""
        parents = self._draw.choice(couples) if couples else ()
        surname = parents[0].split()[-1] if parents else self._draw.choice(self._surnames)
        person = self._add(
            "person",
            lambda: f"{self._draw.choice(self._first_names[sex])} {surname}",
            alias=lambda: (
                f"{self._draw.choice(self._first_names[sex])} the {self._draw.choice(_EPITHETS)}"
            ),
        )
        person.facts["birthplace"] = self._any("city")
        person.facts["birth year"] = str(1850 + 35 * generation + self._draw.randrange(25))
        person.facts.update(zip(("father", "mother"), parents, strict=False))
        person.facts.update(
            {"occupation": self._draw.choice(_OCCUPATIONS), "studies": self._any("university")}
        )
        return person.name

    def add_firm(self) -> None:
        founder = self._any("person")
        firm = self._add(
            "firm",
            lambda: f"{founder.split()[-1]} & {self._word(1)} {self._draw.choice(_INDUSTRIES)}",
            alias=lambda: f"{self._word(2)} Company",
        )
        firm.facts.update(
            {"founder": founder, "seat": self._any("city"), "founding year": self._year()}
        )

    def add_book(self) -> None:
        book = self._add("book", self._title)
        book.facts.update({"author": self._any("person"), "publication year": self._year()})

    def add_film(self) -> None:
        film = self._add("film", self._title)
        film.facts.update(
            {
                "director": self._any("person"),
                "source": self._any("book"),
                "release year": self._year(),
            }
        )

    def add_festival(self) -> None:
        city = self._any("city")
        festival = self._add("festival", lambda: f"{city} {self._draw.choice(_NOUNS)} Festival")
        festival.facts.update({"host city": city, "patron": self._any("person")})

    def appoint(self) -> None:
        """Give every city its mayor and every university its rector."""
        for entity in self.world.values():
            if entity.kind in ("city", "university"):
                entity.facts["mayor" if entity.kind == "city" else "rector"] = self._any("person")

    def _add(
        self, kind: Kind, name: Callable[[], str], alias: Callable[[], str] | None = None
    ) -> Entity:
        by_alias = alias is not None and self._draw.random() < 0.5
        entity = Entity(self._new(name), kind, self._new(alias) if alias and by_alias else "")
        self.world[entity.name] = entity
        self._names_by_kind.setdefault(kind, []).append(entity.name)
        return entity

    def _new(self, name: Callable[[], str]) -> str:
        while (new := name()) in self._names:
            pass
        self._names[new] = None
        return new

    def _any(self, kind: Kind) -> str:
        return self._draw.choice(self._names_by_kind[kind])

    def _year(self) -> str:
        return str(self._draw.randrange(1880, 1980))

    def _title(self) -> str:
        return (
            f"The {self._draw.choice(_ADJECTIVES)} {self._draw.choice(_NOUNS)} of {self._word(2)}"
        )

    def _word(self, syllables: int) -> str:
        parts = (self._draw.choice(_ONSETS) + self._draw.choice("aeiou") for _ in range(syllables))
        return ("".join(parts) + self._draw.choice(_CODAS)).capitalize()
