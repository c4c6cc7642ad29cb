"""What a study's file may say, and the runs that follow from it."""

from pathlib import Path

import pytest

from horizonrl.common.errors import ConfigError
from horizonrl.ops.studies.study import STUDIES, plan, read_study, select
from tests.ops.studies.studies import BASE, STUDY, study_of


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "base.toml").write_text(BASE)
    return tmp_path


def test_overrides_are_quoted_keys_or_tables_and_a_variants_own_win(place: Path) -> None:
    study = study_of(
        place, STUDY.replace('"rl.groups_per_step" = 2', '"rl.groups_per_step" = 2\nrl.lr = 1.0')
    )
    assert [variant.name for variant in study.variants] == ["low", "high"]
    configs = {each.name: each.config for each in plan(study, place / "out")}
    assert (configs["low-seed1"].rl.lr, configs["low-seed1"].rl.groups_per_step) == (1e-5, 2)
    assert configs["high-seed0"].rl.lr == 1e-4
    assert configs["high-seed0"].envs[0].id == "parity"
    assert configs["high-seed1"].run.seed == 1
    assert configs["high-seed1"].run_dir == (place / "out" / "high-seed1").resolve()


def test_variants_are_not_chosen_by_test_tasks(place: Path) -> None:
    by_test = STUDY.replace("rl.lr = 1e-4", 'rl.lr = 1e-4\neval = { every = 2, split = "test" }')
    with pytest.raises(
        ConfigError, match=r"eval\.split is test in variant high, one of 2 to choose from"
    ):
        plan(study_of(place, by_test), place / "out")
    alone = study_of(place, by_test.replace("low = {", "#").replace('primary = ["high', "#"))
    assert [one.config.eval.split for one in plan(alone, place / "out")] == ["test", "test"]
    assert (alone.table_split, study_of(place, STUDY).table_split) == ("test", "validation")


def test_seeds_come_first_so_that_a_part_of_a_study_is_balanced(place: Path) -> None:
    names = [each.name for each in plan(study_of(place, STUDY), place / "out")]
    assert names == ["low-seed0", "high-seed0", "low-seed1", "high-seed1"]


GRID = """
name = "grid"
recipe = "base.toml"
seeds = [0]
contrasts = [["b", "a"], ["*", "2"]]
[grid.letter]
a = { "rl.lr" = 1e-5 }
b = { "rl.lr" = 1e-4 }
[grid.number]
1 = { "rl.groups_per_step" = 1 }
2 = { "rl.groups_per_step" = 2 }
"""


def test_a_grid_is_the_product_of_its_axes(place: Path) -> None:
    study = study_of(place, GRID)
    assert [variant.name for variant in study.variants] == ["a-1", "a-2", "b-1", "b-2"]
    assert study.axes == ["letter", "number"]
    assert dict(study.variants[2].overrides) == {"rl.lr": 1e-4, "rl.groups_per_step": 1}
    assert [variant.name for variant in select(study, [], ["b-*"])[1]] == ["b-1", "b-2"]
    assert [variant.name for variant in select(study, [], ["2", "b-1"])[1]] == ["a-2", "b-1", "b-2"]
    compared = [(pair.variant, pair.against) for pair in study.pairs]
    assert compared == [("b-1", "a-1"), ("b-2", "a-2"), ("a-1", "a-2"), ("b-1", "b-2")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            STUDY.replace('primary = ["high", ', 'base = ["high", '),
            "base: no such key; known keys: contrasts, grid, name",
        ),
        (
            STUDY.replace('["high", "low"]', '["high", "lwo"]'),
            "no two variants differ in 'high' and 'lwo' alone; there are low, high",
        ),
        (STUDY.replace("[0, 1]", "[]"), "seeds: List should have at least 1 item"),
        (STUDY.replace("[0, 1]", "[0, 0]"), "seeds: names one twice (got [0, 0])"),
        (
            STUDY + "\n[phases.small]\nseeds = [3, 3]\n",
            "phases.small.seeds: names one twice (got [3, 3])",
        ),
        (STUDY.replace("[variants.high]", "[variants.low]"), "is not TOML"),
        (STUDY.replace("[variants.high]", '[variants."high lr"]'), "variants.high lr"),
        (STUDY.replace("base.toml", "gone"), "no recipe 'gone': neither a file nor in ops/recipes"),
        (
            STUDY.replace('recipe = "base.toml"', ""),
            "variant low has recipe None: give it, or the study, the name",
        ),
        (STUDY.replace("rl.lr = 1e-4", "recipe = 3"), "variant high has recipe 3"),
        (STUDY.replace("[variants.high]", "[grid.rate.high]"), "give either [variants] or [grid]"),
        (STUDY.replace("rl.lr = 1e-4", "run.seed = 4"), "run.seed cannot be overridden"),
        (
            GRID.replace('"rl.groups_per_step" = 2', '"rl.lr" = 2e-4'),
            "two axes of [grid] set rl.lr",
        ),
        (
            GRID.replace("b = {", "a-1 = {").replace("2 = {", "1-1 = {"),
            "a-1-1 would name two variants",
        ),
    ],
)
def test_a_wrong_study_is_one_clear_message(place: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        study_of(place, text)
    assert message in str(raised.value)


def test_the_committed_studies_can_be_read(place: Path) -> None:
    (place / "pocket.toml").write_text(BASE)
    sizes = {}
    for path in STUDIES.glob("*.toml"):
        study = study_of(place, path.read_text())
        assert study.name == path.stem
        sizes[study.name] = len(study.variants)
    assert (sizes.pop("horizon-claim"), sizes.pop("asynchrony")) == (28, 18)
    assert (sizes.pop("curriculum"), sizes.pop("curriculum-smollm2"), sizes.pop("scenarios")) == (
        2,
        3,
        6,
    )
    assert sizes.pop("curriculum-scenarios") == 10
    assert sizes == {
        "estimators": 9,
        "losses": 6,
        "staleness": 20,
        "horizons": 5,
        "context": 6,
        "make-train": 1,
        "table": 1,
    }


def test_an_unknown_study_is_answered_with_those_that_there_are() -> None:
    with pytest.raises(
        ConfigError, match=r"no study 'stalness': .*did you mean staleness\? Known: asynchrony, "
    ):
        read_study(Path("stalness"))
