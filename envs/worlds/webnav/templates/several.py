"""Templates that need several sites."""

from random import Random

from horizonrl.envs.worlds.webnav.task import Home, Task, Type
from horizonrl.envs.worlds.webnav.templates.shared import (
    draw_post,
    pick,
    post_added,
    price_set,
    search,
)
from horizonrl.envs.worlds.webnav.world import LABELS, ME, Issue, World, money


def post_price(world: World, draw: Random) -> Task:
    product, forum = pick(draw, world.products), draw.choice([*world.forums])
    look = ("Shop", Type("Search", product.name, enter=True), Home())
    write = (
        "Forum",
        forum,
        "New Post",
        Type("Title", money(product.price_cents), enter=True),
    )
    intent = f"Create a post in the forum {forum} whose title is the price of the {product.name}, such as $12.50."
    return Task(intent, (*look, *write), effect=post_added(forum, money(product.price_cents)))


def report_address(world: World, draw: Random) -> Task:
    place, name = pick(draw, world.places), draw.choice([*world.repos])
    look = ("Map", *search(place.name), Home(), "Code", name, "Issues")
    write = ("New Issue", Type("Title", place.address), "Create Issue")
    return Task(
        f"Create an issue in the repository {name} whose title is the address of the {place.name}; keep the label.",
        (*look, *write),
        effect=lambda w: w.repos[name].issues.append(Issue(place.address, ME, LABELS[0])),
    )


def match_price(world: World, draw: Random) -> Task:
    one, other = draw.sample([*world.products.values()], 2)
    look = (
        "Shop",
        Type("Search", other.name, enter=True),
        Home(),
        "Shop Admin",
        "Products",
    )
    write = (one.name, Type("Price", money(other.price_cents)), "Save")
    intent = f"Set the price of the {one.name} to that of the {other.name}."
    return Task(intent, (*look, *write), effect=price_set(one.name, other.price_cents))


def comment_customer_email(world: World, draw: Random) -> Task:
    customer = pick(draw, world.customers)
    forum, index, post = draw_post(world, draw)
    look = (
        "Shop Admin",
        "Customers",
        customer.name,
        Home(),
        "Forum",
        forum,
    )
    write = (post.title, Type("Comment", customer.email, enter=True))
    return Task(
        f'Reply to the post "{post.title}" in the forum {forum} with the email of the customer {customer.name}.',
        (*look, *write),
        effect=lambda w: w.forums[forum][index].comments.append((ME, customer.email)),
    )
