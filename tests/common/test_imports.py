import gc
import sys
from collections.abc import Iterator

import pytest

from horizonrl.common.imports import uncollected


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
