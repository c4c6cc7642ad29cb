import gc
import importlib
import sys
from collections.abc import Iterator

import pytest

from horizonrl.common.imports import left_out, uncollected


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_the_collector_rests_during_an_import_and_then_works_again() -> None:
    with uncollected("not.imported.yet"):
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0


def test_the_collector_works_again_after_an_import_that_failed() -> None:
    with pytest.raises(ImportError), uncollected("not.imported.yet"):
        raise ImportError
    assert gc.isenabled()


def test_nothing_is_kept_where_the_module_has_been_imported() -> None:
    frozen = gc.get_freeze_count()
    with uncollected("sys"):
        assert "sys" in sys.modules
        assert gc.isenabled()
    assert gc.get_freeze_count() == frozen


def test_a_module_that_is_left_out_looks_absent_until_the_end_of_the_body(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with left_out("colorsys", "json", why="nobody calls it"):
        with pytest.raises(
            ModuleNotFoundError, match=r"colorsys is left out here: nobody calls it"
        ):
            importlib.import_module("colorsys")
        assert importlib.import_module("json"), "it had been imported before"
        assert importlib.import_module("wave")
    assert importlib.import_module("colorsys")


def test_all_is_found_again_after_an_import_that_failed() -> None:
    finders = list(sys.meta_path)
    with pytest.raises(ModuleNotFoundError, match="absent"), left_out("absent", why="of this test"):
        importlib.import_module("absent")
    assert sys.meta_path == finders
