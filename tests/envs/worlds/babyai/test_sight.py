"""What is in sight, against minigrid's own view."""

from random import Random

import numpy as np
import pytest
from minigrid.core.actions import Actions
from minigrid.core.world_object import Door

from horizonrl.envs.worlds.babyai.levels import generate
from horizonrl.envs.worlds.babyai.sight import CELLS, SIZE, Sight, look


@pytest.mark.parametrize("task_id", ["3", "5", "1804", "1459", "36", "1999"])
def test_the_sight_is_minigrids_own_view(task_id: str) -> None:
    level, draw = generate(task_id), Random(task_id)
    images: dict[bytes, Sight] = {}
    for _ in range(60):
        level.step(Actions(draw.choice([0, 1, 2, 2, 2, 3, 4, 5])))
        grid, in_sight = level.gen_obs_grid()
        sight = look(level)
        shown = {
            (row, column)
            for row, bits in enumerate(sight.visible)
            for column in range(SIZE)
            if bits >> column & 1
        }
        assert shown == {(SIZE - 1 - int(j), int(i)) for i, j in np.argwhere(in_sight)}
        for rank, kind, colour, state in sight.things:
            ahead, right = CELLS[rank]
            thing = grid.get(right + SIZE // 2, SIZE - 1 - ahead)
            assert thing is not None
            assert (thing.type, thing.color) == (kind, colour)
            if isinstance(thing, Door):
                assert state == (
                    "open" if thing.is_open else "locked" if thing.is_locked else "closed"
                )
        things = sum(thing is not None for thing in grid.grid) - (level.carrying is not None)
        assert len(sight.things) == things
        # Equal images, equal sights; and the other way round.
        image = grid.encode(in_sight).tobytes()
        assert images.setdefault(image, sight) == sight
    assert len(set(images.values())) == len(images) > 5
