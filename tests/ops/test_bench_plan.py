"""The plan of a chaos run."""

from collections import Counter

import pytest

from horizonrl.ops.bench.plan import DISTURBANCES, ROLES, Fault, make_plan


@pytest.mark.parametrize("events", [8, 10, 20, 100, 300])
@pytest.mark.parametrize("seed", range(5))
def test_at_least_a_sixth_of_the_events_hits_each_role(events: int, seed: int) -> None:
    plan = make_plan(events, seed)
    hits = Counter(event.target for event in plan)
    assert len(plan) == events
    assert all(6 * hits[role] >= events for role in ROLES)


@pytest.mark.parametrize("seed", range(5))
def test_twenty_events_hold_every_fault_and_a_stop_of_every_role(seed: int) -> None:
    events = {(event.fault, event.target) for event in make_plan(20, seed)}
    assert events == {(fault, role) for fault in (Fault.KILL, Fault.STOP) for role in ROLES} | set(DISTURBANCES)


def test_a_plan_is_the_same_for_the_same_seed_and_another_one_for_another() -> None:
    assert make_plan(50, seed=1) == make_plan(50, seed=1)
    assert make_plan(50, seed=1) != make_plan(50, seed=2)
