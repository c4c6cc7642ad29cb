"""What the sites of one task know: generated from a seed, changed by the agent, compared as a whole at the end.

Every task has a world of its own, so that nothing of one episode is left in the next and no answer can be learned by
heart. Two worlds are equal when every record of every site is: what an agent did beside its task shows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from horizonrl.envs.game import random_for, words

ME = "Robin Vale"
"""Who is signed in on every site."""

FIRST = words("Ada Ben Cleo Dan Eva Finn Gia Hugo Iris Jack Kim Leo Mia Noah Olga")
LAST = words("Park Stone Reed Cole Hart Wood Lane Ford Bell Cruz")
KINDS_OF_PRODUCT = {
    "Kitchen": words("Kettle Pan Toaster Mug Bowl Knife Blender Tray"),
    "Garden": words("Shovel Hose Rake Planter Bench Lantern Trowel Gloves"),
    "Office": words("Desk Chair Stapler Lamp Notebook Shelf Folder Clock"),
    "Toys": words("Puzzle Robot Kite Doll Train Drum Yoyo Castle"),
    "Sport": words("Ball Racket Helmet Rope Mat Skates Whistle Net"),
}
MAKES = words("Red Blue Green Oak Steel Tiny Giant Smart Classic Royal")
KINDS_OF_PLACE = words("Cafe Museum Hotel Park Library Bank")
PLACE_NAMES = words("River Sunset Central Maple Harbor Corner Golden Lotus Union Castle")
CLOSING_TIMES = tuple(f"{hour}:00" for hour in range(15, 24))
STREETS = ("Main Street", "High Street", "Mill Road", "Lake Avenue", "Church Lane", "Station Road")
FORUMS = words("books cooking travel space")
SUBJECTS = words("tea rain maps bread trains planets novels beaches spices comets")
QUESTIONS = (
    "Who likes {}?",
    "Tell me about {}",
    "A question about {}",
    "My week with {}",
    "Why I love {}",
)
REPOS = words("compass teapot lantern anvil")
TROUBLES = ("crashes", "is slow", "looks wrong", "needs tests", "fails on Mondays", "loses data")
PARTS = words("Login Search Export Menu Cache Upload Parser Logo")
REMARKS = (
    "Great value",
    "Broke at once",
    "As described",
    "Would buy again",
    "Too small",
    "Lovely colour",
)

STATUSES = words("pending shipped complete canceled")
GROUPS = words("General Wholesale Retailer")
LABELS = words("bug feature docs")
MODES = {"walk": 12, "bike": 4, "drive": 2}
"""Minutes a block, by how one travels."""
METRES_A_BLOCK = 100


@dataclass(frozen=True, slots=True)
class Size:
    """How much of everything a world has."""

    categories: int
    products: int
    """In a category."""
    people: int
    orders: int
    places: int
    sections: int
    """Forums, and repositories."""
    posts: int
    """In a forum; and issues in a repository."""


SIZES = {"full": Size(5, 6, 16, 24, 24, 4, 7), "compact": Size(2, 3, 4, 5, 6, 2, 3)}


@dataclass(slots=True)
class Product:
    name: str
    category: str
    price_cents: int
    stock: int


@dataclass(slots=True)
class Review:
    product: str
    author: str
    stars: int
    title: str
    approved: bool


@dataclass(slots=True)
class Order:
    number: int
    customer: str
    day: str
    status: str
    lines: tuple[tuple[str, int, int], ...]
    """Product, count, price in cents when it was bought."""

    @property
    def total_cents(self) -> int:
        return sum(count * cents for _, count, cents in self.lines)


@dataclass(slots=True)
class Customer:
    name: str
    email: str
    group: str


@dataclass(slots=True)
class Place:
    name: str
    kind: str
    address: str
    closes: str
    position: tuple[int, int]

    def blocks_to(self, other: "Place") -> int:
        return abs(self.position[0] - other.position[0]) + abs(self.position[1] - other.position[1])


@dataclass(slots=True)
class Post:
    title: str
    author: str
    votes: int
    comments: list[tuple[str, str]] = field(default_factory=list)
    voted: bool = False


@dataclass(slots=True)
class Issue:
    title: str
    author: str
    label: str
    assignee: str = "nobody"
    open: bool = True


@dataclass(slots=True)
class Repo:
    stars: int
    commits: dict[str, int]
    issues: list[Issue]
    starred: bool = False


@dataclass(slots=True)
class World:
    """The records of all sites; those with a name are found by its slug."""

    products: dict[str, Product]
    reviews: dict[str, Review]
    """By a number that stays when others are deleted."""
    orders: dict[str, Order]
    customers: dict[str, Customer]
    places: dict[str, Place]
    forums: dict[str, list[Post]]
    repos: dict[str, Repo]
    phone: str
    cart: dict[str, int] = field(default_factory=dict)
    wishes: list[str] = field(default_factory=list)
    saved: list[str] = field(default_factory=list)

    def list_reviews(self, product: Product) -> list[Review]:
        """Return what the shop shows."""
        return [
            review
            for review in self.reviews.values()
            if review.product == product.name and review.approved
        ]

    def in_category(self, category: str) -> list[Product]:
        return [product for product in self.products.values() if product.category == category]

    def list_orders(self, customer: str) -> list[Order]:
        return [order for order in self.orders.values() if order.customer == customer]

    def of_kind(self, kind: str) -> list[Place]:
        return [place for place in self.places.values() if place.kind == kind]


def slug(name: str) -> str:
    return name.lower().replace(" ", "-")


def money(cents: int) -> str:
    return f"${cents // 100}.{cents % 100:02d}"


def build_world(seed: str, size: Size) -> World:
    """Return the world of a seed: names, prices and places are each given once."""
    draw = random_for(seed)
    people = _names(draw, FIRST, LAST, size.people)
    products = {slug(product.name): product for product in _products(draw, size)}
    return World(
        products=products,
        reviews={
            str(number): review
            for number, review in enumerate(_reviews(draw, list(products.values()), people), 1)
        },
        orders={
            str(order.number): order
            for order in _orders(draw, size, list(products.values()), people)
        },
        customers={
            slug(name): Customer(
                name,
                f"{name.split()[0].lower()}{draw.randrange(10, 100)}@mail.com",
                draw.choice(GROUPS),
            )
            for name in people
        },
        places={slug(place.name): place for place in _places(draw, size.places)},
        forums={forum: _posts(draw, size.posts, people) for forum in FORUMS[: size.sections]},
        repos={name: _repo(draw, size.posts, people) for name in REPOS[: size.sections]},
        phone=f"555-{draw.randrange(1000, 10_000)}",
    )


def _names(draw: Random, firsts: Sequence[str], lasts: Sequence[str], count: int) -> list[str]:
    """Return different names."""
    return draw.sample([f"{first} {last}" for first in firsts for last in lasts], count)


def _products(draw: Random, size: Size) -> Iterator[Product]:
    prices = iter(draw.sample(range(500, 20_000, 50), size.categories * size.products))
    for category in draw.sample(sorted(KINDS_OF_PRODUCT), size.categories):
        for name in _names(draw, MAKES, KINDS_OF_PRODUCT[category], size.products):
            yield Product(name, category, next(prices), draw.randrange(1, 60))


def _reviews(draw: Random, products: Sequence[Product], people: Sequence[str]) -> list[Review]:
    """Return three reviews a product, of which the first awaits approval for every other product."""
    return [
        Review(product.name, author, stars, draw.choice(REMARKS), bool(index or number % 2))
        for number, product in enumerate(products)
        for index, (author, stars) in enumerate(
            zip(draw.sample(people, 3), draw.sample(range(1, 6), 3), strict=True)
        )
    ]


def _orders(
    draw: Random, size: Size, products: Sequence[Product], people: Sequence[str]
) -> Iterator[Order]:
    """Yield orders of which every other one is mine, newest last."""
    day = 0
    for number in range(size.orders):
        day += draw.randrange(1, 9)
        bought = draw.sample(products, draw.randrange(1, 3))
        lines = tuple(
            (product.name, draw.randrange(1, 4), product.price_cents) for product in bought
        )
        customer = draw.choice(people) if number % 2 else ME
        date = f"2024-{1 + day // 28:02d}-{1 + day % 28:02d}"
        yield Order(
            1000 + number * 7 + draw.randrange(7), customer, date, draw.choice(STATUSES), lines
        )


def _places(draw: Random, count: int) -> Iterator[Place]:
    kinds = KINDS_OF_PLACE[: max(2, count // 4)]
    spots = draw.sample([(x, y) for x in range(20) for y in range(20)], count)
    houses = draw.sample(range(2, 200), count)
    names = _names(draw, PLACE_NAMES, kinds, count)
    for name, spot, house in zip(names, spots, houses, strict=True):
        kind = name.split()[1]
        yield Place(name, kind, f"{house} {draw.choice(STREETS)}", draw.choice(CLOSING_TIMES), spot)


def _posts(draw: Random, count: int, people: Sequence[str]) -> list[Post]:
    titles = draw.sample(
        [question.format(subject) for question in QUESTIONS for subject in SUBJECTS], count
    )
    votes = draw.sample(range(1, 90), count)
    return [
        Post(
            title,
            draw.choice(people),
            vote,
            [(author, draw.choice(REMARKS)) for author in draw.sample(people, 1)],
        )
        for title, vote in zip(titles, votes, strict=True)
    ]


def _repo(draw: Random, count: int, people: Sequence[str]) -> Repo:
    titles = draw.sample([f"{part} {trouble}" for part in PARTS for trouble in TROUBLES], count)
    members = draw.sample(people, 3)
    commits = dict(zip(members, draw.sample(range(3, 80), 3), strict=True))
    issues = [
        Issue(t, draw.choice(people), draw.choice(LABELS), open=draw.random() < 0.8) for t in titles
    ]
    return Repo(draw.randrange(2, 900), commits, issues)
