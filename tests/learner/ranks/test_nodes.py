"""Nodes meet, refuse what differs, and notice each other's end; no rank is started here."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import wraps
from typing import Any

import pytest

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import ConfigError, RunFailed
from horizonrl.learner.ranks import nodes
from horizonrl.learner.ranks.nodes import Host, Member, Node, NodesEnd, Rendezvous
from horizonrl.learner.ranks.spawn import free_port, interface_towards
from horizonrl.ops.launch.roles import rendezvous


@pytest.fixture
def place() -> Rendezvous:
    alike: dict[str, Any] = {"release": "0.1.0", "learner.zero_stage": 2}
    return Rendezvous("127.0.0.1", free_port("127.0.0.1"), 0, 3, 3, join_timeout_s=5, alike=alike)


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "BEAT_S", 0.05)
    monkeypatch.setattr(nodes, "SILENT_S", 0.4)
    monkeypatch.setattr(nodes, "AGAIN_S", 0.05)


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an asynchronous test in a loop of its own."""

    @wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(test(*arguments, **named))

    return run


def members(place: Rendezvous, *ranks: int) -> list[Member]:
    return [Member(replace(place, node_rank=rank)) for rank in ranks]


@in_a_loop
async def test_all_get_seats_in_the_order_of_their_numbers_and_the_same_end(
    place: Rendezvous,
) -> None:
    place = replace(place, alike=place.alike | {"rollout.system_prompt": "x" * 300_000})
    host, others = Host(place, asyncio.Event()), members(place, 2, 1)
    seats = await asyncio.gather(*[other.seat() for other in others], host.seat())
    assert [seat.position for seat in seats] == [2, 1, 0]
    assert {(seat.nodes, seat.address, seat.port) for seat in seats} == {
        (3, "127.0.0.1", seats[0].port)
    }
    await host.close(NodesEnd(0, ""))
    assert [await other.ended() for other in others] == [NodesEnd(0, "")] * 2
    for other in others:
        await other.close(None)


@in_a_loop
async def test_without_the_missing_node_the_others_move_up_if_they_may(place: Rendezvous) -> None:
    fewer = replace(place, min_nodes=2, join_timeout_s=0.5)
    host, (other,) = Host(fewer, asyncio.Event()), members(fewer, 2)
    seats = await asyncio.gather(host.seat(), other.seat())
    assert [(seat.position, seat.nodes) for seat in seats] == [(0, 2), (1, 2)]
    (late,) = members(replace(fewer, join_timeout_s=0.2), 1)
    with pytest.raises(
        RunFailed, match="runs without node 1, which can join when node 0 starts again"
    ):
        await late.seat()
    await other.close(None)
    await host.close(None)


@in_a_loop
async def test_too_few_nodes_end_with_the_names_of_the_missing(place: Rendezvous) -> None:
    host, (other,) = Host(replace(place, join_timeout_s=0.3), asyncio.Event()), members(place, 2)
    results = await asyncio.gather(host.seat(), other.seat(), return_exceptions=True)
    assert all(isinstance(result, RunFailed) for result in results), results
    assert all("node 1 of 3 did not come" in str(result) for result in results)
    await other.close(None)


@in_a_loop
async def test_a_recipe_that_differs_is_refused_with_both_values(place: Rendezvous) -> None:
    host, (other,) = (
        Host(replace(place, join_timeout_s=0.5), asyncio.Event()),
        members(replace(place, alike=place.alike | {"learner.zero_stage": 3}), 1),
    )
    waiting = asyncio.create_task(host.seat())
    with pytest.raises(ConfigError, match=r"learner\.zero_stage: 3, on node 0 2"):
        await other.seat()
    await other.close(None)
    with pytest.raises(RunFailed, match="nodes 1, 2 of 3 did not come"):
        await waiting


@pytest.mark.parametrize("started", [False, True])
@in_a_loop
async def test_a_number_that_is_taken_waits_and_says_by_whom(
    place: Rendezvous, started: bool
) -> None:
    host, (first, last, second) = Host(place, asyncio.Event()), members(place, 1, 2, 1)
    seated: list[Node] = [host, first, last] if started else [host, first]
    waiting = [asyncio.create_task(node.seat()) for node in seated]
    await asyncio.wait(waiting, timeout=2 if started else 0.2)
    second.rendezvous = replace(second.rendezvous, join_timeout_s=0.2)
    with pytest.raises(
        RunFailed, match=r"127\.0\.0\.1 is node 1 already: each machine needs its own node_rank"
    ):
        await second.seat()
    for task in waiting:
        task.cancel()
    for member in (first, last):
        await member.close(None)
    await host.close(None)


@in_a_loop
async def test_nobody_at_the_rendezvous_is_an_error_after_a_bounded_wait(place: Rendezvous) -> None:
    (other,) = members(replace(place, join_timeout_s=0.2), 1)
    with pytest.raises(
        RunFailed, match=r"node 1 got no seat at the rendezvous 127\.0\.0\.1:\d+ within"
    ):
        await other.seat()


@in_a_loop
async def test_a_stranger_and_nonsense_change_nothing(place: Rendezvous) -> None:
    host, others = Host(place, asyncio.Event()), members(place, 1, 2)
    waiting = asyncio.create_task(host.seat())
    await asyncio.sleep(0.1)
    for line in (
        b"GET / HTTP/1.1\r\n",
        b"[1]\n",
        b'{"node": 1}\n',
        b'{"node": "x", "alike": 3}\n',
        b"x" * 2_000_000,
    ):
        _, writer = await asyncio.open_connection(place.host, place.port)
        writer.write(line)
        writer.close()
    await asyncio.gather(waiting, *[other.seat() for other in others])
    for other in others:
        await other.close(None)
    await host.close(None)


@pytest.mark.parametrize("how", ["closes", "is silent", "says why"])
@in_a_loop
async def test_the_others_learn_which_node_is_gone(place: Rendezvous, how: str) -> None:
    host, others = Host(place, asyncio.Event()), members(place, 1, 2)
    await asyncio.gather(host.seat(), *[other.seat() for other in others])
    if how == "is silent":
        assert others[0]._beats is not None
        others[0]._beats.cancel()
    else:
        await others[0].close(
            NodesEnd(7, "rank 3 ended with code 7") if how == "says why" else None
        )
    end = await asyncio.wait_for(host.ended(), 2)
    reason = {
        "closes": "its connection is closed",
        "is silent": "silent for 0.4 s",
        "says why": "rank 3 ended",
    }[how]
    assert end.code == 1
    assert end.reason.startswith("node 1 (127.0.0.1) is gone: ")
    assert reason in end.reason
    await host.close(end)
    assert "node 1" in (await asyncio.wait_for(others[1].ended(), 2)).reason
    for other in others:
        await other.close(None)


@in_a_loop
async def test_a_node_that_is_asked_to_stop_asks_node_0(place: Rendezvous) -> None:
    stop = asyncio.Event()
    host, others = Host(place, stop), members(place, 1, 2)
    await asyncio.gather(host.seat(), *[other.seat() for other in others])
    others[1].leave()
    await asyncio.wait_for(stop.wait(), 2)
    for other in others:
        await other.close(None)
    await host.close(None)


@in_a_loop
async def test_node_0_needs_an_address_of_its_own_that_is_free(place: Rendezvous) -> None:
    host = Host(place, asyncio.Event())
    waiting = asyncio.create_task(host.seat())
    await asyncio.sleep(0.1)
    with pytest.raises(RunFailed, match="something listens there already"):
        await Host(place, asyncio.Event()).seat()
    with pytest.raises(ConfigError, match="no address of this machine"):
        await Host(replace(place, host="192.0.2.1"), asyncio.Event()).seat()
    waiting.cancel()
    await host.close(None)


@in_a_loop
async def test_node_0_waits_while_its_name_still_has_the_address_of_the_pod_before(
    place: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, addresses = asyncio.get_running_loop(), ["192.0.2.1", "192.0.2.1", "127.0.0.1"]
    look_up, asked = loop.getaddrinfo, []

    async def stale(host: str, *rest: Any, **named: Any) -> Any:
        asked.append(host)
        return await look_up(addresses.pop(0), *rest, **named)

    monkeypatch.setattr(loop, "getaddrinfo", stale)
    host = Host(replace(place, host="learner-0.learner"), asyncio.Event())
    waiting = asyncio.create_task(host.seat())
    while addresses:
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.1)
    assert not waiting.done() and asked == ["learner-0.learner"] * 3
    waiting.cancel()
    await host.close(None)


def test_the_interface_is_the_one_that_reaches_the_address() -> None:
    assert interface_towards("127.0.0.1", 29400) == interface_towards("127.0.0.2", 29400) == "lo"


def test_nodes_whose_longest_episodes_differ_are_not_alike() -> None:
    overrides = ["--learner.nodes=2", "--learner.rendezvous=h:1", "--loss.normalisation=constant"]
    found = []
    for horizons in ([10], [40]):
        env = [{"id": "textcraft", "horizons": horizons}]
        config = RunConfig.load(
            [], [*overrides, f"--envs={json.dumps(env)}", "--rollout.context=window"]
        )
        met = rendezvous(config, {})
        assert met is not None
        found.append(met.alike)
    differing = {name for name, value in found[0].items() if value != found[1][name]}
    assert differing == {"longest_episode_tokens"}
