"""What several templates need: kinds of answers, records drawn from a world, and effects on one.

Names that a plan clicks are the names on the pages. An effect makes the same change to the records, without the sites.
"""

from collections.abc import Callable, Iterable, Mapping
from random import Random
from typing import TypeVar

from horizonrl.envs.worlds.webnav.task import Answer, Type
from horizonrl.envs.worlds.webnav.world import ME, Issue, Post, World, slug

T = TypeVar("T")


def exact(value: object) -> Answer:
    return Answer("exact", str(value))


def number(value: object) -> Answer:
    return Answer("number", str(value))


def including(value: str, among: Iterable[str]) -> Answer:
    """Return the answer that names this one of them, and no other."""
    return Answer("must_include", value, tuple(name for name in among if name != value))


def people(world: World) -> list[str]:
    return [ME, *(customer.name for customer in world.customers.values())]


def search(name: str) -> tuple[Type, str]:
    """Return what finds a record by its name, and opens it."""
    return Type("Search", name, enter=True), name


def pick(draw: Random, records: Mapping[str, T]) -> T:
    """Draw one of the records."""
    return draw.choice([*records.values()])


def draw_issue(world: World, draw: Random) -> tuple[str, int, Issue]:
    name = draw.choice([*world.repos])
    index, issue = draw.choice([*enumerate(world.repos[name].issues)])
    return name, index, issue


def draw_post(world: World, draw: Random) -> tuple[str, int, Post]:
    forum = draw.choice([*world.forums])
    index, post = draw.choice([*enumerate(world.forums[forum])])
    return forum, index, post


def price_set(name: str, cents: int) -> Callable[[World], None]:
    return lambda world: setattr(world.products[slug(name)], "price_cents", cents)


def post_added(forum: str, title: str) -> Callable[[World], None]:
    return lambda world: world.forums[forum].append(Post(title, ME, 1, voted=True))
