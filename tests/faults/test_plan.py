"""The plan of a chaos run."""

from collections import Counter

import pytest

from tests.faults.plan import AWAY_S, DISTURBANCES, ROLES, SERVER_FAULTS, Fault, Target, make_plan
from tests.faults.storm import FIRE


@pytest.mark.parametrize("events", [8, 10, 20, 100, 300])
@pytest.mark.parametrize("seed", range(5))
def test_at_least_a_sixth_of_the_events_hits_each_role(events: int, seed: int) -> None:
    plan = make_plan(events, seed)
    hits = Counter(event.target for event in plan)
    assert len(plan) == events
    assert all(6 * hits[role] >= events for role in ROLES)


OF_ROLES = {(fault, role) for fault in (Fault.KILL, Fault.TERMINATE, Fault.STOP) for role in ROLES}


@pytest.mark.parametrize("seed", range(5))
def test_twenty_events_end_and_stop_every_role_and_a_hundred_hold_every_fault(seed: int) -> None:
    few, many = (
        {(event.fault, event.target) for event in make_plan(events, seed)} for events in (20, 100)
    )
    assert few == OF_ROLES | set(DISTURBANCES[:4])
    assert many == OF_ROLES | set(DISTURBANCES)
    assert {fault for fault, _ in many} == set(Fault) - {Fault.ISOLATE, Fault.DAMAGE_REPLICA}


@pytest.mark.parametrize("seed", range(5))
def test_servers_of_a_cluster_are_also_paused_and_cut_off_for_long(seed: int) -> None:
    plan = make_plan(200, seed, servers=3)
    assert {event.fault for event in plan} == set(Fault) == set(FIRE)
    hits = Counter(event.fault for event in plan if event.target is Target.BROKER)
    assert all(hits[fault] >= 5 for fault in SERVER_FAULTS)
    broker = [event for event in plan if event.target is Target.BROKER]
    away = [event.length_s for event in broker if event.fault in (Fault.STOP, Fault.ISOLATE)]
    assert AWAY_S[0] <= min(away) < 5 < 12 < max(away) <= AWAY_S[1]
    assert all(
        6 * count >= 200
        for role, count in Counter(event.target for event in plan).items()
        if role in ROLES
    )


def test_a_plan_is_the_same_for_the_same_seed_and_another_one_for_another() -> None:
    assert make_plan(50, seed=1) == make_plan(50, seed=1)
    assert make_plan(50, seed=1) != make_plan(50, seed=2)
