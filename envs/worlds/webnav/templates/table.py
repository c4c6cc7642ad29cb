"""Which templates there are. Each draws one task in a world, or returns None if the world has no task of its kind."""

from collections.abc import Callable, Mapping, Sequence
from random import Random

from horizonrl.envs.worlds.webnav.task import Task
from horizonrl.envs.worlds.webnav.templates import community, maps, several, shopping
from horizonrl.envs.worlds.webnav.world import World

Template = Callable[[World, Random], Task | None]

TEMPLATES: Mapping[str, Mapping[str, Sequence[Template]]] = {
    "Shopping": {
        "shop": (
            shopping.price_of_product,
            shopping.total_of_order,
            shopping.status_of_order,
            shopping.cheapest_of_category,
            shopping.author_of_review,
            shopping.add_to_cart,
            shopping.add_to_wish_list,
            shopping.write_review,
            shopping.change_phone,
            shopping.cancel_order,
        )
    },
    "CMS": {
        "admin": (
            shopping.orders_of_status,
            shopping.customer_of_order,
            shopping.email_of_customer,
            shopping.set_price,
            shopping.set_stock,
            shopping.approve_review,
            shopping.delete_review,
            shopping.set_status_of_order,
            shopping.set_group_of_customer,
        )
    },
    "Maps": {
        "map": (
            maps.address_of_place,
            maps.closing_time,
            maps.minutes_between,
            maps.nearest_of_kind,
            maps.metres_between,
            maps.places_of_kind,
            maps.save_place,
        )
    },
    "GitlabReddit": {
        "code": (
            community.create_issue,
            community.close_issue,
            community.assign_issue,
            community.open_issues_of_label,
            community.author_of_issue,
            community.top_committer,
            community.stars_of_repo,
            community.star_repo,
        ),
        "forum": (
            community.upvote_post,
            community.comment_on_post,
            community.create_post,
            community.top_post,
        ),
    },
    "MultiSite": {
        "home": (
            several.post_price,
            several.report_address,
            several.match_price,
            several.comment_customer_email,
        )
    },
}
"""The templates by category and by the site on which a task begins; `home` lists all sites."""
