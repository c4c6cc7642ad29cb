"""Templates about the map (WebArena's Map)."""

from random import Random

from horizonrl.envs.worlds.webnav.task import Task, Type
from horizonrl.envs.worlds.webnav.templates.shared import including, number, pick, search
from horizonrl.envs.worlds.webnav.world import CLOSING_TIMES, METRES_A_BLOCK, MODES, World


def address_of_place(world: World, draw: Random) -> Task:
    place = pick(draw, world.places)
    answer = including(place.address, (other.address for other in world.places.values()))
    return Task(f"What is the address of the {place.name}?", search(place.name), answer)


def closing_time(world: World, draw: Random) -> Task:
    place = pick(draw, world.places)
    return Task(
        f"When does the {place.name} close?",
        search(place.name),
        including(place.closes, CLOSING_TIMES),
    )


def minutes_between(world: World, draw: Random) -> Task:
    start, end = draw.sample([*world.places.values()], 2)
    mode = draw.choice([*MODES])
    chosen = () if mode == "walk" else (mode,)
    plan = (
        "Directions",
        Type("From", start.name),
        Type("To", end.name),
        *chosen,
        "Go",
    )
    intent = f"How many minutes is it from the {start.name} to the {end.name} if I {mode}?"
    return Task(intent, plan, number(start.blocks_to(end) * MODES[mode]))


def nearest_of_kind(world: World, draw: Random) -> Task | None:
    place = pick(draw, world.places)
    kind = draw.choice(sorted({other.kind for other in world.places.values()} - {place.kind}))
    near = sorted(place.blocks_to(other) for other in world.places.values() if other is not place)[
        :9
    ]
    ranked = sorted((place.blocks_to(other), other.name) for other in world.of_kind(kind))
    if ranked[0][0] not in near or (len(ranked) > 1 and ranked[0][0] == ranked[1][0]):
        return None  # It is not listed, or there are two.
    answer = including(ranked[0][1], (name for _, name in ranked))
    return Task(
        f"Which {kind} is nearest to the {place.name}?",
        (*search(place.name), "Nearby"),
        answer,
    )


def metres_between(world: World, draw: Random) -> Task | None:
    place = pick(draw, world.places)
    others = sorted(
        (place.blocks_to(other), other.name)
        for other in world.places.values()
        if other is not place
    )
    blocks, name = draw.choice(others[:5])
    intent = f"How many metres is the {name} away from the {place.name}?"
    return Task(intent, (*search(place.name), "Nearby"), number(blocks * METRES_A_BLOCK))


def places_of_kind(world: World, draw: Random) -> Task:
    kind = pick(draw, world.places).kind
    return Task(
        f"How many {kind}s are on the map?", (f"{kind}s",), number(len(world.of_kind(kind)))
    )


def save_place(world: World, draw: Random) -> Task:
    place = pick(draw, world.places)
    plan = (*search(place.name), "Save Place")
    return Task(f"Save the {place.name}.", plan, effect=lambda w: w.saved.append(place.name))
