"""Episodes whose package draws from the global generators are played side by side as if each were alone."""

import random
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from horizonrl.envs.hubs.randomness import OwnRandom

NAMES = ("a", "b", "c")


def draw(own: OwnRandom) -> tuple[float, float]:
    with own.random_for():
        return random.random(), float(np.random.random())


def alone(name: str, count: int) -> list[tuple[float, float]]:
    own = OwnRandom(name)
    return [draw(own) for _ in range(count)]


@given(st.lists(st.sampled_from(NAMES), max_size=20))
def test_any_interleaving_draws_what_each_episode_draws_alone(order: Sequence[str]) -> None:
    owns, drawn = {name: OwnRandom(name) for name in NAMES}, {name: [] for name in NAMES}  # type: ignore[var-annotated]
    for name in order:
        random.random()  # what somebody else draws in between
        drawn[name].append(draw(owns[name]))
    assert drawn == {name: alone(name, len(drawn[name])) for name in NAMES}


def test_the_generators_of_everybody_else_are_left_as_they_were() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    draw(OwnRandom("a"))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # type: ignore[index, union-attr]


def test_a_call_that_raises_puts_them_back_too() -> None:
    before = random.getstate()
    try:
        with OwnRandom("a").random_for():
            random.random()
            raise ZeroDivisionError
    except ZeroDivisionError:
        assert random.getstate() == before
