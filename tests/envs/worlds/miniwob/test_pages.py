import sys
from collections import Counter

import pytest

from horizonrl.common.errors import ConfigError, MissingDependency
from horizonrl.envs.worlds.miniwob.expert import Node, read_page
from horizonrl.envs.worlds.miniwob.pages import PAGES, find_pages, load_tasks, page_path


def test_every_page_has_17_tasks_to_train_3_to_choose_by_and_5_to_test() -> None:
    assert Counter((task.category, task.split) for task in load_tasks()) == {
        (page, split): size
        for page in PAGES
        for split, size in (("train", 17), ("validation", 3), ("test", 5))
    }


def test_every_page_is_installed_and_has_a_strategy() -> None:
    assert [page for page in PAGES if not (find_pages() / f"{page}.html").is_file()] == []
    assert tuple(sorted(PAGES)) == PAGES


def test_finding_the_pages_does_not_import_their_package() -> None:
    find_pages()
    assert "miniwob" not in sys.modules


def test_missing_pages_are_named_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"pip install 'horizonrl\[browser\]'"):
        find_pages()


@pytest.mark.parametrize(
    "task_id", ["", "click-test", "click-test-25", "click-test--1", "../core-1", "draw-line-0"]
)
def test_a_task_that_does_not_exist_is_a_config_error(task_id: str) -> None:
    with pytest.raises(ConfigError, match="miniwob has no task"):
        page_path(task_id)


def test_the_expert_reads_elements_and_texts() -> None:
    nodes, texts = read_page(
        "Some words: [no element]\n"
        "[1] textbox '' value: 'it's'\n"
        "[2] checkbox 'a b' checked: True\n"
        "[3] combobox '' value: 'x'\n"
        "\t[4] menuitem 'x' selected: False\n"
        "[5] button 'OK' disabled: True"
    )
    assert texts == ["Some words: [no element]"]
    assert nodes == [
        Node("1", "textbox", "", "it's", on=False),
        Node("2", "checkbox", "a b", "", on=True),
        Node("3", "combobox", "", "x", on=False),
        Node("4", "menuitem", "x", "", on=False),
        Node("5", "button", "OK", "", on=False),
    ]
