"""Household: find things in a room, clean, heat or cool them, and put them where they belong. The reward is 1 or 0."""

from collections.abc import Sequence
from functools import cache
from random import Random

from horizonrl.envs.api import Step, TaskSpec
from horizonrl.envs.game import (
    GameEnvironment,
    Move,
    random_for,
    refuse_move,
    words,
)
from horizonrl.envs.splits import lowest_hashes, split_tasks
from horizonrl.envs.worlds.household.house import (
    CLOSED,
    COMMANDS,
    LAMP,
    House,
    Place,
    list_names,
    parse_kind,
)

TRAIN, TEST = 2_420, 200
CATEGORIES = words("pick light clean heat cool pick_two")


def read_counts(text: str) -> dict[str, int]:
    """Return how many of each kind a text such as `desk 2 bed 1` has."""
    kinds = words(text)
    return {kind: int(number) for kind, number in zip(kinds[::2], kinds[1::2], strict=True)}


ROOMS = {
    "kitchen": (
        read_counts(
            "cabinet 4 drawer 3 countertop 2 diningtable 1 shelf 2 stoveburner 2 fridge 1 "
            "microwave 1 sinkbasin 1 coffeemachine 1 garbagecan 1"
        ),
        words(
            "apple bread bowl cup egg fork knife lettuce mug pan plate pot potato spatula spoon "
            "tomato saltshaker"
        ),
    ),
    "bedroom": (
        read_counts("bed 1 desk 2 drawer 5 dresser 1 shelf 3 sidetable 2 safe 1 garbagecan 1"),
        words(
            "alarmclock book cd cellphone creditcard keychain laptop mug pen pencil pillow watch"
        ),
    ),
    "livingroom": (
        read_counts(
            "armchair 2 cabinet 3 coffeetable 1 desk 1 drawer 4 shelf 2 sidetable 2 sofa 1"
        ),
        words("book box candle creditcard keychain newspaper remotecontrol statue vase watch"),
    ),
    "bathroom": (
        read_counts(
            "bathtubbasin 1 cabinet 4 countertop 1 drawer 2 garbagecan 1 shelf 2 sinkbasin 1 "
            "toilet 1 towelholder 1"
        ),
        words("candle cloth soapbar soapbottle spraybottle toiletpaper towel"),
    ),
}
"""By room: how many places of each kind there are, and the kinds of things."""
_KITCHEN, _LIVING = ("kitchen",), ("bedroom", "livingroom")
_ROOMS_OF = {"light": _LIVING, "clean": _KITCHEN, "heat": _KITCHEN, "cool": _KITCHEN}
_FIT = {
    "clean": words(
        "apple bowl cup fork knife lettuce mug pan plate pot potato spatula spoon tomato"
    ),
    "heat": words("apple bread cup egg mug plate potato tomato"),
    "cool": words("apple bowl bread cup egg lettuce mug pan plate pot potato tomato"),
}
_ALFWORLD = ("Looking quickly around you, you see", "Your task is to")
_STATES = {"clean": "clean", "heat": "hot", "cool": "cool"}
_TOOLS = {"clean": "sinkbasin 1", "heat": "microwave 1", "cool": "fridge 1"}


class Chore:
    """One task in a room."""

    def __init__(self, category: str, draw: Random, lists_choices: bool = False) -> None:
        self._lists_choices = lists_choices
        counts, kinds = ROOMS[draw.choice(_ROOMS_OF.get(category, tuple(ROOMS)))]
        places = [
            Place(f"{kind} {n}", is_open=kind not in CLOSED)
            for kind, count in counts.items()
            for n in range(1, count + 1)
        ]
        self.category = category
        self.kind = draw.choice(_FIT.get(category, kinds))
        self.target = draw.choice(
            [kind for kind in counts if kind != parse_kind(_TOOLS.get(category, ""))]
        )
        self.house = House(places)
        for kind in kinds:
            free = [
                place
                for place in places
                if kind != self.kind or parse_kind(place.name) != self.target
            ]
            for number in range(1, 3 if kind == self.kind else draw.randrange(1, 4)):
                draw.choice(free).things.append(f"{kind} {number}")
        self._lamp = next((place for place in places if parse_kind(place.name) == "desk"), None)
        if self._lamp and category == "light":
            self._lamp.things.append(LAMP)

    @property
    def wish(self) -> str:
        """The task in words."""
        if self.category == "light":
            return f"look at a {self.kind} under the desklamp"
        number = "two" if self.category == "pick_two" else "a"
        state = [_STATES[self.category]] if self.category in _STATES else []
        return f"put {' '.join([number, *state, self.kind])} in/on a {self.target}"

    def follow(self, action: str) -> Step:
        """Follow a command. It may complete the chore."""
        answer = self.house.obey(action)
        if not self._done():
            return refuse_move(answer + self.choices())
        return Step(f"{answer} The task is done.", reward=1.0, terminated=True, success=True)

    def choices(self) -> str:
        """Return AgentGym's line of available actions, or an empty text in the other styles."""
        return (
            f"\nAVAILABLE ACTIONS: {','.join(self.house.choices())}" if self._lists_choices else ""
        )

    def _done(self) -> bool:
        if self.category == "light":
            lit = (
                self.house.lamp_on
                and self.house.here is not None
                and LAMP in self.house.here.things
            )
            return lit and parse_kind(self.house.carried or "") == self.kind
        return len(self._things_at_target()) >= 1 + (self.category == "pick_two")

    def _things_at_target(self) -> list[str]:
        """Return the things that are in the target place and in the required state."""
        targets = [
            place for place in self.house.places.values() if parse_kind(place.name) == self.target
        ]
        return [thing for place in targets for thing in place.things if self._fits(thing)]

    def _fits(self, thing: str) -> bool:
        state = _STATES.get(self.category)
        return parse_kind(thing) == self.kind and state in (None, self.house.states.get(thing))

    def advise(self) -> Move:
        """Search place by place, using only what has been seen, as an agent must."""
        carried = self.house.carried
        if carried is None:
            return self._find()
        if parse_kind(carried) != self.kind:
            return self._do_at(
                self._somewhere(), f"put {carried} in/on {self._somewhere()}", "I do not need this."
            )
        if self.category == "light":
            desk = self._lamp.name if self._lamp else ""
            return self._do_at(desk, f"toggle {LAMP}", "Now the lamp.")
        if not self._fits(carried):
            tool, verb = _TOOLS[self.category], self.category
            if self.house.here is self.house.places[tool]:
                return Move(f"{verb} {carried} with {tool}", f"I {verb} it here.")
            return Move(f"go to {tool}", f"I have to {verb} the {carried}.")
        target = f"{self.target} 1"
        return self._do_at(
            target, f"put {carried} in/on {target}", f"This belongs there: {target}."
        )

    def _find(self) -> Move:
        placed = self._things_at_target()
        for place in self.house.places.values():
            for thing in place.things if place.seen else ():
                if parse_kind(thing) == self.kind and thing not in placed:
                    return self._do_at(
                        place.name, f"take {thing} from {place.name}", f"I saw the {thing} there."
                    )
        unseen = next(place for place in self.house.places.values() if not place.seen)
        return self._do_at(
            unseen.name,
            f"examine {unseen.name}",
            f"I look for a {self.kind}: I have not seen the {unseen.name}.",
        )

    def _do_at(self, place: str, action: str, thought: str) -> Move:
        """Do something at a place: go there, open it, do it."""
        there = self.house.places[place]
        if self.house.here is not there:
            return Move(f"go to {place}", thought)
        return (
            Move(action, thought)
            if there.is_open
            else Move(f"open {place}", f"The {place} is closed.")
        )

    def _somewhere(self) -> str:
        return (self.house.here or next(iter(self.house.places.values()))).name


class Household(GameEnvironment[Chore]):
    """One chore at a time.

    format: how the agent names its action (envs/formats.py)
    style: `compact` has no sentences about the rules
    max_observation_chars: bound of every observation
    """

    env_id = "household"
    version = "1"
    commands = COMMANDS

    @classmethod
    def tasks(cls) -> Sequence[TaskSpec]:
        """Return the 2,620 chores, the categories in turn."""
        return split_tasks(_categories(), lowest_hashes(_categories(), TEST))

    def begin(self, task_id: str) -> tuple[str, Chore]:
        """Return what the agent sees from the middle of the room."""
        category = self.find(_categories(), task_id)
        chore = Chore(category, random_for(task_id), lists_choices=self._style == "agentgym")
        rules = "You do a chore in a room. Places may have to be opened."
        look, wish = ("You see", "Your task") if self._style != "agentgym" else _ALFWORLD
        seen = f"You are in the middle of a room. {look} {list_names(list(chore.house.places))}."
        return self.introduce(rules, f"{seen}\n{wish}: {chore.wish}.{chore.choices()}"), chore


@cache
def _categories() -> dict[str, str]:
    return {f"household-{n:04d}": CATEGORIES[n % len(CATEGORIES)] for n in range(TRAIN + TEST)}
