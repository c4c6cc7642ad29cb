"""The map: places, what is near them, and the way from one to another (WebArena's Map)."""

from collections.abc import Sequence

from horizonrl.envs.worlds.webnav.page import Element, button, combobox, link, text, textbox
from horizonrl.envs.worlds.webnav.sites import Body, Site, make_list, query
from horizonrl.envs.worlds.webnav.world import METRES_A_BLOCK, MODES, Place, slug


class Map(Site):
    host, title = "map", "Map"

    def nav(self) -> Sequence[Element]:
        kinds = dict.fromkeys(place.kind for place in self.world.places.values())
        links = [link(f"{kind}s", f"/kind/{kind}") for kind in kinds]
        pages = [link("Directions", "/directions"), link("Saved Places", "/saved")]
        return [textbox("Search"), button("Search", "/search"), *links, *pages]

    def get(self, path: list[str], query: dict[str, str]) -> Body | None:
        places = self.world.places
        match path:
            case ["search"]:
                words = query.get("q", "").lower()
                return "Search results", _links(
                    [place for place in places.values() if words in place.name.lower()]
                )
            case ["kind", kind] if matches := self.world.of_kind(kind):
                return f"{kind}s", _links(matches)
            case ["saved"]:
                return "Saved Places", _links([places[slug(name)] for name in self.world.saved])
            case ["place", key] if place := places.get(key):
                facts = [text(place.address), text(f"Open 9:00 to {place.closes}")]
                uses = [
                    button("Save Place", f"/place/{key}/save"),
                    link("Nearby", f"/place/{key}/nearby"),
                ]
                return place.name, [*facts, *uses]
            case ["place", key, "nearby"] if place := places.get(key):
                return f"Near {place.name}", self._nearby(place)
            case ["directions"]:
                mode = combobox("Mode", tuple(MODES), "walk")
                return "Directions", [
                    textbox("From"),
                    textbox("To"),
                    mode,
                    button("Go", "/directions"),
                ]
            case ["route"]:
                return "Route", self._route(query)
        return None

    def post(self, path: list[str], fields: dict[str, str]) -> tuple[str, str] | None:
        match path:
            case ["search"]:
                return query("/search", q=fields.get("Search", "")), ""
            case ["place", key, "save"]:
                name = self.world.places[key].name
                self.world.saved = [*(saved for saved in self.world.saved if saved != name), name]
                return f"/place/{key}", "The place is saved."
            case ["directions"]:
                start, end = fields["From"], fields["To"]
                return query(
                    "/route", start=slug(start.strip()), end=slug(end.strip()), mode=fields["Mode"]
                ), ""
        return None

    def _nearby(self, place: Place) -> Sequence[Element]:
        """List the ten nearest places with their distances."""
        others = sorted(
            (place.blocks_to(other), other.name) for other in self.world.places.values()
        )
        return [
            element
            for blocks, name in others[1:11]
            for element in (
                link(name, f"/place/{slug(name)}"),
                text(f"{blocks * METRES_A_BLOCK} m"),
            )
        ]

    def _route(self, query: dict[str, str]) -> Sequence[Element]:
        start, end = (self.world.places.get(query.get(name, "")) for name in ("start", "end"))
        if start is None or end is None or query.get("mode") not in MODES:
            return [text("There is no such place. Write the names as the map does.")]
        blocks = start.blocks_to(end)
        return [
            text(f"From {start.name} to {end.name}, {query['mode']}"),
            text(f"{blocks * MODES[query['mode']]} minutes, {blocks * METRES_A_BLOCK} m"),
        ]


def _links(places: Sequence[Place]) -> Sequence[Element]:
    return make_list([link(place.name, f"/place/{slug(place.name)}") for place in places])
