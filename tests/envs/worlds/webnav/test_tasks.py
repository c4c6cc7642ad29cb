import asyncio
import re
from collections import Counter

import pytest

from horizonrl.envs.worlds.webnav.env import WebNav
from horizonrl.envs.worlds.webnav.page import Style
from horizonrl.envs.worlds.webnav.task import Answer
from horizonrl.envs.worlds.webnav.tasks import TASKS, TEST_TASKS, draw_task, load_tasks
from horizonrl.envs.worlds.webnav.templates.table import TEMPLATES


def test_the_splits_have_tasks_of_every_category_and_test_as_many_as_agentgym() -> None:
    listed = load_tasks()
    assert Counter(task.split for task in listed) == {"train": 289, "validation": 83, "test": 50}
    assert Counter(task.category for task in listed) == TASKS
    assert Counter(task.category for task in listed if task.split == "test") == TEST_TASKS


def test_every_template_has_tasks() -> None:
    listed = {task.task_id.rpartition("-")[0] for task in load_tasks()}
    assert (
        len(listed)
        == sum(len(templates) for sites in TEMPLATES.values() for templates in sites.values())
        == 42
    )


@pytest.mark.parametrize("style", ["full", "compact"])
def test_the_expert_solves_every_task_and_has_seen_what_it_answers(style: Style) -> None:
    async def play(task_id: str) -> None:
        environment = WebNav(style=style, format="plain")
        observation = (await environment.reset(task_id)).text
        answer, expert, read = draw_task(task_id, style).task.answer, environment.expert(), ""
        while True:
            step = await environment.step(expert.act(observation))
            observation = step.observation
            read += observation
            if step.terminated:
                break
        assert step.success, (task_id, step.info)
        if answer is not None and not task_id.startswith(COUNTED):
            assert re.search(rf"(?<![\d.]){re.escape(answer.value)}", read), task_id

    async def play_all() -> None:
        for task in load_tasks():
            await play(task.task_id)

    asyncio.run(play_all())


COUNTED = ("orders-of-status", "places-of-kind", "open-issues-of-label")
"""Templates whose answer is no text of a page."""


def test_no_task_is_done_before_it_begins() -> None:
    for task in load_tasks():
        drawn = draw_task(task.task_id, "compact")
        assert drawn.task.answer or drawn.world != drawn.wanted


@pytest.mark.parametrize("style", ["full", "compact"])
def test_no_answer_pays_that_also_names_another_possibility(style: Style) -> None:
    for task in load_tasks():
        answer = draw_task(task.task_id, style).task.answer
        if answer is not None and answer.kind == "must_include":
            assert answer.rivals, f"{task.task_id}: what could one answer instead?"
            assert answer.accepts(f"It is {answer.value}")
            assert not any(answer.accepts(f"{answer.value}, {rival}") for rival in answer.rivals), (
                task.task_id
            )


@pytest.mark.parametrize("style", ["full", "compact"])
def test_a_list_of_all_times_solves_no_closing_time(style: Style) -> None:
    hours = " ".join(f"{hour}:00" for hour in range(15, 24))
    for number in range(8):
        answer = draw_task(f"closing-time-{number}", style).task.answer
        assert answer is not None
        assert not answer.accepts(hours)


def test_two_draws_of_a_task_share_no_record() -> None:
    one, other = draw_task("set-price-0", "compact"), draw_task("set-price-0", "compact")
    assert (one.world, one.task.intent) == (other.world, other.task.intent)
    next(iter(one.world.products.values())).stock += 1
    assert one.world != other.world


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        (
            Answer("exact", "shipped"),
            ["shipped", " Shipped. ", '"shipped"'],
            ["", "it is shipped", "ship"],
        ),
        (
            Answer("exact", "ada12@mail.com"),
            ["ada12@mail.com"],
            ["ada1@mail.com", "ada12 mail.com"],
        ),
        (
            Answer("must_include", "Red Mug"),
            ["red mug", "It is the Red Mug, at $5.00."],
            ["mug", "Red Mugs", "red big mug", "Red Mug " + "or Blue Pan " * 9],
        ),
        (
            Answer("must_include", "River Park", ("Park", "Sunset River Park", "Maple Park")),
            ["River Park", "It is River Park, near a lake"],
            [
                "Park",
                "Sunset River Park",
                "River Park, Maple Park",
                "Park, River Park",
                "Sunset River Park, River Park",
            ],
        ),
        (
            Answer("number", "1012.50"),
            ["1012.50", "$1,012.5", "It costs $1012.50", "1012.50, so 1012.5"],
            ["", "1012", "1012.50 or 13", "12.50", "many"],
        ),
    ],
)
def test_an_answer_is_right_or_wrong(answer: Answer, right: list[str], wrong: list[str]) -> None:
    assert [given for given in right if not answer.accepts(given)] == []
    assert [given for given in wrong if answer.accepts(given)] == []
