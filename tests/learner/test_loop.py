"""The learner, the controller and an actor, killed at every request that they make to the broker."""

import asyncio
import itertools
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from horizonrl.broker.api import Key
from horizonrl.broker.groups import GroupLog
from horizonrl.broker.state import StateStore
from horizonrl.common.errors import CheckpointError, RunFailed
from horizonrl.common.types import Kind, PolicyVersion, Progress
from horizonrl.learner.journal import only_learner
from horizonrl.ops.rundir import read_lines
from tests.learner.world import MortalTransport, World, played
from tests.records import make_ticket


def survive(world: World) -> World:
    async def scenario() -> None:
        await world.run()
        await world.check()

    asyncio.run(scenario())
    return world


ADAPTIVE = ("--horizon.kind=adaptive",)


@pytest.mark.parametrize("overrides", [(), ADAPTIVE])
def test_an_undisturbed_run_settles_every_ticket_once(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    world = survive(World(tmp_path, overrides=overrides))
    assert world.lives == {"learner": 1, "controller": 1, "actor": 1}


ROLES = ("learner", "controller", "actor")


def test_a_ticket_whose_group_the_broker_lost_is_issued_again_and_a_repeated_group_is_passed_over(
    tmp_path: Path,
) -> None:
    world = survive(World(tmp_path, faults=0.4))
    reissued = [world.metrics.value("tickets_reissued_total", kind=kind) for kind in ("demo", "train")]
    assert sum(reissued) > 0
    assert sum(line["repeats"] for line in world.ledger()) > 0
    assert sum(len(line["voids"]) for line in world.ledger()) > 0


@pytest.mark.parametrize("role", ROLES)
def test_a_role_may_be_cancelled_in_any_seventh_request_to_the_broker(tmp_path: Path, role: str) -> None:
    cancel_everywhere(tmp_path, role, stride=7)


@pytest.mark.parametrize("role", ["learner", "controller"])
def test_an_adaptive_horizon_grows_once_and_at_the_same_step_whoever_is_cancelled(tmp_path: Path, role: str) -> None:
    cancel_everywhere(tmp_path, role, stride=9, overrides=ADAPTIVE)


@pytest.mark.slow
@pytest.mark.parametrize("role", ROLES)
def test_a_role_may_be_cancelled_in_any_request_to_the_broker(tmp_path: Path, role: str) -> None:
    cancel_everywhere(tmp_path, role, stride=1)


def cancel_everywhere(tmp_path: Path, role: str, stride: int, overrides: tuple[str, ...] = ()) -> None:
    """Cancel a role before its first request, after it, before its second, ... until a run makes fewer requests."""
    for place in itertools.count(step=stride):
        world = survive(World(tmp_path / str(place), deaths={role: [place]}, overrides=overrides))
        if world.lives[role] == 1:
            break
    assert place > 20


lives = st.lists(st.integers(0, 150), max_size=4)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    learner=lives,
    controller=lives,
    actor=lives,
    seed=st.integers(0, 999),
    faults=st.sampled_from([0.0, 0.3]),
    overrides=st.sampled_from([(), ADAPTIVE]),
)
def test_any_sequence_of_deaths_loses_and_doubles_nothing(
    tmp_path_factory: pytest.TempPathFactory,
    learner: list[int],
    controller: list[int],
    actor: list[int],
    seed: int,
    faults: float,
    overrides: tuple[str, ...],
) -> None:
    deaths = {"learner": learner, "controller": controller, "actor": actor}
    survive(World(tmp_path_factory.mktemp("world"), deaths, seed, faults, overrides=overrides))


def test_a_harmless_change_of_the_config_is_taken_up_and_recorded(tmp_path: Path) -> None:
    async def scenario() -> None:
        first = World(tmp_path)
        await first.run()
        second = World(tmp_path, server=first.server, overrides=("--rl.steps=7", "--rl.lr=0.5"))
        await second.run()
        before, now = read_lines(second.config.run_dir / "lineages.jsonl")
        assert (before["lineage"], before["from_step"], before["changed"]) == (0, 0, {})
        assert (now["lineage"], now["from_step"]) == (1, 7)
        assert now["changed"] == {"rl.lr": [first.config.rl.lr, 0.5], "rl.steps": [5, 7]}
        assert len(second.ledger()) == 9

    asyncio.run(scenario())


def test_a_checkpoint_of_another_model_is_refused_with_the_difference(tmp_path: Path) -> None:
    async def scenario() -> None:
        first = World(tmp_path)
        await first.run()
        other = first.learner(MortalTransport(first.server, None), identity={"model": "m", "template": "t"})
        with pytest.raises(ExceptionGroup) as refused:
            await other.run()
        assert refused.group_contains(CheckpointError, match=r"template: None → t")

    asyncio.run(scenario())


def test_a_learner_that_was_replaced_ends_instead_of_training_beside_the_other(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = World(tmp_path)
        transport = MortalTransport(world.server, None)
        running = asyncio.create_task(world.learner(transport).run())
        await asyncio.sleep(0.05)  # it has announced its lineage and waits for groups
        await StateStore(transport).put(Key.PROGRESS, Progress(policy=PolicyVersion(lineage=3)))
        log = GroupLog(transport)
        for number in range(2):
            ticket = make_ticket(number, Kind.DEMO, group_size=1)
            await log.publish(played(ticket, PolicyVersion(), world.dice))
        with pytest.raises(ExceptionGroup) as replaced:
            async with asyncio.timeout(10):
                await running
        assert replaced.group_contains(RunFailed, match="another learner has resumed")
        assert world.ledger() == []

    asyncio.run(scenario())


def test_two_learners_do_not_share_a_run_directory(tmp_path: Path) -> None:
    with only_learner(tmp_path), pytest.raises(RunFailed, match="another learner works"), only_learner(tmp_path):
        pass
