import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from horizonrl.broker.api import Key, Stream, Transport
from horizonrl.broker.groups import GroupLog
from horizonrl.broker.memory import MemoryServer, MemoryTransport
from horizonrl.broker.state import StateStore
from horizonrl.broker.tickets import TicketQueue
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.config.training import EvalSection
from horizonrl.common.state import CategoryYield, HorizonGrowth, HorizonState, Outcomes, Progress
from horizonrl.common.types import Kind, Phase, PolicyVersion, Task, Ticket
from horizonrl.learner.controller.curriculum import EvalTask, TaskSource
from horizonrl.learner.controller.loop import Controller
from horizonrl.learner.controller.main import build_controller
from tests.learner.test_power_cut import cut
from tests.learner.world import MortalTransport
from tests.records import make_group, make_ticket

SETTINGS = (
    "--imitation.steps=2",
    "--imitation.groups_per_step=2",
    "--rl.steps=6",
    "--rl.groups_per_step=2",
    "--rl.max_staleness=1",
    "--horizon.horizons=[4,6]",
    "--horizon.steps_per_stage=3",
    "--rollout.group_size=2",
)
CONFIG = RunConfig.load([], SETTINGS)
ADAPTIVE = RunConfig.load([], [*SETTINGS, "--horizon.kind=adaptive"])
SOURCES = [TaskSource("textcraft", tuple(f"task{n}" for n in range(5)), 1.0)]


EVAL_TASKS = tuple(EvalTask(Task(env_id="textcraft", task_id=f"held{n}"), "all") for n in range(3))
EVALUATING = CONFIG.model_copy(update={"eval": EvalSection(every=3, samples=2, temperature=0.5)})
"""Evaluates at steps 0, 2 (the start of RL), 5 and 8 (the end)."""


@asynccontextmanager
async def controller_on(
    server: MemoryServer, config: RunConfig = CONFIG
) -> AsyncIterator[tuple[Transport, Controller]]:
    transport = MemoryTransport(server, "run")
    controller = build_controller(
        config, transport, SOURCES, planned=EVAL_TASKS if config.eval.every else ()
    )
    task = asyncio.create_task(controller.run())
    try:
        yield transport, controller
    finally:
        task.cancel()
        await asyncio.wait([task])


def rl(step: int, settled: int, growths: Sequence[HorizonGrowth] = ()) -> Progress:
    return Progress(
        step=step + 2,
        phase=Phase.RL,
        phase_step=step,
        policy=PolicyVersion(version=step + 2),
        outcomes={Kind.TRAIN: Outcomes(trained=settled)},
        lowest_unsettled={Kind.TRAIN: settled},
        growths=tuple(growths),
    )


async def issued_after(transport: Transport, progress: Progress, kind: Kind) -> int:
    """Announce progress and return how many tickets are issued once the controller has answered it."""
    state = StateStore(transport)
    await state.put(Key.PROGRESS, progress)
    async with asyncio.timeout(5):
        async for word in state.watch(Key.HORIZON):
            if isinstance(word, HorizonState) and word.phase_step == progress.phase_step:
                count = await TicketQueue(transport).count_issued(kind)
                if count == word.tickets_issued.get(kind):
                    return count
    raise AssertionError("no answer")


async def tickets(transport: Transport, count: int) -> list[Ticket]:
    queue = TicketQueue(transport)
    leases = [await queue.lease(1.0) for _ in range(count)]
    return [lease.ticket for lease in leases if lease is not None]


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


async def test_imitation_issues_what_the_phase_needs_and_no_more() -> None:
    async with controller_on(MemoryServer()) as (transport, _):
        assert await issued_after(transport, Progress(), Kind.DEMO) == 4
        demos = await tickets(transport, 4)
        assert {(ticket.kind, ticket.group_size, ticket.horizon_turns) for ticket in demos} == {
            (Kind.DEMO, 1, 6)
        }


async def test_credit_bounds_what_is_outstanding() -> None:
    async with controller_on(MemoryServer()) as (transport, _):
        assert await issued_after(transport, rl(0, 0), Kind.TRAIN) == 4  # (1 + 1) × 2
        assert await issued_after(transport, rl(1, 3), Kind.TRAIN) == 7


async def test_a_controller_that_starts_in_a_long_run_answers_at_once() -> None:
    server, settled = MemoryServer(), 15_000_000
    await TicketQueue(MemoryTransport(server, "run")).issue(make_ticket(settled - 1))
    async with controller_on(server) as (transport, _):
        assert await issued_after(transport, rl(1, settled), Kind.TRAIN) == settled + 4


async def test_a_lost_ticket_is_issued_again_as_it_was_whatever_is_drawn_now() -> None:
    server = MemoryServer(ack_wait_s=0.05)
    queue = TicketQueue(MemoryTransport(server, "run"))
    drawn_before = make_ticket(0)
    await queue.issue(drawn_before)
    async with controller_on(server) as (transport, controller):
        await StateStore(transport).put(Key.PROGRESS, rl(0, 0))
        made = []
        async with asyncio.timeout(5):
            while made.count(drawn_before) < 2:
                if (held := await queue.lease(1.0)) is not None:
                    await held.acknowledge()  # without a group: the broker has lost it
                    made.append(held.ticket)
        assert controller.metrics.value("tickets_reissued_total", kind="train") >= 1


async def test_at_the_end_of_the_run_nothing_is_issued_that_no_step_needs() -> None:
    async with controller_on(MemoryServer()) as (transport, _):
        # One step of two groups is left.
        assert await issued_after(transport, rl(5, 10), Kind.TRAIN) == 12


async def test_the_ticket_carries_the_horizon_of_the_step_at_which_it_was_issued() -> None:
    async with controller_on(MemoryServer()) as (transport, _):
        await issued_after(transport, rl(2, 0), Kind.TRAIN)
        made = await tickets(transport, 4)
        await issued_after(transport, rl(3, 2), Kind.TRAIN)
        made += await tickets(transport, 2)
        assert [ticket.horizon_turns for ticket in made] == [4] * 4 + [6] * 2
        assert [ticket.issued_at_version.version for ticket in made] == [4] * 4 + [5] * 2


async def test_a_controller_that_died_goes_on_with_the_next_number_task_and_stage() -> None:
    server = MemoryServer()
    made: list[Ticket] = []
    for step in range(5):
        async with controller_on(server) as (transport, _):  # a new one for every step
            await issued_after(transport, rl(step, step * 2), Kind.TRAIN)
            made += await tickets(transport, 2 if step else 4)
    undisturbed: list[Ticket] = []
    async with controller_on(MemoryServer()) as (transport, _):
        for step in range(5):
            await issued_after(transport, rl(step, step * 2), Kind.TRAIN)
            undisturbed += await tickets(transport, 2 if step else 4)
    assert made == undisturbed
    assert [ticket.number for ticket in made] == list(range(12))


async def test_more_settled_than_issued_is_an_error_that_is_counted() -> None:
    async with controller_on(MemoryServer()) as (transport, controller):
        await issued_after(transport, rl(0, 0), Kind.TRAIN)
        await issued_after(transport, rl(5, 9), Kind.TRAIN)
        assert controller.metrics.value("conservation_violations") == 9 - 4


async def test_a_ticket_that_has_ended_is_not_issued_again_though_the_stream_has_lost_it() -> None:
    async with controller_on(MemoryServer()) as (transport, _):
        await issued_after(transport, rl(0, 0), Kind.TRAIN)
        await issued_after(transport, rl(5, 9), Kind.TRAIN)
        assert [ticket.number for ticket in await tickets(transport, 2)] == [9, 10]


async def test_a_store_that_goes_back_takes_the_credit_of_the_ends_that_it_has_lost() -> None:
    """The controller lives on. What it had issued on that credit is issued again once there is credit for it."""
    server = MemoryServer(ack_wait_s=0.05)
    async with controller_on(server) as (transport, controller):
        assert await issued_after(transport, rl(0, 0), Kind.TRAIN) == 4
        assert await issued_after(transport, rl(1, 4), Kind.TRAIN) == 8

        async def stored(count: int) -> list[int]:
            """Return the tickets in the stream once there are `count`, and a few audits later."""
            while (await transport.extent(Stream.TICKETS)).messages < count:
                await asyncio.sleep(0.01)
            await asyncio.sleep(4 * transport.ack_wait_s)
            queue = TicketQueue(transport)
            return [ticket.number for _, ticket in await queue.stored_tickets()]

        async with asyncio.timeout(5):
            await StateStore(transport).put(Key.PROGRESS, rl(0, 0))
            cut(server, Stream.TICKETS, 8)
            assert await stored(4) == [0, 1, 2, 3]
            for settled in (1, 2):
                await StateStore(transport).put(Key.PROGRESS, rl(0, settled))
                assert await stored(4 + settled) == list(range(4 + settled))
        assert controller.metrics.value("tickets_reissued_total", kind="train") == 4
        # The learner comes back with a checkpoint that has more ends than the stream has tickets.
        assert await issued_after(transport, rl(3, 8), Kind.TRAIN) == 12
        assert controller.metrics.value("conservation_violations") == 0


async def test_queue_and_log_are_measured_while_nobody_makes_progress() -> None:
    async with controller_on(MemoryServer(ack_wait_s=0.1)) as (transport, controller):
        await issued_after(transport, rl(0, 0), Kind.TRAIN)
        assert controller.metrics.value("groups_waiting") == 0
        (lease,) = [await TicketQueue(transport).lease(1.0)]
        assert lease is not None
        async with asyncio.timeout(5), lease.held():
            await GroupLog(transport).publish(make_group())
            while not controller.metrics.value("groups_waiting"):
                await asyncio.sleep(0.02)
            assert controller.metrics.value("tickets_waiting") == 3
            assert controller.metrics.value("tickets_leased") == 1


GROWTH = HorizonGrowth(
    env_id="textcraft", phase_step=3, from_turns=4, to_turns=6, reason="measured"
)


async def test_an_adaptive_horizon_is_the_one_that_the_learner_has_decided_on() -> None:
    async with controller_on(MemoryServer(), ADAPTIVE) as (transport, _):
        await issued_after(transport, rl(4, 0), Kind.TRAIN)  # however many steps there were
        await issued_after(transport, rl(4, 2, [GROWTH]), Kind.TRAIN)
        made = await tickets(transport, 6)
        assert [ticket.horizon_turns for ticket in made] == [4] * 4 + [6] * 2


async def test_a_round_is_issued_before_what_is_trained_with_the_longest_horizon_and_its_own_sampling() -> (
    None
):
    async with controller_on(MemoryServer(), EVALUATING) as (transport, _):
        await issued_after(transport, Progress(), Kind.DEMO)
        made = await tickets(transport, 4)
        assert [ticket.kind for ticket in made] == [Kind.EVAL] * 3 + [Kind.DEMO]
        assert [ticket.task for ticket in made[:3]] == [planned.task for planned in EVAL_TASKS]
        assert {(ticket.group_size, ticket.horizon_turns) for ticket in made[:3]} == {(2, 6)}
        assert {ticket.sampling.temperature for ticket in made[:3]} == {0.5}
        assert made[3].sampling.temperature == 1.0


async def test_evaluations_may_have_a_horizon_of_their_own_so_that_schedules_compare() -> None:
    config = EVALUATING.model_copy(
        update={"eval": EVALUATING.eval.model_copy(update={"horizon": 9})}
    )
    async with controller_on(MemoryServer(), config) as (transport, _):
        await issued_after(transport, Progress(), Kind.DEMO)
        assert [ticket.horizon_turns for ticket in await tickets(transport, 4)] == [9, 9, 9, 6]


async def test_an_adaptive_horizon_stays_when_learner_and_controller_go_back_behind_its_growth() -> (
    None
):
    server = MemoryServer()
    async with controller_on(server, ADAPTIVE) as (transport, _):
        await issued_after(transport, rl(3, 0, [GROWTH]), Kind.TRAIN)
    async with controller_on(server, ADAPTIVE) as (transport, controller):
        await issued_after(transport, rl(2, 2), Kind.TRAIN)
        assert {ticket.horizon_turns for ticket in await tickets(transport, 4)} == {6}
        assert controller.metrics.value("horizon_turns", env="textcraft") == 6


def test_no_later_ticket_has_fewer_turns_wherever_the_controller_dies() -> None:
    async def horizons(dies_at: int) -> tuple[list[int], bool]:
        """Kill a controller that answers a growth; return what its successor makes of an earlier step."""
        server = MemoryServer()
        mortal = MortalTransport(server, dies_at)
        await StateStore(MemoryTransport(server, "run")).put(Key.PROGRESS, rl(3, 0, [GROWTH]))
        mortal.program = asyncio.create_task(build_controller(ADAPTIVE, mortal, SOURCES).run())
        await asyncio.wait([mortal.program], timeout=0.1)
        survived = not mortal.program.done()
        mortal.program.cancel()
        await StateStore(MemoryTransport(server, "run")).put(Key.PROGRESS, rl(2, 0))
        async with controller_on(server, ADAPTIVE) as (transport, _):
            await issued_after(transport, rl(2, 0), Kind.TRAIN)
            return [ticket.horizon_turns for ticket in await tickets(transport, 4)], survived

    async def scenario() -> None:
        for dies_at in itertools.count():
            made, survived = await horizons(dies_at)
            assert made == sorted(made)
            assert len(made) == 4
            if survived:
                break
        assert dies_at > 10

    run(scenario)


async def test_rounds_are_due_by_the_step_and_stand_outside_the_credit() -> None:
    async with controller_on(MemoryServer(), EVALUATING) as (transport, _):
        counts = [
            await issued_after(transport, rl(step, 2 * step), Kind.EVAL)
            for step in (0, 1, 2, 3, 5, 6)
        ]
        # At step 2, where the first is late, at 5 and at 8.
        assert counts == [6, 6, 6, 9, 9, 12]
        assert await TicketQueue(transport).count_issued(Kind.TRAIN) == 12


async def test_a_round_that_a_fast_learner_has_passed_is_issued_late_with_the_version_at_hand() -> (
    None
):
    async with controller_on(MemoryServer(), EVALUATING) as (transport, _):
        await issued_after(transport, Progress(), Kind.EVAL)
        assert await issued_after(transport, rl(4, 0), Kind.EVAL) == 9
        made = [ticket for ticket in await tickets(transport, 17) if ticket.kind is Kind.EVAL]
        assert [ticket.issued_at_version.version for ticket in made] == [0] * 3 + [6] * 6
        assert [ticket.number for ticket in made] == list(range(9))


async def test_a_controller_that_died_within_a_round_completes_it_and_begins_no_other() -> None:
    server = MemoryServer()
    queue = TicketQueue(MemoryTransport(server, "run"))
    async with controller_on(MemoryServer(), EVALUATING) as (transport, _):
        await issued_after(transport, Progress(), Kind.EVAL)
        made = await tickets(transport, 3)
    for ticket in made[:2]:
        await queue.issue(ticket)
    for _ in range(2):
        async with controller_on(server, EVALUATING) as (transport, _):
            assert await issued_after(transport, Progress(), Kind.EVAL) == 3
    again = await tickets(MemoryTransport(server, "run"), 3)
    assert [ticket.task for ticket in again] == [planned.task for planned in EVAL_TASKS]


@pytest.mark.parametrize("kind", ["uniform", "adaptive"])
async def test_yields_of_the_recipe_before_a_change_of_it_are_passed_over(kind: str) -> None:
    envs = '--envs=[{"id":"textcraft"},{"id":"wordle","kinds":["eval"]}]'
    config = RunConfig.load([], [*SETTINGS, f"--curriculum.kind={kind}", envs])
    names = ("common", "common", "common", "common", "rare")
    sources = [
        TaskSource("textcraft", tuple(f"task{n}" for n in range(5)), 1.0, (Kind.TRAIN,), names),
        TaskSource("wordle", ("held",), 1.0, (Kind.EVAL,), ("held",)),
    ]
    # Before the change, all environments were trained, with an adaptive curriculum.
    before = {"textcraft": "rare", "wordle": "held", "gone": "any"}
    yields = tuple(
        CategoryYield(env_id=env, category=name, varied=9.0, seen=10.0)
        for env, name in before.items()
    )
    yields += (CategoryYield(env_id="textcraft", category="common", varied=0.0, seen=10.0),)
    progress = rl(0, 0).model_copy(update={"yields": yields})

    transport = MemoryTransport(MemoryServer(), "run")
    task = asyncio.create_task((controller := build_controller(config, transport, sources)).run())
    assert await issued_after(transport, progress, Kind.TRAIN) == 4
    assert not task.done()
    task.cancel()
    await asyncio.wait([task])
    drawn = [controller._ticket(Kind.TRAIN, number, progress).task.task_id for number in range(5)]
    assert (sorted(drawn) == sorted(sources[0].task_ids)) == (kind == "uniform")
    share = controller.metrics.value("curriculum_share", env="textcraft", category="rare")
    assert (share > 0.5) == (kind == "adaptive")
