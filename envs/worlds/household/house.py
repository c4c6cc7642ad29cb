"""A room with its furniture and things, and what the commands do. Texts and verbs are modelled on ALFWorld's.

A place is a piece of furniture such as `cabinet 2`. A thing is in or on a place, or the agent carries it, one at a
time. A command that cannot be followed changes nothing.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from horizonrl.envs.formats import Command, match_command
from horizonrl.envs.game import words

COMMANDS = (
    Command("go_to", "go to {place}", "go to a place and see what is there"),
    Command("take", "take {thing} from {place}", "pick up a thing; you carry one at a time"),
    Command("put", "put {thing} in/on {place}", "put down what you carry"),
    Command("open", "open {place}", "open the place where you are"),
    Command("close", "close {place}", "close the place where you are"),
    Command("toggle", "toggle {thing}", "switch a lamp that is where you are on or off"),
    Command("clean", "clean {thing} with {place}", "clean what you carry at a sinkbasin"),
    Command("heat", "heat {thing} with {place}", "heat what you carry at a microwave"),
    Command("cool", "cool {thing} with {place}", "cool what you carry at a fridge"),
    Command("examine", "examine {thing}", "look at a thing or a place"),
    Command("inventory", "inventory", "see what you carry"),
)
CLOSED = words("cabinet drawer fridge microwave safe")
"""The kinds of places that have a door. The doors are closed at first."""
LAMP = "desklamp 1"
NOTHING = "Nothing happens."

_MADE = {"clean": ("sinkbasin", "clean"), "heat": ("microwave", "hot"), "cool": ("fridge", "cool")}
"""By verb: the kind of place that it needs, and the state that it produces."""


@dataclass(slots=True)
class Place:
    name: str
    is_open: bool
    things: list[str] = field(default_factory=list)
    seen: bool = False
    """Whether the agent has seen what is there."""

    @property
    def has_door(self) -> bool:
        return parse_kind(self.name) in CLOSED

    def describe(self) -> str:
        """Return what the agent sees there, and remember that it has seen it."""
        if not self.is_open:
            return f"The {self.name} is closed."
        self.seen = True
        return (
            f"{'In' if self.has_door else 'On'} the {self.name}, you see {list_names(self.things)}."
        )


class House:
    """The state of one episode."""

    def __init__(self, places: Sequence[Place]) -> None:
        self.places = {place.name: place for place in places}
        self.here: Place | None = None
        self.carried: str | None = None
        self.states: dict[str, str] = {}
        """The states of things that are clean, hot or cool."""
        self.lamp_on = False

    def obey(self, action: str) -> str:
        """Follow a command and return what the agent sees."""
        plain = re.sub(r" (in/on|in|on) ", " in/on ", " ".join(action.lower().split()).strip(" ."))
        # ALFWorld's word for it, which `choices` offers.
        plain = re.sub(r"^use ", "toggle ", plain)
        match match_command(plain, COMMANDS):
            case ("go_to", {"place": place}) if place in self.places:
                self.here = self.places[place]
                return f"You arrive at the {place}. {self.here.describe()}"
            case ("take", {"thing": thing, "place": place}):
                return self._take(thing, place)
            case ("put", {"thing": thing, "place": place}):
                return self._put(thing, place)
            case (("open" | "close") as verb, {"place": place}):
                return self._turn(verb, place)
            case (("clean" | "heat" | "cool") as verb, {"thing": thing, "place": place}):
                return self._make(verb, thing, place)
            case ("toggle", {"thing": thing}) if (
                thing == LAMP and self.here and LAMP in self.here.things
            ):
                self.lamp_on = not self.lamp_on
                return f"You turn {'on' if self.lamp_on else 'off'} the {LAMP}."
            case ("examine", {"thing": thing}):
                return self._examine(thing)
            case ("inventory", _):
                return f"You carry {list_names([self.carried] if self.carried else [])}."
        return NOTHING

    def choices(self) -> list[str]:
        """Return the actions that have an effect or show something now, in ALFWorld's words."""
        here, carried = self.here, self.carried
        choices = [f"go to {place}" for place in self.places if here is None or place != here.name]
        if here is not None:
            choices += self._choices_at(here)
        if carried is not None:
            choices.append(f"examine {carried}")
        return [*choices, "inventory"]

    def _choices_at(self, here: Place) -> list[str]:
        carried, things = self.carried, here.things if here.is_open else []
        choices = [f"examine {name}" for name in (here.name, *things)]
        if here.has_door:
            choices.append(f"{'close' if here.is_open else 'open'} {here.name}")
        if carried is None:
            choices += [f"take {thing} from {here.name}" for thing in things if thing != LAMP]
        else:
            choices += [f"put {carried} in/on {here.name}"] if here.is_open else []
            choices += [
                f"{verb} {carried} with {here.name}"
                for verb, (kind, _) in _MADE.items()
                if kind == parse_kind(here.name)
            ]
        return [*choices, f"use {LAMP}"] if LAMP in here.things else choices

    def _take(self, thing: str, place: str) -> str:
        here = self._place_here(place)
        if (
            here is None
            or not here.is_open
            or self.carried
            or thing not in here.things
            or thing == LAMP
        ):
            return NOTHING
        here.things.remove(thing)
        self.carried = thing
        return f"You take the {thing} from the {place}."

    def _put(self, thing: str, place: str) -> str:
        here = self._place_here(place)
        if here is None or not here.is_open or self.carried != thing:
            return NOTHING
        here.things.append(thing)
        self.carried = None
        return f"You put the {thing} in/on the {place}."

    def _turn(self, verb: str, place: str) -> str:
        here = self._place_here(place)
        if here is None or not here.has_door or here.is_open is (verb == "open"):
            return NOTHING
        here.is_open = verb == "open"
        return f"You {verb} the {place}. {here.describe()}"

    def _make(self, verb: str, thing: str, place: str) -> str:
        kind, state = _MADE[verb]
        if self._place_here(place) is None or parse_kind(place) != kind or self.carried != thing:
            return NOTHING
        self.states[thing] = state
        return f"You {verb} the {thing} using the {place}."

    def _examine(self, name: str) -> str:
        if here := self._place_here(name):
            return here.describe()
        near = self.here is not None and self.here.is_open and name in self.here.things
        if not near and name != self.carried:
            return NOTHING
        return f"There is nothing special about the {name}; it is {self.states.get(name, 'as it was')}."

    def _place_here(self, place: str) -> Place | None:
        return self.here if self.here and self.here.name == place else None


def parse_kind(name: str) -> str:
    """Return `mug` for `mug 2`."""
    return name.rpartition(" ")[0]


def list_names(names: Sequence[str]) -> str:
    return ", ".join(f"a {name}" for name in names) or "nothing"
