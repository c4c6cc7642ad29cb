import re

import pytest

from horizonrl.envs import registry
from horizonrl.envs.worlds.shop.catalogue import Product, Wish, load_products
from horizonrl.envs.worlds.shop.env import BUY, Shop, Visit

RUG = Product(
    "B1",
    "rug",
    "Alvo A1 round rug",
    ("round", "washable", "woollen"),
    {"size": ("small", "large")},
    40.0,
)


def test_no_wish_is_of_two_splits() -> None:
    split_by_wish: dict[str, str] = {}
    for task in registry.select("shop"):
        assert split_by_wish.setdefault(wish_of(task.task_id), task.split) == task.split, task


def wish_of(task_id: str) -> str:
    """Return the wish as the first observation has it, whatever the order of its attributes."""
    text = Shop(style="compact", format="plain").begin(task_id)[0]
    (wish,) = re.findall("Wish: (.*)", text)
    return " ".join(sorted(wish.replace(",", "").split()))


def visit(task_id: str = "shop-0000") -> Visit:
    return Shop(style="compact").begin(task_id)[1]


def test_the_expert_buys_what_is_wished_in_every_test_task_and_in_a_tenth_of_the_others() -> None:
    tested = registry.select("shop", "test")
    assert (len(tested), len(registry.select("shop"))) == (200, 4_130)
    for task in (*tested, *registry.select("shop", "train")[::10]):
        shopping, step, taken = visit(task.task_id), None, 0
        while step is None or not step.terminated:
            assert taken < 15, task
            step, taken = shopping.follow(shopping.advise().action), taken + 1
        assert (step.reward, step.success) == (1, True), task


@pytest.mark.parametrize(
    ("attributes", "size", "most", "score"),
    [
        (("round", "washable"), "large", 50, 1.0),
        (("round", "vintage"), "large", 50, 3 / 4),
        (("round", "washable"), "small", 50, 3 / 4),
        (("round", "washable"), "large", 40, 3 / 4),
        (("solar", "vintage"), "small", 30, 0.0),
    ],
)
def test_the_reward_is_the_share_of_what_was_wished(
    attributes: tuple[str, ...], size: str, most: int, score: float
) -> None:
    assert Wish("rug", attributes, {"size": size}, most, "").score(RUG, {"size": "large"}) == score


def test_another_kind_of_product_earns_nothing() -> None:
    assert Wish("desk", ("round",), {}, 50, "").score(RUG, {}) == 0


def test_one_searches_from_the_search_page_and_clicks_what_is_there() -> None:
    shopping = visit()
    assert shopping.follow("click[Buy Now]").observation.startswith(
        "There is no button 'Buy Now' here."
    )
    found = shopping.follow("search[vegan shoes]").observation
    assert found.startswith("[Back to Search] [Next >] Page 1, 50 results")
    assert shopping.follow("search[rug]").observation.startswith(
        "You can search from the search page only."
    )
    second = shopping.follow("click[next >]").observation
    assert second.startswith("[Back to Search] [< Prev] [Next >] Page 2")
    number = second.split("\n")[1][1:8]
    assert load_products()[number].title in shopping.follow(f"click[{number}]").observation
    assert "This " in shopping.follow("click[Description]").observation
    assert shopping.follow("click[< Prev]").observation == second
    assert shopping.follow("click[Back to Search]").observation.startswith("Wish: ")


def test_an_option_is_chosen_anew_and_forgotten_when_one_leaves() -> None:
    shopping = visit()
    shopping.follow("search[rug]")
    rug = next(button for button in shopping.buttons() if button.startswith("B1"))
    page = shopping.follow(f"click[{rug}]").observation
    first, second = load_products()[rug].options["color"][:2]
    assert f"chosen: {first}" in shopping.follow(f"click[{first}]").observation
    assert f"chosen: {second}" in shopping.follow(f"click[{second}]").observation
    shopping.follow("click[< Prev]")
    assert shopping.follow(f"click[{rug}]").observation == page
    assert shopping.follow(f"click[{BUY}]").terminated
