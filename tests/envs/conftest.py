import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from horizonrl.envs import registry

_NUMBERS = itertools.count()
"""A module of its own for each installation: Python never forgets one that it has imported."""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Install an environment for one test, as pip would: a module on the path and its entry point."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def put(env_id: str, source: str, name: str = "World") -> None:
        module = f"installed_{next(_NUMBERS)}"
        (tmp_path / f"{module}.py").write_text(source)
        metadata = tmp_path / f"{module}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(
            f"[horizonrl.envs]\n{env_id} = {module}:{name}\n"
        )
        registry._entry_points.cache_clear()

    yield put
    registry._entry_points.cache_clear()
