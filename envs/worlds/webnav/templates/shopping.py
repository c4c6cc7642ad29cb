"""Templates about the shop: as its customer (WebArena's Shopping) and in its administration (WebArena's CMS)."""

from random import Random

from horizonrl.envs.worlds.webnav.task import Plan, Task, Type
from horizonrl.envs.worlds.webnav.templates.shared import (
    exact,
    including,
    number,
    people,
    pick,
    price_set,
    search,
)
from horizonrl.envs.worlds.webnav.world import (
    GROUPS,
    ME,
    REMARKS,
    STATUSES,
    Review,
    World,
    money,
    slug,
)


def price_of_product(world: World, draw: Random) -> Task:
    product = pick(draw, world.products)
    plan = (Type("Search", product.name, enter=True),)
    return Task(
        f"What is the price of the {product.name}?",
        plan,
        number(f"{product.price_cents / 100:.2f}"),
    )


def total_of_order(world: World, draw: Random) -> Task:
    order = draw.choice(world.list_orders(ME))
    plan = ("My Orders", f"Order {order.number}")
    return Task(
        f"What is the total of my order {order.number}?",
        plan,
        number(f"{order.total_cents / 100:.2f}"),
    )


def status_of_order(world: World, draw: Random) -> Task:
    order = draw.choice(world.list_orders(ME))
    return Task(
        f"What is the status of my order {order.number}?",
        ("My Orders",),
        exact(order.status),
    )


def cheapest_of_category(world: World, draw: Random) -> Task:
    category = pick(draw, world.products).category
    products = world.in_category(category)
    cheapest = min(products, key=lambda product: product.price_cents)
    answer = including(cheapest.name, (product.name for product in products))
    return Task(f"Which product in {category} is the cheapest?", (category,), answer)


def author_of_review(world: World, draw: Random) -> Task:
    product = pick(draw, world.products)
    review = draw.choice(world.list_reviews(product))
    plan = search(product.name)
    return Task(
        f"Who rated the {product.name} {review.stars} of 5?",
        plan,
        including(review.author, people(world)),
    )


def add_to_cart(world: World, draw: Random) -> Task:
    product = pick(draw, world.products)
    plan = (*search(product.name), "Add to Cart")
    return Task(
        f"Add the {product.name} to my cart.",
        plan,
        effect=lambda w: w.cart.update({product.name: 1}),
    )


def add_to_wish_list(world: World, draw: Random) -> Task:
    product = pick(draw, world.products)
    plan = (product.category, product.name, "Add to Wish List")
    return Task(
        f"Add the {product.name} to my wish list.",
        plan,
        effect=lambda w: w.wishes.append(product.name),
    )


def write_review(world: World, draw: Random) -> Task:
    product, stars, title = (
        pick(draw, world.products),
        draw.randrange(1, 6),
        draw.choice(REMARKS),
    )
    review = Review(product.name, ME, stars, title, approved=False)
    form = (str(stars), Type("Title", title), "Submit Review")
    return Task(
        f'Review the {product.name} with {stars} of 5 stars and the title "{title}".',
        (
            *search(product.name),
            "Write a Review",
            *form,
        ),
        effect=lambda w: w.reviews.update({str(len(w.reviews) + 1): review}),
    )


def change_phone(world: World, draw: Random) -> Task:
    phone = f"555-{draw.randrange(1000, 10_000)}"
    plan = ("Account", Type("Phone", phone, enter=True))
    return Task(
        f"Change my phone number to {phone}.", plan, effect=lambda w: setattr(w, "phone", phone)
    )


def cancel_order(world: World, draw: Random) -> Task | None:
    pending = [str(order.number) for order in world.list_orders(ME) if order.status == "pending"]
    if not pending:
        return None
    key = draw.choice(pending)
    plan = ("My Orders", f"Order {key}", "Cancel Order")
    return Task(
        f"Cancel my order {key}.",
        plan,
        effect=lambda w: setattr(w.orders[key], "status", "canceled"),
    )


# CMS


def orders_of_status(world: World, draw: Random) -> Task:
    status = draw.choice(STATUSES)
    orders = [order for order in world.orders.values() if order.status == status]
    plan = ("Orders", status, "Filter")
    return Task(f"How many orders have the status {status}?", plan, number(len(orders)))


def customer_of_order(world: World, draw: Random) -> Task:
    order = pick(draw, world.orders)
    plan = ("Orders", f"Order {order.number}")
    return Task(f"Who placed order {order.number}?", plan, including(order.customer, people(world)))


def email_of_customer(world: World, draw: Random) -> Task:
    customer = pick(draw, world.customers)
    plan = ("Customers", customer.name)
    return Task(f"What is the email address of {customer.name}?", plan, exact(customer.email))


def set_price(world: World, draw: Random) -> Task:
    product, cents = pick(draw, world.products), draw.randrange(500, 20_000, 25)
    plan = ("Products", product.name, Type("Price", money(cents)), "Save")
    effect = price_set(product.name, cents)
    return Task(f"Set the price of the {product.name} to {money(cents)}.", plan, effect=effect)


def set_stock(world: World, draw: Random) -> Task:
    product, stock = pick(draw, world.products), draw.randrange(60, 200)
    plan = ("Products", product.name, Type("Stock", str(stock), enter=True))
    key = slug(product.name)
    effect = lambda w: setattr(w.products[key], "stock", stock)  # noqa: E731
    return Task(f"Set the stock of the {product.name} to {stock}.", plan, effect=effect)


def draw_pending_review(world: World, draw: Random) -> tuple[str, str, Plan]:
    """Return a review's key, whose it is and of what, and the plan that opens it."""
    pending = [(key, review) for key, review in world.reviews.items() if not review.approved]
    key, review = draw.choice(pending)
    name = f"{review.product} by {review.author}"
    return key, name, ("Reviews", name)


def approve_review(world: World, draw: Random) -> Task:
    key, name, plan = draw_pending_review(world, draw)
    effect = lambda w: setattr(w.reviews[key], "approved", True)  # noqa: E731
    return Task(f"Approve the review of the {name}.", (*plan, "Approve"), effect=effect)


def delete_review(world: World, draw: Random) -> Task:
    key, name, plan = draw_pending_review(world, draw)
    effect = lambda w: w.reviews.pop(key)  # noqa: E731
    return Task(f"Delete the review of the {name}.", (*plan, "Delete"), effect=effect)


def set_status_of_order(world: World, draw: Random) -> Task:
    order, status = pick(draw, world.orders), draw.choice(STATUSES)
    plan = ("Orders", f"Order {order.number}", status, "Save")
    effect = lambda w: setattr(w.orders[str(order.number)], "status", status)  # noqa: E731
    return Task(f"Set the status of order {order.number} to {status}.", plan, effect=effect)


def set_group_of_customer(world: World, draw: Random) -> Task:
    customer = pick(draw, world.customers)
    group = draw.choice([group for group in GROUPS if group != customer.group])
    plan = ("Customers", customer.name, group, "Save")
    effect = lambda w: setattr(w.customers[slug(customer.name)], "group", group)  # noqa: E731
    return Task(f"Move the customer {customer.name} to the group {group}.", plan, effect=effect)
