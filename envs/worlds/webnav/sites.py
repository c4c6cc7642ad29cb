"""What all sites share, and the web that they form together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar
from urllib.parse import parse_qsl, quote, urlsplit

from horizonrl.envs.worlds.webnav.browser import HOME
from horizonrl.envs.worlds.webnav.page import Element, Page, Style, link, text
from horizonrl.envs.worlds.webnav.world import World

Body = tuple[str, Sequence[Element]]
"""A title, and what stands below the navigation."""


@dataclass
class Site:
    """One server over the world. Its first page is its navigation, which the full style repeats on every page."""

    host: ClassVar[str]
    title: ClassVar[str]
    world: World

    def nav(self) -> Sequence[Element]:
        """Return the links and fields of the first page."""
        raise NotImplementedError

    def get(self, path: list[str], query: dict[str, str]) -> Body | None:
        """Return the page at a path, or None if there is none."""
        raise NotImplementedError

    def post(self, path: list[str], fields: dict[str, str]) -> tuple[str, str] | None:
        """Process a form; return the path of the next page and a notice, or None if the path takes no form."""
        raise NotImplementedError


class SiteWeb:
    """All sites of one world, and http://home/ which lists them."""

    def __init__(self, sites: Sequence[Site], style: Style) -> None:
        self._sites = {site.host: site for site in sites}
        self._style = style

    def get(self, url: str) -> Page:
        host, path, query = _split(url)
        if url.rstrip("/") == HOME.rstrip("/"):
            return Page(
                HOME,
                "Home",
                tuple(link(site.title, f"http://{site.host}/") for site in self._sites.values()),
            )
        site = self._sites.get(host)
        if site and not path:
            return Page(url, site.title, tuple(site.nav()))
        if site is None or (body := site.get(path, query)) is None:
            return Page(url, "Not found", (text("There is no such page."), link("Home", HOME)))
        title, elements = body
        return Page(url, title, (*(site.nav() if self._style == "full" else ()), *elements))

    def post(self, url: str, fields: dict[str, str]) -> tuple[str, str]:
        host, path, _ = _split(url)
        went = self._sites[host].post(path, fields)
        return (f"http://{host}{went[0]}", went[1]) if went else (url, "")


def query(path: str, **values: str) -> str:
    """Return a path with a query."""
    return f"{path}?" + "&".join(
        f"{name}={quote(value, errors='replace')}" for name, value in values.items()
    )


def make_list(elements: Sequence[Element]) -> Sequence[Element]:
    """Return the elements, or a text that there are none."""
    return elements or [text("Nothing here.")]


def _split(url: str) -> tuple[str, list[str], dict[str, str]]:
    parts = urlsplit(url)
    return (
        parts.netloc,
        [part for part in parts.path.split("/") if part],
        dict(parse_qsl(parts.query)),
    )
