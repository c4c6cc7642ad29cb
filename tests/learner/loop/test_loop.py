"""The learner, the controller and an actor, killed at every request that they make to the broker."""

import asyncio
import itertools
import json
import random
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from horizonrl.broker.memory import MemoryServer
from horizonrl.common.errors import NoGroups
from horizonrl.common.run_dir import METRICS
from horizonrl.common.types import Group, Kind, PolicyVersion, StopReason, Ticket
from horizonrl.learner.algorithm.batch import Batch, Trace
from horizonrl.learner.engine.api import StepStats
from horizonrl.learner.loop.weights_publisher import WeightsPublisher
from horizonrl.learner.records.best import Best
from horizonrl.ops.rundir.lines import read_lines
from tests.learner import world as world_module
from tests.learner.world import EVALUATING, HashEngine, World, played


def survive(world: World) -> World:
    async def scenario() -> None:
        await world.run()
        await world.check()
        for line in world.evals():
            assert line["version"] >= world.config.eval_step(
                int(line["ends"][0][1].removeprefix("eval-")) // 3
            )

    asyncio.run(scenario())
    return world


ADAPTIVE = ("--horizon.kind=adaptive",)
CLONING = ("--rl.demos_per_step=3", "--rl.publish_every=2")


@pytest.mark.parametrize("overrides", [(), ADAPTIVE])
def test_an_undisturbed_run_settles_every_ticket_once(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    world = survive(World(tmp_path, overrides=overrides))
    assert world.lives == {"learner": 1, "controller": 1, "actor": 1}
    assert world.metrics.value("run_finished") == 1
    assert world.metrics.value("checkpoint_timestamp_seconds") >= world.metrics.value(
        "learner_step_timestamp_seconds"
    )
    assert 0 < world.metrics.value("disk_free_ratio") <= 1


def test_the_growth_of_a_horizon_is_counted(tmp_path: Path) -> None:
    world = survive(World(tmp_path, overrides=ADAPTIVE))
    grown = sum(len(line["growths"]) for line in read_lines(world.config.run_dir / METRICS))
    assert world.metrics.value("horizon_growths_total", env="textcraft") == grown > 0


class SavingAside(HashEngine):
    """Says that each step has waited a second for a checkpoint."""

    stalled_s = 0.0

    def begin_save(self, directory: Path, state: dict[str, Any]) -> Future[None]:
        written: Future[None] = Future()
        written.set_result(self.save(directory, state))
        return written

    def train_step(self, batch: Batch, lr: float) -> StepStats:
        self.stalled_s += 1.0
        return super().train_step(batch, lr)


def test_the_stall_of_a_checkpoint_holds_the_wait_of_the_step_after_it(tmp_path: Path) -> None:
    world = survive(World(tmp_path, make_engine=SavingAside))
    # After the steps 2, 4, 6 and 7, the last of which no other step follows.
    assert world.metrics.value("checkpoint_seconds_count") == 4
    assert world.metrics.value("checkpoint_seconds_sum") >= 3.0


def test_every_round_of_evaluation_is_written_once_and_the_best_version_is_kept(
    tmp_path: Path,
) -> None:
    world = survive(World(tmp_path, overrides=EVALUATING))
    evals = sorted(world.evals(), key=lambda line: line["version"])
    assert [line["version"] for line in evals] == [0, 2, 4, 6, 7]
    assert all(line["newest_version"] >= min(line["version"] + 4, 7) for line in evals)
    assert [(line["phase"], line["phase_step"]) for line in evals][:3] == [
        ("imitation", 0),
        ("rl", 0),
        ("rl", 2),
    ]
    best = Best(world.config.run_dir / "best").read()
    assert best is not None
    assert (
        best["version"]
        == max(evals, key=lambda line: (line["success_rate"], line["version"]))["version"]
        == 2
    )


def test_demonstrations_stand_beside_the_groups_of_rl_in_their_share(tmp_path: Path) -> None:
    world = survive(World(tmp_path, overrides=CLONING))
    in_rl = [
        [ticket.partition("-")[0] for _, ticket in line["trained"]] for line in world.ledger()[2:]
    ]
    assert [kinds.count("train") for kinds in in_rl] == [2] * 5
    assert 10 <= sum(kinds.count("demo") for kinds in in_rl) <= 15
    assert not any("phase" in drop for line in world.ledger() for drop in line["dropped"])


@pytest.mark.parametrize(("every", "bound"), [(3, 2), (3, 3), (5, 4)])
def test_rounds_of_one_version_waste_no_group_on_staleness(
    tmp_path: Path, every: int, bound: int
) -> None:
    overrides = (f"--rl.publish_every={every}", f"--rl.max_staleness={bound}", "--rl.steps=12")
    world = survive(World(tmp_path, overrides=overrides))
    assert not [drop for line in world.ledger() for drop in line["dropped"]]


def test_a_version_that_is_evaluated_is_one_that_actors_get(tmp_path: Path) -> None:
    world = World(tmp_path, overrides=(*EVALUATING, "--rl.publish_every=3", "--rl.max_staleness=2"))
    world._too_early = lambda *_: False  # type: ignore[method-assign]
    for line in survive(world).evals():
        assert line["oldest_version"] >= line["version"]


def test_a_version_that_a_group_calls_damaged_reaches_whoever_publishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[PolicyVersion] = []

    async def repair(publisher: WeightsPublisher, damaged: PolicyVersion) -> None:
        reported.append(damaged)

    def reporting(ticket: Ticket, policy: PolicyVersion, dice: random.Random) -> Group:
        group = played(ticket, policy, dice)
        return group.model_copy(update={"damaged_version": policy}) if policy.version > 2 else group

    monkeypatch.setattr(WeightsPublisher, "repair", repair)
    monkeypatch.setattr(world_module, "played", reporting)
    survive(World(tmp_path))
    assert reported
    assert all(policy.version > 2 for policy in reported)


def test_episodes_that_the_context_ends_before_their_horizon_are_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(ticket: Ticket, policy: PolicyVersion, dice: random.Random) -> Group:
        group = played(ticket, policy, dice)
        stop = StopReason.CONTEXT if ticket.number % 2 else StopReason.TERMINATED
        return group.model_copy(
            update={"episodes": tuple(e.model_copy(update={"stop": stop}) for e in group.episodes)}
        )

    monkeypatch.setattr(world_module, "played", cut)
    with capture_logs() as logs:
        world = survive(World(tmp_path))
    (said,) = [line for line in logs if line["event"] == "context_before_horizon"]
    rl = [line for line in read_lines(world.config.run_dir / METRICS) if line["phase"] == "rl"]
    shares = [line["environments"][said["env"]]["context_share"] for line in rl]
    assert said["share"] == next(share for share in shares if share > 0.25) <= max(shares)


@pytest.mark.parametrize("needed", [4, 5])
def test_a_first_horizon_that_most_experts_exceed_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needed: int
) -> None:
    def long(ticket: Ticket, policy: PolicyVersion, dice: random.Random) -> Group:
        group = played(ticket, policy, dice)
        turns = group.episodes[0].turns * needed
        episodes = (group.episodes[0].model_copy(update={"turns": turns}), *group.episodes[1:])
        return (
            group.model_copy(update={"episodes": episodes}) if ticket.kind is Kind.DEMO else group
        )

    monkeypatch.setattr(world_module, "played", long)
    with capture_logs() as logs:
        asyncio.run(World(tmp_path).run())
    said = [line for line in logs if line["event"] == "horizon_below_experts"]
    assert [(line["horizon"], line["share"]) for line in said] == ([(4, 1.0)] if needed > 4 else [])


def test_the_gap_of_the_engines_is_that_of_sampled_tokens(tmp_path: Path) -> None:
    """A demonstration's logprobs are all 0, whatever the engine would have said."""
    asked: list[bool] = []

    class Asked(HashEngine):
        def logprob_gap_at(self, trace: Trace, version: int, weights: Path) -> float:
            asked.append(trace.demo)
            return 0.0

    world = World(tmp_path, overrides=(*CLONING, "--rl.max_staleness=2"))
    world.make_engine = Asked
    survive(world)
    assert asked and not any(asked)


@pytest.mark.parametrize("role", ["learner", "controller"])
def test_a_run_with_demonstrations_in_rl_survives_too(tmp_path: Path, role: str) -> None:
    cancel_everywhere(tmp_path, role, stride=13, overrides=CLONING)


ROLES = ("learner", "controller", "actor")


def test_a_ticket_whose_group_the_broker_lost_is_issued_again_and_a_repeated_group_is_passed_over(
    tmp_path: Path,
) -> None:
    world = survive(World(tmp_path, faults=0.4))
    reissued = [
        world.metrics.value("tickets_reissued_total", kind=kind) for kind in ("demo", "train")
    ]
    assert sum(reissued) > 0
    assert sum(line["repeats"] for line in world.ledger()) > 0
    assert sum(len(line["voids"]) for line in world.ledger()) > 0


async def test_a_run_that_gave_up_goes_on_once_its_environment_is_mended(tmp_path: Path) -> None:
    """The tickets that ended without a group are still in its log."""

    broken = World(tmp_path, faults=1.0)
    with pytest.raises(ExceptionGroup) as ended:
        await broken.run()
    assert ended.group_contains(NoGroups, match="the last 32 tickets")
    mended = World(tmp_path, server=broken.server)
    await mended.run()
    assert mended.ledger()[-1]["step"] == mended.config.total_steps


@pytest.mark.parametrize("role", ROLES)
def test_a_role_may_be_cancelled_in_any_seventh_request_to_the_broker(
    tmp_path: Path, role: str
) -> None:
    cancel_everywhere(tmp_path, role, stride=7)


@pytest.mark.parametrize("overrides", [(), CLONING], ids=["", "cloning"])
def test_a_learner_that_holds_groups_may_be_cancelled_in_any_eleventh_request(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    cancel_everywhere(tmp_path, "learner", stride=11, overrides=overrides, hand=5)


def test_groups_that_arrive_out_of_order_are_held_across_checkpoints_and_never_stale(
    tmp_path: Path,
) -> None:
    def out_of_order(stale: str) -> World:
        every = ("--rl.steps=8", "--learner.checkpoint_every=1", "--learner.keep_checkpoints=20")
        # A lease that lapses would be delivered anew, and be the newest.
        server = MemoryServer(ack_wait_s=5)
        overrides = (*every, f"--rl.stale={stale}")
        return survive(
            World(tmp_path / stale, hand=5, patience_s=0.3, server=server, overrides=overrides)
        )

    waiting, dropping = out_of_order("wait"), out_of_order("drop")
    assert not [drop for line in waiting.ledger() for drop in line["dropped"]]
    assert [drop for line in dropping.ledger() for drop in line["dropped"]], (
        "nobody waited for this actor"
    )
    states = (waiting.config.run_dir / "checkpoints").glob("*/state.json")
    assert any(json.loads(path.read_text())["state"]["waiting"]["held"] for path in states)


@pytest.mark.parametrize("role", ["learner", "controller"])
def test_an_adaptive_horizon_grows_once_and_at_the_same_step_whoever_is_cancelled(
    tmp_path: Path, role: str
) -> None:
    cancel_everywhere(tmp_path, role, stride=9, overrides=ADAPTIVE)


@pytest.mark.slow
@pytest.mark.parametrize("role", ROLES)
def test_a_role_may_be_cancelled_in_any_thirteenth_request_of_a_run_with_evaluations(
    tmp_path: Path, role: str
) -> None:
    cancel_everywhere(tmp_path, role, stride=13, overrides=EVALUATING)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(), EVALUATING], ids=["", "evaluating"])
@pytest.mark.parametrize("role", ROLES)
def test_a_role_may_be_cancelled_in_any_request_to_the_broker(
    tmp_path: Path, role: str, overrides: tuple[str, ...]
) -> None:
    cancel_everywhere(tmp_path, role, stride=1, overrides=overrides)


def cancel_everywhere(
    tmp_path: Path, role: str, stride: int, overrides: tuple[str, ...] = (), hand: int = 1
) -> None:
    """Cancel a role before its first request, after it, before its second, ... until a run makes fewer requests."""
    for place in itertools.count(step=stride):
        world = survive(
            World(tmp_path / str(place), deaths={role: [place]}, overrides=overrides, hand=hand)
        )
        if world.lives[role] == 1:
            break
    assert place > 20


lives = st.lists(st.integers(0, 150), max_size=4)


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(
    learner=lives,
    controller=lives,
    actor=lives,
    seed=st.integers(0, 999),
    faults=st.sampled_from([0.0, 0.3]),
    overrides=st.sampled_from([(), ADAPTIVE, EVALUATING]),
    hand=st.sampled_from([1, 4]),
)
def test_any_sequence_of_deaths_loses_and_doubles_nothing(
    tmp_path_factory: pytest.TempPathFactory,
    learner: list[int],
    controller: list[int],
    actor: list[int],
    seed: int,
    faults: float,
    overrides: tuple[str, ...],
    hand: int,
) -> None:
    deaths = {"learner": learner, "controller": controller, "actor": actor}
    survive(
        World(
            tmp_path_factory.mktemp("world"), deaths, seed, faults, overrides=overrides, hand=hand
        )
    )
