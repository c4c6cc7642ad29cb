"""The learner, the controller and an actor, killed at every request that they make to the broker."""

import asyncio
import itertools
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import CapturingLogger

from horizonrl.broker.api import Key
from horizonrl.broker.codec import encode
from horizonrl.broker.groups import GroupLog
from horizonrl.broker.memory import MemoryTransport
from horizonrl.broker.state import StateStore
from horizonrl.broker.tickets import TicketQueue
from horizonrl.common.errors import CheckpointError, NothingToLearn, RunFailed
from horizonrl.common.run_dir import METRICS
from horizonrl.common.state import Progress, WeightsManifest
from horizonrl.common.types import Kind, PolicyVersion, Void
from horizonrl.learner.intake.batch import Trace
from horizonrl.learner.records.best import Best
from horizonrl.learner.records.journal import only_learner
from horizonrl.ops.run.directory import read_lines
from tests.learner.world import EVALUATING, HashEngine, MortalTransport, World, played
from tests.records import make_group, make_ticket


def survive(world: World) -> World:
    async def scenario() -> None:
        await world.run()
        await world.check()
        for line in world.evals():
            assert line["version"] >= world.config.eval_step(int(line["ends"][0][1].removeprefix("eval-")) // 3)

    asyncio.run(scenario())
    return world


ADAPTIVE = ("--horizon.kind=adaptive",)
CLONING = ("--rl.demos_per_step=3", "--rl.publish_every=2")


@pytest.mark.parametrize("overrides", [(), ADAPTIVE])
def test_an_undisturbed_run_settles_every_ticket_once(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    world = survive(World(tmp_path, overrides=overrides))
    assert world.lives == {"learner": 1, "controller": 1, "actor": 1}


def test_the_growth_of_a_horizon_is_counted(tmp_path: Path) -> None:
    world = survive(World(tmp_path, overrides=ADAPTIVE))
    told = sum(len(line["growths"]) for line in read_lines(world.config.run_dir / METRICS))
    assert world.metrics.value("horizon_growths_total", env="textcraft") == told > 0


def test_every_round_of_evaluation_is_written_once_and_the_best_version_is_kept(tmp_path: Path) -> None:
    world = survive(World(tmp_path, overrides=EVALUATING))
    evals = sorted(world.evals(), key=lambda line: line["version"])
    assert [line["version"] for line in evals] == [0, 2, 4, 6, 7]
    assert all(line["newest_version"] >= min(line["version"] + 4, 7) for line in evals)
    assert [(line["phase"], line["phase_step"]) for line in evals][:3] == [("imitation", 0), ("rl", 0), ("rl", 2)]
    best = Best(world.config.run_dir / "best").read()
    assert best is not None
    assert best["version"] == max(evals, key=lambda line: (line["success_rate"], line["version"]))["version"] == 2


def test_demonstrations_stand_beside_the_groups_of_rl_in_their_share(tmp_path: Path) -> None:
    world = survive(World(tmp_path, overrides=CLONING))
    in_rl = [[ticket.partition("-")[0] for _, ticket in line["trained"]] for line in world.ledger()[2:]]
    assert [kinds.count("train") for kinds in in_rl] == [2] * 5
    assert 10 <= sum(kinds.count("demo") for kinds in in_rl) <= 15
    assert not any("phase" in drop for line in world.ledger() for drop in line["dropped"])


@pytest.mark.parametrize(("every", "bound"), [(3, 2), (3, 3), (5, 4)])
def test_rounds_of_one_version_waste_no_group_on_staleness(tmp_path: Path, every: int, bound: int) -> None:
    overrides = (f"--rl.publish_every={every}", f"--rl.max_staleness={bound}", "--rl.steps=12")
    world = survive(World(tmp_path, overrides=overrides))
    assert not [drop for line in world.ledger() for drop in line["dropped"]]


def test_a_version_that_is_evaluated_is_one_that_actors_get(tmp_path: Path) -> None:
    world = World(tmp_path, overrides=(*EVALUATING, "--rl.publish_every=3", "--rl.max_staleness=2"))
    world._too_early = lambda *_: False  # type: ignore[method-assign]
    for line in survive(world).evals():
        assert line["oldest_version"] >= line["version"]


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


def test_parts_of_an_ended_ticket_do_not_hide_that_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two actors uploaded one large group; the second one's parts are behind it in the log, and mean nothing."""
    monkeypatch.setattr("horizonrl.learner.loop.QUIET_S", 0.05)
    world = World(tmp_path, overrides=("--imitation.steps=0", "--rl.steps=1", "--rl.groups_per_step=1"))

    async def scenario() -> None:
        transport = MortalTransport(world.server, None)
        lost = make_group(0, rewards=(0.0, 0.0))
        await TicketQueue(transport).issue(lost.ticket)
        await GroupLog(transport).publish(lost)
        await transport.publish("groups.part", b"x", message_id=f"{lost.ticket.end_id}.0123456789abcdef.0")
        learning = asyncio.create_task(world.learner(transport).run())
        async for progress in StateStore(transport).watch(Key.PROGRESS):
            if isinstance(progress, Progress) and progress.settled(Kind.TRAIN):
                break
        learning.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 10))


@pytest.mark.parametrize("role", ["learner", "controller"])
def test_a_run_with_demonstrations_in_rl_survives_too(tmp_path: Path, role: str) -> None:
    cancel_everywhere(tmp_path, role, stride=13, overrides=CLONING)


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
def test_a_role_may_be_cancelled_in_any_thirteenth_request_of_a_run_with_evaluations(tmp_path: Path, role: str) -> None:
    cancel_everywhere(tmp_path, role, stride=13, overrides=EVALUATING)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(), EVALUATING], ids=["", "evaluating"])
@pytest.mark.parametrize("role", ROLES)
def test_a_role_may_be_cancelled_in_any_request_to_the_broker(
    tmp_path: Path, role: str, overrides: tuple[str, ...]
) -> None:
    cancel_everywhere(tmp_path, role, stride=1, overrides=overrides)


def cancel_everywhere(tmp_path: Path, role: str, stride: int, overrides: tuple[str, ...] = ()) -> None:
    """Cancel a role before its first request, after it, before its second, ... until a run makes fewer requests."""
    for place in itertools.count(step=stride):
        world = survive(World(tmp_path / str(place), deaths={role: [place]}, overrides=overrides))
        if world.lives[role] == 1:
            break
    assert place > 20


lives = st.lists(st.integers(0, 150), max_size=4)


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(
    learner=lives,
    controller=lives,
    actor=lives,
    seed=st.integers(0, 999),
    faults=st.sampled_from([0.0, 0.3]),
    overrides=st.sampled_from([(), ADAPTIVE, EVALUATING]),
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


@pytest.mark.parametrize(("before", "now", "told"), [(4, 8, "4 → 8"), (0, 4, "None → 4"), (4, 0, "4 → None")], ids=str)
def test_a_run_does_not_go_on_with_adapters_of_another_rank(tmp_path: Path, before: int, now: int, told: str) -> None:
    async def scenario() -> None:
        first = World(tmp_path, overrides=(f"--lora.rank={before}",))
        await first.run()
        other = World(tmp_path, server=first.server, overrides=(f"--lora.rank={now}", "--rl.steps=9"))
        with pytest.raises(ExceptionGroup) as refused:
            await other.learner(MortalTransport(first.server, None)).run()
        assert refused.group_contains(CheckpointError, match=rf"lora\.rank: {told}")

    asyncio.run(scenario())


def test_a_run_does_not_go_on_with_another_evaluation(tmp_path: Path) -> None:
    async def scenario() -> None:
        first = World(tmp_path, overrides=EVALUATING)
        await first.run()
        other = World(tmp_path, server=first.server, overrides=("--eval.every=3", "--rl.steps=9"))
        with pytest.raises(ExceptionGroup) as refused:
            await other.learner(MortalTransport(first.server, None)).run()
        assert refused.group_contains(CheckpointError, match="or evaluation")

    asyncio.run(scenario())


def test_a_run_that_goes_on_evaluates_on_and_the_last_round_again_counts_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        first = World(tmp_path, overrides=EVALUATING)
        await first.run()
        second = World(tmp_path, server=first.server, overrides=(*EVALUATING, "--rl.steps=8"))
        await second.run()
        await second.check()
        assert [line["version"] for line in second.evals()] == [0, 2, 4, 6, 7, 10]
        assert second.evals()[4]["settled_step"] == 8  # it had been read after the last step, now before the next

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
        assert replaced.group_contains(RunFailed, match="another learner speaks")
        assert world.ledger() == []

    asyncio.run(scenario())


def test_two_learners_do_not_share_a_run_directory(tmp_path: Path) -> None:
    with only_learner(tmp_path), pytest.raises(RunFailed, match="another learner works"), only_learner(tmp_path):
        pass


def test_a_run_whose_last_evaluation_nobody_plays_ends_without_it(tmp_path: Path) -> None:
    world = World(tmp_path, overrides=(*EVALUATING, "--learner.step_timeout_s=2"), idle_from=7)
    asyncio.run(world.run())
    assert [line["version"] for line in world.evals()][:3] == [0, 2, 4]
    assert 7 not in [line["version"] for line in world.evals()]


def test_a_learner_that_is_stopped_before_the_last_evaluation_is_in_has_not_finished(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = World(tmp_path, overrides=EVALUATING, idle_from=7)
        running = asyncio.create_task(world.run())
        while len(world.evals()) < 4:  # all but the last one
            await asyncio.sleep(0.01)
        world.stopping.set()
        await asyncio.sleep(0.1)
        progress = await StateStore(MortalTransport(world.server, None)).get(Key.PROGRESS)
        assert isinstance(progress, Progress)
        assert (progress.step, progress.finished) == (7, False)
        running.cancel()
        await asyncio.wait([running])
        again = World(tmp_path, server=world.server, overrides=EVALUATING)
        await again.run()
        await again.check()

    asyncio.run(scenario())


@pytest.mark.parametrize(("refused", "warnings"), [(50, 2), (10_000, 5)])
def test_a_step_that_finds_hardly_a_group_to_train_on_says_so_and_gives_up_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int, warnings: int
) -> None:
    refusals, log = itertools.count(), CapturingLogger()
    monkeypatch.setattr("horizonrl.learner.intake.collector.teaches", lambda *_: next(refusals) >= refused)
    monkeypatch.setattr("horizonrl.learner.loop.log", log)
    given_up = False
    try:
        asyncio.run(World(tmp_path).run())
    except* NothingToLearn:
        given_up = True
    assert given_up == (refused == 10_000)
    told = [call.kwargs for call in log.calls if call.args == ("batch_starved",)]
    assert [each["dropped"] for each in told] == [{"zero_variance": 20 << doubling} for doubling in range(warnings)]
    assert all(each["success_rate"] == 0 for each in told)


def test_a_run_that_begins_again_with_other_steps_has_actors_begin_again_too(tmp_path: Path) -> None:
    """It died before its first checkpoint. Groups of versions that the new line does not reach would all be dropped."""

    async def scenario() -> None:
        rarely = ("--imitation.steps=0", "--learner.checkpoint_every=100", "--rl.steps=6")
        first = World(tmp_path, overrides=rarely)
        running = asyncio.create_task(first.run())
        while len(first.ledger()) < 4:
            await asyncio.sleep(0.005)
        running.cancel()
        await asyncio.wait([running])
        second = World(tmp_path, server=first.server, overrides=(*rarely, "--rl.groups_per_step=8"))
        await second.run()
        of_the_old_line = [drop for line in second.ledger() for drop in line["dropped"] if drop[2] == "lineage"]
        assert len(second.ledger()) == 6
        assert 0 < len(of_the_old_line) <= 24  # those in the log, and those under way
        announced = await StateStore(MortalTransport(first.server, None)).get(Key.POLICY)
        assert isinstance(announced, WeightsManifest)
        assert announced.policy == PolicyVersion(version=6, lineage=1)

    asyncio.run(scenario())


def test_a_run_that_is_given_fewer_steps_than_it_has_taken_is_finished(tmp_path: Path) -> None:
    async def scenario() -> None:
        first = World(tmp_path, overrides=EVALUATING)
        await first.run()
        shorter = World(tmp_path, server=first.server, overrides=(*EVALUATING, "--rl.steps=3"))
        await shorter.run()
        progress = await StateStore(MortalTransport(first.server, None)).get(Key.PROGRESS)
        assert isinstance(progress, Progress)
        assert (progress.step, progress.finished, progress.policy.lineage) == (7, True, 1)

    asyncio.run(scenario())


def test_a_ticket_is_not_ended_before_it_was_issued(tmp_path: Path) -> None:
    """Without ticket keys anybody may write under any id: its ticket stays open, and the honest group is trained."""
    world = World(tmp_path)
    early = make_ticket(3, version=2).model_copy(update={"horizon_turns": 4})
    never = make_ticket(1_000, version=2).model_copy(update={"horizon_turns": 6})
    foreign = [
        ("groups.train", encode(played(early, PolicyVersion(), random.Random(0))), early.end_id),
        ("groups.void", encode(Void(ticket=never, reason="gone", actor="evil")), never.end_id),
        ("groups.train", b"junk", "train-00000004"),
    ]

    async def intrude() -> None:
        transport = MemoryTransport(world.server, "run")
        for subject, data, message_id in foreign:
            await transport.publish(subject, data, message_id=message_id)

    asyncio.run(intrude())
    survive(world)
    assert world.metrics.value("log_entries_refused_total", reason="never_issued") == len(foreign)
    assert world.ledger()[0]["never_issued"] == [1, 2, 3]
    ends = [end[1] for line in world.ledger() for end in [*line["trained"], *line["dropped"], *line["voids"]]]
    assert {early.ticket_id, "train-00000004"} <= set(ends)
    assert never.ticket_id not in ends
