"""The adaptive curriculum: what categories yield, and what is drawn for it."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horizonrl.broker.api import Key
from horizonrl.broker.groups import GroupLog
from horizonrl.broker.memory import MemoryServer, MemoryTransport
from horizonrl.broker.state import StateStore
from horizonrl.common.errors import ConfigError
from horizonrl.common.state import (
    MAX_CATEGORIES,
    MAX_REPEATED,
    CategoryYield,
    Progress,
    RepeatedTasks,
)
from horizonrl.common.types import DropReason, Group, Kind, Provenance, Task
from horizonrl.learner.controller.curriculum import (
    FLOOR,
    HALF,
    REPEATED,
    REPEATED_LABEL,
    Curriculum,
    TaskSource,
)
from horizonrl.learner.controller.yields import Yields
from horizonrl.learner.intake.collector import Drop, PendingBatch
from horizonrl.ops.rundir.lines import read_lines
from tests.learner import world
from tests.learner.world import World
from tests.records import make_episode, make_ticket, make_turn

SIZES = {"easy": 60, "middle": 30, "hard": 10}
SOURCE = TaskSource(
    "textcraft",
    tuple(f"{category}-{place}" for category, size in SIZES.items() for place in range(size)),
    1.0,
    categories=tuple(category for category, size in SIZES.items() for _ in range(size)),
)

Seen = Sequence[tuple[str, bool]]
seen_groups = st.lists(st.tuples(st.sampled_from(sorted(SIZES)), st.booleans()), max_size=60)


def group_of(
    category: str,
    varied: bool,
    kind: Kind = Kind.TRAIN,
    place: int = 0,
    repeated: bool = False,
    number: int = 0,
) -> Group:
    task = Task(env_id="textcraft", task_id=f"{category}-{place}")
    ticket = make_ticket(number, kind=kind, group_size=2).model_copy(
        update={"task": task, "repeated": repeated}
    )
    episodes = tuple(
        make_episode(index, make_turn(reward=float(varied * index))) for index in (0, 1)
    )
    return Group(ticket=ticket, episodes=episodes, provenance=Provenance(actor="test"))


def varies(group: Group) -> bool:
    return len({episode.episode_return for episode in group.valid_episodes}) > 1


def folded(seen: Seen, yields: Yields | None = None, start: int = 0) -> Yields:
    """Fold groups of categories, each of another task than the one before it of that category."""
    yields = yields or Yields([SOURCE])
    for number, (category, varied) in enumerate(seen, start):
        # Tasks of ten in turn, and never one that taught the last time: such a group says nothing of its category.
        repeated = yields.repeats()[0].task_ids
        places = [
            place for place in range(SIZES[category]) if f"{category}-{place}" not in repeated
        ]
        yields.observe(
            [group_of(category, varied, place=places[number % len(places)] if places else 0)],
            varies,
        )
    return yields


def repeated_of(*task_ids: str, varied: float = 0.0, seen: float = 0.0) -> RepeatedTasks:
    return RepeatedTasks(env_id="textcraft", task_ids=task_ids, varied=varied, seen=seen)


def drawn(yields: Sequence[CategoryYield], tickets: int) -> list[str]:
    curriculum = Curriculum(0, [SOURCE])
    return [curriculum.draw(Kind.TRAIN, number, yields)[0].task_id for number in range(tickets)]


def test_what_the_learner_refused_is_no_evidence() -> None:
    """A task that takes long was drawn again and again: its groups differed, and all of them came too late."""
    ends = {
        0: None,
        1: DropReason.ZERO_VARIANCE,
        2: DropReason.STALE,
        3: DropReason.LINEAGE,
        4: DropReason.TEMPERATURE,
    }
    groups = [group_of("easy", number != 1, place=number, number=number) for number in ends]
    dropped = [
        Drop(number, group.ticket.ticket_id, reason)
        for (number, reason), group in zip(ends.items(), groups, strict=True)
        if reason is not None
    ]
    pending = PendingBatch(consumed=groups, dropped=dropped)
    assert [end for _, end in pending.ends()] == [
        "trained",
        "zero_variance",
        "stale",
        "lineage",
        "temperature",
    ]
    yields = Yields([SOURCE])
    yields.observe(pending.evidence, varies)
    assert [each.task_ids for each in yields.repeats()] == [("easy-0",)]
    (easy,) = [each for each in yields.all() if each.category == "easy"]
    assert (easy.varied, easy.seen) == (pytest.approx(0.95), pytest.approx(1.95))


def test_a_task_that_is_always_stale_is_not_repeated_in_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = tuple(f"task{n}" for n in range(60))
    source = TaskSource("textcraft", tasks, 1.0, categories=("all",) * 60)
    monkeypatch.setattr(world, "SOURCES", [source])
    monkeypatch.setattr("horizonrl.learner.main.sources_of", lambda _: [source])
    run = World(
        tmp_path,
        hand=5,
        patience_s=0.3,
        server=MemoryServer(ack_wait_s=5),
        overrides=("--curriculum.kind=adaptive", "--rl.stale=drop", "--rl.steps=12"),
    )
    asyncio.run(run.run())
    ledger = run.ledger()
    stale = {
        ticket for line in ledger for _, ticket, reason in line["dropped"] if reason == "stale"
    }
    assert stale, "an actor that ends the newest ticket first makes stale groups"
    trained = {ticket for line in ledger for _, ticket in line["trained"]}
    episodes = [
        read_lines(path) for path in sorted((run.config.run_dir / "episodes").glob("step-*.jsonl"))
    ]
    task_of = {line["ticket"]: line["task"] for lines in episodes for line in lines}
    taught = {task_of[ticket] for ticket in trained if ticket.startswith("train")}
    progress = asyncio.run(StateStore(MemoryTransport(run.server, "run")).get(Key.PROGRESS))
    assert isinstance(progress, Progress)
    assert set(progress.repeats[0].task_ids) <= taught


def test_before_anything_was_seen_each_category_is_drawn_by_its_number_of_tasks() -> None:
    counts = Counter(task_id.partition("-")[0] for task_id in drawn(Yields([SOURCE]).all(), 10_000))
    assert all(
        counts[category] / 10_000 == pytest.approx(size / 100, abs=0.02)
        for category, size in SIZES.items()
    )


def test_more_is_drawn_from_what_yields_and_no_task_is_given_up() -> None:
    yields = folded([("easy", False)] * 100 + [("middle", True)] * 100 + [("hard", False)] * 100)
    counts = Counter(task_id.partition("-")[0] for task_id in drawn(yields.all(), 10_000))
    # 30 tasks that always teach, against 60 and 10 at the floor.
    expected = {"easy": 60 * FLOOR, "middle": 30, "hard": 10 * FLOOR}
    total = sum(expected.values())
    assert all(
        counts[name] / 10_000 == pytest.approx(share / total, abs=0.02)
        for name, share in expected.items()
    )
    assert set(drawn(yields.all(), 20_000)) == set(SOURCE.task_ids)


@given(seen_groups)
def test_the_shares_are_a_distribution_above_the_floor(seen: Seen) -> None:
    shares = Curriculum(0, [SOURCE]).shares("textcraft", folded(seen).all())
    assert sum(shares.values()) == pytest.approx(1.0)
    chances = [share / SIZES[category] for category, share in shares.items()]
    assert min(chances) >= FLOOR * max(chances) * (1 - 1e-9)


@given(seen_groups)
def test_two_controllers_draw_the_same_for_the_same_progress(seen: Seen) -> None:
    yields = folded(seen).all()
    assert drawn(yields, 20) == drawn(yields, 20)


@given(seen_groups, st.integers(min_value=0, max_value=60))
def test_a_resumed_fold_goes_on_as_if_nothing_had_happened(seen: Seen, place: int) -> None:
    resumed, before = Yields([SOURCE]), folded(seen[:place])
    resumed.restore(
        *(
            [each.model_dump(mode="json") for each in part]
            for part in (before.all(), before.repeats())
        )
    )
    after, whole = folded(seen[place:], resumed, place), folded(seen)
    assert (after.all(), after.repeats()) == (whole.all(), whole.repeats())


def test_old_groups_fade() -> None:
    yields = Yields(
        [
            TaskSource(
                "textcraft", tuple(f"hard-{n}" for n in range(230)), 1.0, categories=("hard",) * 230
            )
        ]
    )
    yields.observe([group_of("hard", place >= 200, place=place) for place in range(230)], varies)
    (hard,) = yields.all()
    assert hard.share > 0.75
    assert hard.seen <= 20


def test_a_task_is_repeated_while_its_groups_vary() -> None:
    yields = Yields([SOURCE])
    seen = (
        (0, True, False),
        (1, False, False),
        (2, True, False),
        (0, True, True),
        (2, False, True),
        (3, True, False),
    )
    for place, varied, again in seen:
        yields.observe([group_of("hard", varied, place=place, repeated=again)], varies)
    (repeated,) = yields.repeats()
    assert repeated.task_ids == ("hard-0", "hard-3")
    # The second groups of 0 and 2 were of tasks that taught the last time: they say nothing of the category.
    assert (repeated.varied, repeated.seen) == pytest.approx((0.95, 1.95))
    hard = next(each for each in yields.all() if each.category == "hard")
    assert (round(hard.seen, 6), round(hard.varied, 6)) == (
        round(1 + 0.95 + 0.95**2 + 0.95**3, 6),
        round(1 + 0.95 + 0.95**3, 6),
    )


def test_copies_that_were_in_flight_when_their_task_left_the_list_say_nothing_of_its_category() -> (
    None
):
    yields = Yields([SOURCE])
    yields.observe([group_of("hard", True)], varies)
    copies = [group_of("hard", varied, repeated=True) for varied in (False, True, True)]
    yields.observe(copies, varies)
    hard = next(each for each in yields.all() if each.category == "hard")
    assert (hard.seen, hard.varied) == (1.0, 1.0)
    assert yields.repeats()[0].seen == pytest.approx(1 + 0.95 + 0.95**2)


def test_a_ticket_says_whether_its_task_is_repeated() -> None:
    curriculum, yields, repeats = (
        Curriculum(0, [SOURCE]),
        Yields([SOURCE]).all(),
        [repeated_of("hard-3")],
    )
    drawn = [curriculum.draw(Kind.TRAIN, number, yields, repeats) for number in range(400)]
    assert {task.task_id for task, repeated in drawn if repeated} == {"hard-3"}
    assert not any(
        repeated
        for _, repeated in (curriculum.draw(Kind.TRAIN, number, yields) for number in range(100))
    )


def test_the_oldest_of_too_many_repeated_tasks_is_dropped() -> None:
    source = TaskSource(
        "textcraft", tuple(f"easy-{n}" for n in range(99)), 1.0, categories=("easy",) * 99
    )
    yields = Yields([source])
    yields.observe(
        [group_of("easy", True, place=place) for place in range(MAX_REPEATED + 3)], varies
    )
    assert yields.repeats()[0].task_ids == tuple(
        f"easy-{place}" for place in range(3, MAX_REPEATED + 3)
    )


def test_tasks_that_taught_last_time_get_a_share_that_rises_with_their_number_and_falls_with_their_yield() -> (
    None
):
    curriculum, unseen = Curriculum(0, [SOURCE]), Yields([SOURCE]).all()
    eight = [f"easy-{place}" for place in range(8)]
    assert curriculum.repeated_share(repeated_of(), unseen) == 0
    assert curriculum.repeated_share(repeated_of(*eight), unseen) == pytest.approx(
        REPEATED * 8 / (8 + HALF)
    )
    worn = repeated_of(*eight, varied=0.0, seen=9.0)
    assert curriculum.repeated_share(worn, unseen) == pytest.approx(REPEATED / 2 * 0.1)
    tickets = [
        curriculum.draw(Kind.TRAIN, number, unseen, [repeated_of(*eight)])[0].task_id
        for number in range(4_000)
    ]
    fresh = (1 - REPEATED / 2) * 8 / 100
    assert sum(task_id in eight for task_id in tickets) / 4_000 == pytest.approx(
        REPEATED / 2 + fresh, abs=0.03
    )
    assert set(SOURCE.task_ids) == set(tickets)


@given(seen_groups)
def test_what_is_explained_is_what_is_drawn(seen: Seen) -> None:
    yields = folded(seen)
    explained = Curriculum(0, [SOURCE]).explained(yields.all(), yields.repeats())
    assert sum(each.share for each in explained) == pytest.approx(1.0)
    again, *categories = explained
    assert (again.category, again.tasks) == (REPEATED_LABEL, len(yields.repeats()[0].task_ids))
    assert {each.category: each.tasks for each in categories} == SIZES
    assert [each.differed for each in categories] == [
        each.differed for each in sorted(yields.all(), key=locate)
    ]
    seen_categories = {category for category, _ in seen}
    assert all(
        (each.differed is None) is (each.category not in seen_categories) for each in categories
    )


def locate(each: CategoryYield) -> int:
    return list(SIZES).index(each.category)


def test_a_uniform_curriculum_has_nothing_to_explain() -> None:
    assert Curriculum(0, [SOURCE]).explained((), ()) == []


def test_a_task_that_the_run_no_longer_has_is_not_repeated() -> None:
    yields = Yields([SOURCE])
    yields.restore(
        [], [repeated_of("gone-0", "easy-1").model_dump(), {"env_id": "maze", "task_ids": ["a"]}]
    )
    assert yields.repeats() == (repeated_of("easy-1"),)


def test_only_train_groups_of_the_runs_own_tasks_count() -> None:
    yields = Yields([SOURCE])
    yields.observe([group_of("gone", True), group_of("easy", True, Kind.DEMO)], varies)
    assert yields.all() == Yields([SOURCE]).all()


def test_a_category_that_the_run_no_longer_has_is_forgotten() -> None:
    yields = Yields([SOURCE])
    yields.restore([{"env_id": "textcraft", "category": "gone", "varied": 3.0, "seen": 4.0}])
    assert yields.all() == Yields([SOURCE]).all()


def test_more_categories_than_a_progress_record_holds_are_refused() -> None:
    names = tuple(f"c{place}" for place in range(MAX_CATEGORIES + 1))
    with pytest.raises(
        ConfigError, match=rf"have {MAX_CATEGORIES + 1} categories of tasks: it follows at most"
    ):
        Yields([TaskSource("textcraft", names, 1.0, categories=names)])


def test_a_category_of_a_longer_name_than_a_progress_record_holds_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"has 129 characters: it follows names of at most 128"):
        Yields([TaskSource("textcraft", ("a",), 1.0, categories=("c" * 129,))])


@pytest.mark.parametrize("deaths", [{}, {"learner": [9, 22, 41]}, {"controller": [8, 17, 30]}])
async def test_a_run_loses_and_doubles_nothing_whoever_dies(
    deaths: dict[str, list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "SOURCES", [SOURCE])
    monkeypatch.setattr("horizonrl.learner.main.sources_of", lambda _: [SOURCE])
    run = World(tmp_path, deaths=deaths, overrides=("--curriculum.kind=adaptive",))

    await run.run()
    await run.check()
    # The learner of the last life has the yields of the whole log, whatever its lives before had read.
    yields, log = (
        Yields([SOURCE]),
        await GroupLog(MemoryTransport(run.server, "run")).read(after=0),
    )
    records: dict[str, Group] = {}
    while (entry := await log.next(0.0)) is not None:
        if isinstance(entry.record, Group):
            records.setdefault(entry.record.ticket.ticket_id, entry.record)
    steps = run.ledger()
    consumed = [
        ticket for line in steps for _, ticket, *_ in sorted([*line["trained"], *line["dropped"]])
    ]
    yields.observe([records[ticket] for ticket in consumed if ticket in records], run.rules.differs)
    progress = await world.StateStore(MemoryTransport(run.server, "run")).get(world.Key.PROGRESS)
    assert isinstance(progress, world.Progress)
    assert (progress.yields, progress.repeats) == (yields.all(), yields.repeats())
    explained = Curriculum(run.config.run.seed, [SOURCE]).explained(yields.all(), yields.repeats())
    last = read_lines(run.config.run_dir / "metrics.jsonl")[-1]["curriculum"]
    assert last == [asdict(each) for each in sorted(explained, key=lambda each: -each.share)]
