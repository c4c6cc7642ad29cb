"""The templates of tasks, by category. Each draws one task in a world; None when this world has none of its kind.

Names that a plan clicks are those of the pages; an effect does the same to the records, without the sites.
"""

from collections.abc import Callable, Mapping, Sequence
from random import Random

from horizonrl.envs.webnav.task import Answer, Click, Home, Task, Type
from horizonrl.envs.webnav.world import (
    GROUPS,
    LABELS,
    ME,
    METRES_A_BLOCK,
    MODES,
    QUESTIONS,
    REMARKS,
    STATUSES,
    SUBJECTS,
    Issue,
    Place,
    Post,
    Review,
    World,
    money,
    slug,
)

Template = Callable[[World, Random], Task | None]


def exact(value: object) -> Answer:
    return Answer("exact", str(value))


def number(value: object) -> Answer:
    return Answer("number", str(value))


def including(value: str) -> Answer:
    return Answer("must_include", value)


# Shopping


def price_of_product(world: World, draw: Random) -> Task:
    product = draw.choice([*world.products.values()])
    plan = (Type("Search", product.name, enter=True),)
    return Task(f"What is the price of the {product.name}?", plan, number(f"{product.price_cents / 100:.2f}"))


def total_of_order(world: World, draw: Random) -> Task:
    order = draw.choice(world.orders_of(ME))
    plan = (Click("My Orders"), Click(f"Order {order.number}"))
    return Task(f"What is the total of my order {order.number}?", plan, number(f"{order.total_cents / 100:.2f}"))


def status_of_order(world: World, draw: Random) -> Task:
    order = draw.choice(world.orders_of(ME))
    return Task(f"What is the status of my order {order.number}?", (Click("My Orders"),), exact(order.status))


def cheapest_of_category(world: World, draw: Random) -> Task:
    category = draw.choice([*world.products.values()]).category
    cheapest = min(world.in_category(category), key=lambda product: product.price_cents)
    return Task(f"Which product in {category} is the cheapest?", (Click(category),), including(cheapest.name))


def author_of_review(world: World, draw: Random) -> Task:
    product = draw.choice([*world.products.values()])
    review = draw.choice(world.reviews_of(product))
    plan = (Type("Search", product.name, enter=True), Click(product.name))
    return Task(f"Who rated the {product.name} {review.stars} of 5?", plan, including(review.author))


def add_to_cart(world: World, draw: Random) -> Task:
    product = draw.choice([*world.products.values()])
    plan = (Type("Search", product.name, enter=True), Click(product.name), Click("Add to Cart"))
    return Task(f"Add the {product.name} to my cart.", plan, effect=lambda w: w.cart.update({product.name: 1}))


def add_to_wish_list(world: World, draw: Random) -> Task:
    product = draw.choice([*world.products.values()])
    plan = (Click(product.category), Click(product.name), Click("Add to Wish List"))
    return Task(f"Add the {product.name} to my wish list.", plan, effect=lambda w: w.wishes.append(product.name))


def write_review(world: World, draw: Random) -> Task:
    product, stars, title = draw.choice([*world.products.values()]), draw.randrange(1, 6), draw.choice(REMARKS)
    review = Review(product.name, ME, stars, title, approved=False)
    form = (Click(str(stars)), Type("Title", title), Click("Submit Review"))
    return Task(
        f'Review the {product.name} with {stars} of 5 stars and the title "{title}".',
        (Type("Search", product.name, enter=True), Click(product.name), Click("Write a Review"), *form),
        effect=lambda w: w.reviews.update({str(len(w.reviews) + 1): review}),
    )


def change_phone(world: World, draw: Random) -> Task:
    phone = f"555-{draw.randrange(1000, 10_000)}"
    plan = (Click("Account"), Type("Phone", phone, enter=True))
    return Task(f"Change my phone number to {phone}.", plan, effect=lambda w: setattr(w, "phone", phone))


def cancel_order(world: World, draw: Random) -> Task | None:
    pending = [str(order.number) for order in world.orders_of(ME) if order.status == "pending"]
    if not pending:
        return None
    key = draw.choice(pending)
    plan = (Click("My Orders"), Click(f"Order {key}"), Click("Cancel Order"))
    return Task(f"Cancel my order {key}.", plan, effect=lambda w: setattr(w.orders[key], "status", "canceled"))


# CMS


def orders_of_status(world: World, draw: Random) -> Task:
    status = draw.choice(STATUSES)
    found = [order for order in world.orders.values() if order.status == status]
    plan = (Click("Orders"), Click(status), Click("Filter"))
    return Task(f"How many orders have the status {status}?", plan, number(len(found)))


def customer_of_order(world: World, draw: Random) -> Task:
    order = draw.choice([*world.orders.values()])
    plan = (Click("Orders"), Click(f"Order {order.number}"))
    return Task(f"Who placed order {order.number}?", plan, including(order.customer))


def email_of_customer(world: World, draw: Random) -> Task:
    customer = draw.choice([*world.customers.values()])
    plan = (Click("Customers"), Click(customer.name))
    return Task(f"What is the email address of {customer.name}?", plan, exact(customer.email))


def set_price(world: World, draw: Random) -> Task:
    product, cents = draw.choice([*world.products.values()]), draw.randrange(500, 20_000, 25)
    plan = (Click("Products"), Click(product.name), Type("Price", money(cents)), Click("Save"))
    effect = _set_price(product.name, cents)
    return Task(f"Set the price of the {product.name} to {money(cents)}.", plan, effect=effect)


def set_stock(world: World, draw: Random) -> Task:
    product, stock = draw.choice([*world.products.values()]), draw.randrange(60, 200)
    plan = (Click("Products"), Click(product.name), Type("Stock", str(stock), enter=True))
    key = slug(product.name)
    effect = lambda w: setattr(w.products[key], "stock", stock)  # noqa: E731
    return Task(f"Set the stock of the {product.name} to {stock}.", plan, effect=effect)


def approve_review(world: World, draw: Random) -> Task:
    key, review = draw.choice([(key, review) for key, review in world.reviews.items() if not review.approved])
    plan = (Click("Reviews"), Click(f"{review.product} by {review.author}"), Click("Approve"))
    intent = f"Approve the review of the {review.product} by {review.author}."
    return Task(intent, plan, effect=lambda w: setattr(w.reviews[key], "approved", True))


def delete_review(world: World, draw: Random) -> Task:
    key, review = draw.choice([(key, review) for key, review in world.reviews.items() if not review.approved])
    plan = (Click("Reviews"), Click(f"{review.product} by {review.author}"), Click("Delete"))
    intent = f"Delete the review of the {review.product} by {review.author}."
    return Task(intent, plan, effect=lambda w: w.reviews.pop(key))


def set_status_of_order(world: World, draw: Random) -> Task:
    order, status = draw.choice([*world.orders.values()]), draw.choice(STATUSES)
    plan = (Click("Orders"), Click(f"Order {order.number}"), Click(status), Click("Save"))
    effect = lambda w: setattr(w.orders[str(order.number)], "status", status)  # noqa: E731
    return Task(f"Set the status of order {order.number} to {status}.", plan, effect=effect)


def set_group_of_customer(world: World, draw: Random) -> Task:
    customer = draw.choice([*world.customers.values()])
    group = draw.choice([group for group in GROUPS if group != customer.group])
    plan = (Click("Customers"), Click(customer.name), Click(group), Click("Save"))
    effect = lambda w: setattr(w.customers[slug(customer.name)], "group", group)  # noqa: E731
    return Task(f"Move the customer {customer.name} to the group {group}.", plan, effect=effect)


# Maps


def address_of_place(world: World, draw: Random) -> Task:
    place = draw.choice([*world.places.values()])
    return Task(f"What is the address of the {place.name}?", _find(place), including(place.address))


def closing_time(world: World, draw: Random) -> Task:
    place = draw.choice([*world.places.values()])
    return Task(f"When does the {place.name} close?", _find(place), including(place.closes))


def minutes_between(world: World, draw: Random) -> Task:
    start, end = draw.sample([*world.places.values()], 2)
    mode = draw.choice([*MODES])
    chosen = () if mode == "walk" else (Click(mode),)
    plan = (Click("Directions"), Type("From", start.name), Type("To", end.name), *chosen, Click("Go"))
    intent = f"How many minutes is it from the {start.name} to the {end.name} if I {mode}?"
    return Task(intent, plan, number(start.blocks_to(end) * MODES[mode]))


def nearest_of_kind(world: World, draw: Random) -> Task | None:
    place = draw.choice([*world.places.values()])
    kind = draw.choice(sorted({other.kind for other in world.places.values()} - {place.kind}))
    near = sorted(place.blocks_to(other) for other in world.places.values() if other is not place)[:9]
    found = sorted((place.blocks_to(other), other.name) for other in world.of_kind(kind))
    if found[0][0] not in near or (len(found) > 1 and found[0][0] == found[1][0]):
        return None  # It is not listed, or there are two.
    return Task(
        f"Which {kind} is nearest to the {place.name}?", (*_find(place), Click("Nearby")), including(found[0][1])
    )


def metres_between(world: World, draw: Random) -> Task | None:
    place = draw.choice([*world.places.values()])
    others = sorted((place.blocks_to(other), other.name) for other in world.places.values() if other is not place)
    blocks, name = draw.choice(others[:5])
    intent = f"How many metres is the {name} away from the {place.name}?"
    return Task(intent, (*_find(place), Click("Nearby")), number(blocks * METRES_A_BLOCK))


def places_of_kind(world: World, draw: Random) -> Task:
    kind = draw.choice([*world.places.values()]).kind
    return Task(f"How many {kind}s are on the map?", (Click(f"{kind}s"),), number(len(world.of_kind(kind))))


def save_place(world: World, draw: Random) -> Task:
    place = draw.choice([*world.places.values()])
    plan = (*_find(place), Click("Save Place"))
    return Task(f"Save the {place.name}.", plan, effect=lambda w: w.saved.append(place.name))


# GitLab and Reddit


def create_issue(world: World, draw: Random) -> Task:
    name, label = draw.choice([*world.repos]), draw.choice(LABELS)
    title = f"Support for {draw.choice(SUBJECTS)}"
    chosen = () if label == LABELS[0] else (Click(label),)
    form = (Click("New Issue"), Type("Title", title), *chosen, Click("Create Issue"))
    return Task(
        f'Create an issue in {name} with the title "{title}" and the label {label}.',
        (Click(name), Click("Issues"), *form),
        effect=lambda w: w.repos[name].issues.append(Issue(title, ME, label)),
    )


def close_issue(world: World, draw: Random) -> Task | None:
    name, index, issue = _issue(world, draw)
    if not issue.open:
        return None
    plan = (Click(name), Click("Issues"), Click(issue.title), Click("Close Issue"))
    effect = lambda w: setattr(w.repos[name].issues[index], "open", False)  # noqa: E731
    return Task(f'Close the issue "{issue.title}" of {name}.', plan, effect=effect)


def assign_issue(world: World, draw: Random) -> Task:
    name, index, issue = _issue(world, draw)
    member = draw.choice([*world.repos[name].commits])
    plan = (Click(name), Click("Issues"), Click(issue.title), Click(member), Click("Save"))
    effect = lambda w: setattr(w.repos[name].issues[index], "assignee", member)  # noqa: E731
    return Task(f'Assign the issue "{issue.title}" of {name} to {member}.', plan, effect=effect)


def open_issues_of_label(world: World, draw: Random) -> Task:
    name, label = draw.choice([*world.repos]), draw.choice(LABELS)
    found = [issue for issue in world.repos[name].issues if issue.open and issue.label == label]
    plan = (Click(name), Click("Issues"))
    return Task(f"How many open issues of {name} have the label {label}?", plan, number(len(found)))


def author_of_issue(world: World, draw: Random) -> Task:
    name, _, issue = _issue(world, draw)
    plan = (Click(name), Click("Issues"), Click(issue.title))
    return Task(f'Who wrote the issue "{issue.title}" of {name}?', plan, including(issue.author))


def top_committer(world: World, draw: Random) -> Task:
    name = draw.choice([*world.repos])
    commits = world.repos[name].commits
    top = max(commits, key=lambda member: commits[member])
    return Task(f"Who has the most commits in {name}?", (Click(name), Click("Contributors")), including(top))


def stars_of_repo(world: World, draw: Random) -> Task:
    name = draw.choice([*world.repos])
    return Task(f"How many stars has {name}?", (Click(name),), number(world.repos[name].stars))


def star_repo(world: World, draw: Random) -> Task:
    name = draw.choice([*world.repos])

    def effect(fresh: World) -> None:
        fresh.repos[name].stars += 1
        fresh.repos[name].starred = True

    return Task(f"Star {name}.", (Click(name), Click("Star")), effect=effect)


def upvote_post(world: World, draw: Random) -> Task:
    forum, index, post = _post(world, draw)

    def effect(fresh: World) -> None:
        fresh.forums[forum][index].votes += 1
        fresh.forums[forum][index].voted = True

    plan = (Click(forum), Click(post.title), Click("Upvote"))
    return Task(f'Upvote the post "{post.title}" in {forum}.', plan, effect=effect)


def comment_on_post(world: World, draw: Random) -> Task:
    forum, index, post = _post(world, draw)
    words = draw.choice(REMARKS)
    plan = (Click(forum), Click(post.title), Type("Comment", words, enter=True))
    effect = lambda w: w.forums[forum][index].comments.append((ME, words))  # noqa: E731
    return Task(f'Reply "{words}" to the post "{post.title}" in {forum}.', plan, effect=effect)


def create_post(world: World, draw: Random) -> Task:
    forum, title = draw.choice([*world.forums]), draw.choice(QUESTIONS).format(draw.choice(SUBJECTS))
    plan = (Click(forum), Click("New Post"), Type("Title", title, enter=True))
    return Task(f'Create a post in {forum} with the title "{title}".', plan, effect=_posted(forum, title))


def top_post(world: World, draw: Random) -> Task:
    forum = draw.choice([*world.forums])
    top = max(world.forums[forum], key=lambda post: post.votes)
    return Task(f"What is the title of the post with the most votes in {forum}?", (Click(forum),), including(top.title))


# Several sites


def post_price(world: World, draw: Random) -> Task:
    product, forum = draw.choice([*world.products.values()]), draw.choice([*world.forums])
    look = (Click("Shop"), Type("Search", product.name, enter=True), Home())
    write = (Click("Forum"), Click(forum), Click("New Post"), Type("Title", money(product.price_cents), enter=True))
    intent = f"Create a post in the forum {forum} whose title is the price of the {product.name}, such as $12.50."
    return Task(intent, (*look, *write), effect=_posted(forum, money(product.price_cents)))


def report_address(world: World, draw: Random) -> Task:
    place, name = draw.choice([*world.places.values()]), draw.choice([*world.repos])
    look = (Click("Map"), *_find(place), Home(), Click("Code"), Click(name), Click("Issues"))
    write = (Click("New Issue"), Type("Title", place.address), Click("Create Issue"))
    return Task(
        f"Create an issue in the repository {name} whose title is the address of the {place.name}; keep the label.",
        (*look, *write),
        effect=lambda w: w.repos[name].issues.append(Issue(place.address, ME, LABELS[0])),
    )


def match_price(world: World, draw: Random) -> Task:
    one, other = draw.sample([*world.products.values()], 2)
    look = (Click("Shop"), Type("Search", other.name, enter=True), Home(), Click("Shop Admin"), Click("Products"))
    write = (Click(one.name), Type("Price", money(other.price_cents)), Click("Save"))
    intent = f"Set the price of the {one.name} to that of the {other.name}."
    return Task(intent, (*look, *write), effect=_set_price(one.name, other.price_cents))


def comment_customer_email(world: World, draw: Random) -> Task:
    customer = draw.choice([*world.customers.values()])
    forum, index, post = _post(world, draw)
    look = (Click("Shop Admin"), Click("Customers"), Click(customer.name), Home(), Click("Forum"), Click(forum))
    write = (Click(post.title), Type("Comment", customer.email, enter=True))
    return Task(
        f'Reply to the post "{post.title}" in the forum {forum} with the email of the customer {customer.name}.',
        (*look, *write),
        effect=lambda w: w.forums[forum][index].comments.append((ME, customer.email)),
    )


def _find(place: Place) -> tuple[Type, Click]:
    return Type("Search", place.name, enter=True), Click(place.name)


def _issue(world: World, draw: Random) -> tuple[str, int, Issue]:
    name = draw.choice([*world.repos])
    index, issue = draw.choice([*enumerate(world.repos[name].issues)])
    return name, index, issue


def _post(world: World, draw: Random) -> tuple[str, int, Post]:
    forum = draw.choice([*world.forums])
    index, post = draw.choice([*enumerate(world.forums[forum])])
    return forum, index, post


def _set_price(name: str, cents: int) -> Callable[[World], None]:
    return lambda world: setattr(world.products[slug(name)], "price_cents", cents)


def _posted(forum: str, title: str) -> Callable[[World], None]:
    return lambda world: world.forums[forum].append(Post(title, ME, 1, voted=True))


TEMPLATES: Mapping[str, Mapping[str, Sequence[Template]]] = {
    "Shopping": {
        "shop": (
            price_of_product,
            total_of_order,
            status_of_order,
            cheapest_of_category,
            author_of_review,
            add_to_cart,
            add_to_wish_list,
            write_review,
            change_phone,
            cancel_order,
        )
    },
    "CMS": {
        "admin": (
            orders_of_status,
            customer_of_order,
            email_of_customer,
            set_price,
            set_stock,
            approve_review,
            delete_review,
            set_status_of_order,
            set_group_of_customer,
        )
    },
    "Maps": {
        "map": (
            address_of_place,
            closing_time,
            minutes_between,
            nearest_of_kind,
            metres_between,
            places_of_kind,
            save_place,
        )
    },
    "GitlabReddit": {
        "code": (
            create_issue,
            close_issue,
            assign_issue,
            open_issues_of_label,
            author_of_issue,
            top_committer,
            stars_of_repo,
            star_repo,
        ),
        "forum": (upvote_post, comment_on_post, create_post, top_post),
    },
    "MultiSite": {"home": (post_price, report_address, match_price, comment_customer_email)},
}
"""By category and the site that a task begins on; `home` lists them all."""
