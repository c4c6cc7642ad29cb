"""No answer takes a client of a cluster back in time."""

import asyncio

from horizonrl.broker.nats import freshness
from horizonrl.broker.nats.freshness import Freshness


async def look_at(memory: Freshness, answers: list[int], wanted: int = 0) -> int:
    async def look() -> int:
        return answers.pop(0)

    return await memory.at_least("key", look, lambda found: found, wanted)


def test_an_older_answer_of_a_cluster_is_asked_for_again() -> None:
    memory = Freshness(clustered=True)
    memory.saw("key", 5)
    assert asyncio.run(look_at(memory, [4, 3, 5])) == 5
    assert asyncio.run(look_at(memory, [6, 8], wanted=7)) == 8
    assert asyncio.run(look_at(memory, [7, 9])) == 9


def test_what_is_still_older_after_the_lag_is_lost_and_reported_once(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(freshness, "LAG_S", 0.15)
    memory = Freshness(clustered=True)
    memory.saw("key", 5)
    assert asyncio.run(look_at(memory, [4, 4, 4, 4])) == 4
    assert asyncio.run(look_at(memory, [4])) == 4


def test_a_single_server_is_believed_at_once() -> None:
    memory = Freshness(clustered=False)
    memory.saw("key", 5)
    assert asyncio.run(look_at(memory, [4])) == 4
