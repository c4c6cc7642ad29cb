"""The shop as its customer sees it, and its administration (WebArena's Shopping and CMS), over the same records."""

import re
from collections.abc import Iterator, Sequence

from horizonrl.envs.worlds.webnav.page import Element, button, combobox, link, text, textbox
from horizonrl.envs.worlds.webnav.sites import Body, Site, make_list, query
from horizonrl.envs.worlds.webnav.world import (
    GROUPS,
    ME,
    STATUSES,
    Order,
    Product,
    Review,
    money,
    slug,
)

_PRICE = re.compile(r"\$?([0-9]{1,5})(?:\.([0-9]{2}))?")
_COUNT = re.compile(r"[0-9]{1,6}")


def read_cents(written: str) -> int | None:
    """Return a price in cents; None when it is none."""
    match = _PRICE.fullmatch(written.strip())
    return int(match[1]) * 100 + int(match[2] or 0) if match else None


class Shop(Site):
    host, title = "shop", "Shop"

    def nav(self) -> Sequence[Element]:
        categories = dict.fromkeys(product.category for product in self.world.products.values())
        pages = {
            "My Orders": "/orders",
            "Cart": "/cart",
            "Wish List": "/wishes",
            "Account": "/account",
        }
        links = [link(name, path) for name, path in pages.items()]
        shelves = [link(category, f"/category/{slug(category)}") for category in categories]
        return [textbox("Search"), button("Search", "/search"), *shelves, *links]

    def get(self, path: list[str], query: dict[str, str]) -> Body | None:
        world = self.world
        match path:
            case ["search"]:
                words = query.get("q", "").lower().split()
                hits = [
                    p
                    for p in world.products.values()
                    if all(word in p.name.lower() for word in words)
                ]
                return "Search results", make_list([*_products(hits)])
            case ["category", name] if products := world.in_category(name.title()):
                return name.title(), [*_products(products)]
            case ["product", key] if product := world.products.get(key):
                return product.name, self._product(product)
            case ["product", key, "review"] if product := world.products.get(key):
                stars = combobox("Stars", ("1", "2", "3", "4", "5"), "5")
                form = [stars, textbox("Title"), button("Submit Review", f"/product/{key}/review")]
                return f"Review of {product.name}", form
            case ["orders"]:
                return "My Orders", make_list([*_orders(world.list_orders(ME))])
            case ["orders", number] if (order := world.orders.get(number)) and order.customer == ME:
                cancel = (
                    [button("Cancel Order", f"/orders/{number}/cancel")]
                    if order.status == "pending"
                    else []
                )
                return f"Order {number}", [*_order(order), *cancel]
        return self._mine(path)

    def post(self, path: list[str], fields: dict[str, str]) -> tuple[str, str] | None:
        world = self.world
        match path:
            case ["search"]:
                return query("/search", q=fields.get("Search", "")), ""
            case ["product", key, "cart"]:
                name = world.products[key].name
                world.cart[name] = world.cart.get(name, 0) + 1
                return f"/product/{key}", f"You added {name} to your cart."
            case ["product", key, "wish"]:
                name = world.products[key].name
                world.wishes = [*(wish for wish in world.wishes if wish != name), name]
                return f"/product/{key}", f"You added {name} to your wish list."
            case ["product", key, "review"]:
                stars, title = int(fields["Stars"]), fields["Title"].strip()
                review = Review(world.products[key].name, ME, stars, title, approved=False)
                world.reviews[str(len(world.reviews) + 1)] = review
                return f"/product/{key}", "Your review awaits approval."
            case ["orders", number, "cancel"]:
                world.orders[number].status = "canceled"
                return f"/orders/{number}", "The order is canceled."
            case ["cart", name, "remove"]:
                world.cart.pop(world.products[name].name, None)
                return "/cart", ""
            case ["wishes", name, "remove"]:
                world.wishes = [wish for wish in world.wishes if slug(wish) != name]
                return "/wishes", ""
            case ["account"]:
                world.phone = fields["Phone"].strip()
                return "/account", "Your account is saved."
        return None

    def _product(self, product: Product) -> Sequence[Element]:
        path = f"/product/{slug(product.name)}"
        uses = [button("Add to Cart", f"{path}/cart"), button("Add to Wish List", f"{path}/wish")]
        reviews = [
            text(f"{r.author}, {r.stars} of 5: {r.title}") for r in self.world.list_reviews(product)
        ]
        return [
            text(money(product.price_cents)),
            *uses,
            link("Write a Review", f"{path}/review"),
            *reviews,
        ]

    def _mine(self, path: list[str]) -> Body | None:
        """Return a page of what the customer keeps."""
        match path:
            case ["cart"]:
                return "Cart", make_list(
                    [
                        e
                        for name, n in self.world.cart.items()
                        for e in _kept("cart", name, f" x {n}")
                    ]
                )
            case ["wishes"]:
                return "Wish List", make_list(
                    [e for name in self.world.wishes for e in _kept("wishes", name, "")]
                )
            case ["account"]:
                return "Account", [
                    text(ME),
                    textbox("Phone", self.world.phone),
                    button("Save", "/account"),
                ]
        return None


class Admin(Site):
    host, title = "admin", "Shop Admin"

    def nav(self) -> Sequence[Element]:
        pages = {
            "Orders": "/orders",
            "Products": "/products",
            "Customers": "/customers",
            "Reviews": "/reviews",
        }
        return [link(name, path) for name, path in pages.items()]

    def get(self, path: list[str], query: dict[str, str]) -> Body | None:
        world = self.world
        match path:
            case ["orders"]:
                status = query.get("status")
                hits = [order for order in world.orders.values() if status in (None, order.status)]
                filters = (
                    []
                    if status
                    else [combobox("Status", STATUSES, ""), button("Filter", "/orders")]
                )
                return "Orders", [*filters, *make_list([*_orders(hits)])]
            case ["orders", number] if order := world.orders.get(number):
                status_field = combobox("Status", STATUSES, order.status)
                return f"Order {number}", [
                    *_order(order),
                    status_field,
                    button("Save", f"/orders/{number}"),
                ]
            case ["products"]:
                return "Products", [*_products(list(world.products.values()))]
            case ["product", key] if product := world.products.get(key):
                fields = [
                    textbox("Price", money(product.price_cents)),
                    textbox("Stock", str(product.stock)),
                ]
                return product.name, [*fields, button("Save", f"/product/{key}")]
            case ["customers"]:
                return "Customers", [
                    link(name.name, f"/customer/{key}") for key, name in world.customers.items()
                ]
            case ["customer", key] if customer := world.customers.get(key):
                group = combobox("Group", GROUPS, customer.group)
                orders = _orders(world.list_orders(customer.name))
                return customer.name, [
                    text(customer.email),
                    group,
                    button("Save", f"/customer/{key}"),
                    *orders,
                ]
            case ["reviews"]:
                waiting = [
                    (number, review)
                    for number, review in world.reviews.items()
                    if not review.approved
                ]
                return "Pending Reviews", make_list(
                    [link(_title(r), f"/review/{number}") for number, r in waiting]
                )
            case ["review", number] if review := world.reviews.get(number):
                uses = [
                    button(name, f"/review/{number}/{slug(name)}") for name in ("Approve", "Delete")
                ]
                return _title(review), [
                    text(f"{review.author}, {review.stars} of 5: {review.title}"),
                    *uses,
                ]
        return None

    def post(self, path: list[str], fields: dict[str, str]) -> tuple[str, str] | None:
        world = self.world
        match path:
            case ["orders"]:
                return query("/orders", status=fields["Status"]), ""
            case ["orders", number]:
                world.orders[number].status = fields["Status"]
            case ["product", key]:
                cents, stock = read_cents(fields["Price"]), fields["Stock"].strip()
                if cents is None or not _COUNT.fullmatch(stock):
                    return (
                        f"/product/{key}",
                        "Not saved: write a price such as 12.50 and a stock such as 7.",
                    )
                world.products[key].price_cents, world.products[key].stock = cents, int(stock)
            case ["customer", key]:
                world.customers[key].group = fields["Group"]
            case ["review", number, "approve"] if review := world.reviews.get(number):
                review.approved = True
                return "/reviews", "The review is approved."
            case ["review", number, "delete"] if world.reviews.pop(number, None):
                return "/reviews", "The review is deleted."
            case _:
                return None
        return "/" + "/".join(path), "Saved."


def _products(products: Sequence[Product]) -> Iterator[Element]:
    for product in products:
        yield link(product.name, f"/product/{slug(product.name)}")
        yield text(money(product.price_cents))


def _orders(orders: Sequence[Order]) -> Iterator[Element]:
    """Yield the orders, newest first."""
    for order in reversed(orders):
        yield link(f"Order {order.number}", f"/orders/{order.number}")
        yield text(f"{order.day}, {order.status}")


def _order(order: Order) -> Sequence[Element]:
    lines = [text(f"{count} x {name}, {money(cents)} each") for name, count, cents in order.lines]
    return [
        text(f"{order.customer}, {order.day}, {order.status}"),
        *lines,
        text(f"Total: {money(order.total_cents)}"),
    ]


def _kept(page: str, name: str, more: str) -> Sequence[Element]:
    return [text(name + more), button(f"Remove {name}", f"/{page}/{slug(name)}/remove")]


def _title(review: Review) -> str:
    return f"{review.product} by {review.author}"
