import pytest

from horizonrl.envs.worlds.webnav.actions import read_command
from horizonrl.envs.worlds.webnav.browser import HOME, Browser, Refused
from horizonrl.envs.worlds.webnav.community import Code, Forum
from horizonrl.envs.worlds.webnav.page import Style
from horizonrl.envs.worlds.webnav.places import Map
from horizonrl.envs.worlds.webnav.shop import Admin, Shop
from horizonrl.envs.worlds.webnav.sites import SiteWeb
from horizonrl.envs.worlds.webnav.world import ME, SIZES, World, build_world


class User:
    """Someone in front of the browser, who calls things by their names."""

    def __init__(self, start: str = HOME, style: Style = "compact") -> None:
        self.world: World = build_world("a test", SIZES[style])
        sites = [site(self.world) for site in (Shop, Admin, Map, Forum, Code)]
        self.browser = Browser(SiteWeb(sites, style), start, style)

    def do(self, action: str) -> str:
        """Take an action, in which `{name}` stands for the number of what is called so; return what is seen then."""
        for line in self.browser.observe().splitlines():
            if "[" in line and "'" in line:
                number, name = line.strip().split("]")[0].strip("["), line.split("'")[1]
                kind = line.split("]")[1].split()[0]
                action = action.replace(f"{{{name}}}", number).replace(f"{{{kind} {name}}}", number)
        command = read_command(action)
        assert command, action
        self.browser.act(*command)
        return self.browser.observe()


def refused(user: User, action: str) -> str:
    before = user.browser.observe()
    with pytest.raises(Refused) as caught:
        user.do(action)
    assert user.browser.observe() == before
    return str(caught.value)


def test_the_full_style_reads_like_webarena() -> None:
    user = User("http://shop/account", "full")
    assert user.browser.observe().splitlines()[:4] == [
        "Tab 0 (current): Account",
        "URL: http://shop/account",
        "[1] RootWebArea 'Account' focused: True",
        "\t[2] textbox 'Search' required: False",
    ]


def test_links_lead_on_and_the_history_leads_back() -> None:
    user = User()
    assert user.do("click [{Shop}]").startswith("Shop\n")
    assert user.do("click [{Cart}]").startswith("Cart\n")
    assert user.do("go_back").startswith("Shop\n")
    assert user.do("go_forward").startswith("Cart\n")
    user.do("go_back")
    user.do("click [{Account}]")
    assert refused(user, "go_forward") == "There is no page after this one."


def test_every_tab_has_its_own_page() -> None:
    user = User("http://shop/cart")
    assert user.do("new_tab").startswith("Home\n")
    user.do("click [{Map}]")
    assert user.do("tab_focus [0]").startswith("Cart\n")
    assert user.do("tab_focus [1]").startswith("Map\n")
    assert user.do("close_tab").startswith("Cart\n")
    assert "the least is 1" in refused(user, "close_tab")
    for _ in range(7):
        user.do("new_tab")
    assert "the most is 8" in refused(user, "new_tab")


def test_a_long_page_is_seen_by_scrolling() -> None:
    user = User("http://admin/products", "full")
    first = user.browser.observe()
    seen = [first, user.do("scroll [down]")]
    names = [product.name for product in user.world.products.values()]
    assert "lines below: scroll [down])" in first
    assert "lines above: scroll [up])" in seen[1]
    assert all(any(f"'{name}'" in part for part in seen) for name in names)
    assert user.do("scroll [up]") == first


@pytest.mark.parametrize(
    ("action", "why"),
    [
        ("click [99]", "There is no element [99] on the page."),
        ("hover [x]", "There is no element [x] on the page."),
        ("type [2] [tea] [1]", "Element [2] is a button, not a textbox."),
        ("type [1] [tea] [yes]", "A text has at most 500 characters; the last argument is 0 or 1."),
        ("scroll [left]", "Scroll [down] or [up]."),
        ("goto [http://[]", "This is no address. One is http://home/ which lists the sites."),
        ("tab_focus [7]", "There are 1 tabs; the most is 8, the least is 1."),
    ],
)
def test_an_action_that_cannot_be_taken_says_why_and_changes_nothing(action: str, why: str) -> None:
    assert refused(User("http://shop/"), action) == why


@pytest.mark.parametrize(
    "url", ["http://nowhere/", "shop/orders/1", "http://shop/product/x/cart", "http://code/a/b/c"]
)
def test_an_address_without_a_page_is_a_page_that_says_so(url: str) -> None:
    user = User("http://shop/")
    before = build_world("a test", SIZES["compact"])
    assert user.do(f"goto [{url}]") == "Not found\nThere is no such page.\n[1] link 'Home'"
    assert user.world == before
    assert user.do("click [{Home}]").startswith("Home\n")


def test_enter_presses_the_button_after_the_field() -> None:
    user = User("http://shop/")
    user.do("type [{textbox Search}] [zzz] [0]")
    assert user.do("press [Enter]") == "Search results\nNothing here."


def test_what_was_typed_is_gone_when_the_page_is_opened_again() -> None:
    user = User("http://shop/account")
    assert "'5'" in user.do("type [{Phone}] [5] [0]")
    user.do("goto [http://shop/]")
    assert user.world.phone in user.do("go_back")


def test_a_page_that_is_out_of_date_breaks_nothing() -> None:
    user = User("http://admin/reviews")
    title = user.browser.observe().splitlines()[1].split("'")[1]
    user.do(f"click [{{{title}}}]")
    url = user.browser.tab.page.url
    user.do("new_tab")
    user.do(f"goto [{url}]")
    user.do("click [{Delete}]")
    left = len(user.world.reviews)
    user.do("tab_focus [0]")
    user.do("click [{Approve}]")
    assert len(user.world.reviews) == left
    assert user.do(f"goto [{url}]").startswith("Not found")


def test_a_price_that_is_none_is_not_saved() -> None:
    user = User("http://admin/products")
    product = next(iter(user.world.products.values()))
    cents = product.price_cents
    user.do(f"click [{{{product.name}}}]")
    assert "Not saved" in user.do("type [{Price}] [cheap] [1]")
    assert product.price_cents == cents


def test_another_customers_order_is_not_mine_to_see() -> None:
    user = User("http://shop/orders")
    other = next(order for order in user.world.orders.values() if order.customer != ME)
    assert str(other.number) not in user.browser.observe()
    assert user.do(f"goto [http://shop/orders/{other.number}]").startswith("Not found")


@pytest.mark.parametrize(
    "action", ["", "click 3", "click [3", "drag [3]", "type [3]", "type [3] [] [1]", "back"]
)
def test_words_that_are_no_action_are_none(action: str) -> None:
    assert read_command(action) is None


def test_typing_presses_enter_unless_told_not_to() -> None:
    expected = ("type", {"id": "3", "text": "a b", "press_enter_after": "1"})
    assert read_command("```type [3] [a b]```") == read_command("type [3] [a b] [1]") == expected
    assert read_command("stop []") == ("stop", {"answer": " "})
