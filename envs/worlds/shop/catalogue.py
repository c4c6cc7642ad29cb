"""The shop's 1,000 products, generated from one seed, and the wishes of customers."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from random import Random
from threading import Lock

from horizonrl.envs.game import words
from horizonrl.envs.worlds.deepsearch.index import Index, Page

PRODUCTS = 1_000

_SIZES = ("small", "medium", "large")
_COLOURS = words("black white red green blue grey brown yellow")
_PACK, _COLOUR = {"pack": ("1 pack", "3 packs", "6 packs")}, {"color": _COLOURS}
_BOTH = {"size": _SIZES, "color": _COLOURS}
_BRANDS = words("Alvo Bentra Corvik Delmar Estrel Fjordal Gavio Holmen Indro Jarvik Kestra Lumo")
_KINDS: Mapping[str, tuple[str, str, Mapping[str, tuple[str, ...]]]] = {
    "shirt": ("fashion", "cotton slim-fit long-sleeved breathable wrinkle-free organic", _BOTH),
    "jacket": ("fashion", "waterproof hooded insulated windproof lightweight lined", _BOTH),
    "shoes": (
        "fashion",
        "non-slip leather vegan cushioned wide memory-foam",
        {"size": words("8 9 10")} | _COLOUR,
    ),
    "headphones": (
        "electronics",
        "wireless noise-cancelling foldable waterproof over-ear rechargeable",
        _COLOUR,
    ),
    "cable": (
        "electronics",
        "braided fast-charging gold-plated flat shielded round",
        {"length": words("1m 2m 5m")},
    ),
    "lamp": ("home", "dimmable solar rechargeable wall-mounted vintage warm-white", _COLOUR),
    "rug": ("home", "washable woollen handmade non-slip stain-resistant round", _BOTH),
    "desk": (
        "home",
        "foldable solid-wood adjustable corner scratch-proof compact",
        {"color": words("oak walnut white")},
    ),
    "tea": ("grocery", "organic caffeine-free loose herbal fair-trade unsweetened", _PACK),
    "nuts": ("grocery", "roasted unsalted organic raw gluten-free spicy", _PACK),
    "shampoo": ("beauty", "sulfate-free vegan fragrance-free anti-dandruff organic mild", _PACK),
    "cream": ("beauty", "fragrance-free vegan anti-aging hydrating mineral mild", _PACK),
}
"""By kind: the category, the attributes that a product may have, and the options that a customer chooses from."""


@dataclass(frozen=True, slots=True)
class Product:
    number: str
    kind: str
    title: str
    attributes: tuple[str, ...]
    """Three attributes. The title names two of them, the description all three."""
    options: Mapping[str, tuple[str, ...]]
    price: float

    @property
    def category(self) -> str:
        return parse_category(self.kind)

    @property
    def description(self) -> str:
        return f"This {self.kind} is {', '.join(self.attributes[:-1])} and {self.attributes[-1]}."


@dataclass(frozen=True, slots=True)
class Wish:
    """What a customer asks for. It is made from one product, so that it can be fulfilled."""

    kind: str
    attributes: tuple[str, ...]
    options: Mapping[str, str]
    most: int
    """The price limit in dollars."""
    number: str
    """The number of the product from which the wish was made."""

    def __str__(self) -> str:
        chosen = "".join(f", {name} {value}" for name, value in self.options.items())
        return (
            f"a {' '.join(self.attributes)} {self.kind}{chosen}, for less than {self.most} dollars"
        )

    @property
    def meaning(self) -> object:
        """What makes two wishes the same: their words in any order, and the price."""
        return self.kind, frozenset(self.attributes), frozenset(self.options.items()), self.most

    def score(self, product: Product, chosen: Mapping[str, str]) -> float:
        """Return the share of the wished attributes, options and price that a purchase meets; 0 for another kind."""
        if product.kind != self.kind:
            return 0.0
        fulfilled = [attribute in product.attributes for attribute in self.attributes]
        fulfilled += [chosen.get(name) == value for name, value in self.options.items()]
        fulfilled.append(product.price < self.most)
        return sum(fulfilled) / len(fulfilled)


def parse_category(kind: str) -> str:
    return _KINDS[kind][0]


@cache
def load_products() -> dict[str, Product]:
    """Return the products by number."""
    draw = Random(0)
    kinds = list(_KINDS)
    products = [_make(f"B{100_000 + 7 * n}", kinds[n % len(kinds)], draw) for n in range(PRODUCTS)]
    return {product.number: product for product in products}


def _make(number: str, kind: str, draw: Random) -> Product:
    _, attributes, options = _KINDS[kind]
    drawn = tuple(draw.sample(words(attributes), 3))
    offered = {
        name: tuple(v for v in values if draw.random() < 0.8) or values
        for name, values in options.items()
    }
    title = f"{draw.choice(_BRANDS)} {draw.choice(_BRANDS)[0]}{draw.randrange(10, 99)} {' '.join(drawn[:2])} {kind}"
    return Product(number, kind, title, drawn, offered, draw.randrange(500, 15_000) / 100)


def make_wish(draw: Random) -> Wish:
    """Draw a product and wish for two of its attributes, its options and a price a little above its own."""
    product = draw.choice(list(load_products().values()))
    attributes = tuple(draw.sample(product.attributes, 2))
    chosen = {name: draw.choice(values) for name, values in product.options.items()}
    return Wish(
        product.kind,
        attributes,
        chosen,
        int(product.price) + 10 * draw.randrange(1, 4),
        product.number,
    )


_BUILDING = Lock()


def load_shelves() -> Index:
    """Return the index over titles and descriptions. The first call is slow: make it in a thread."""
    # `cache` has no lock: threads that call at the same time would each build an index.
    with _BUILDING:
        return _shelves()


@cache
def _shelves() -> Index:
    return Index(
        [Page(p.title, f"{p.description} {p.category}", p.number) for p in load_products().values()]
    )
