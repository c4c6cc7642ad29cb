"""A copy of an example in a temporary folder, whose recipe has a tiny model in place of SmolLM2."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from horizonrl.broker.nats.cluster import free_ports
from horizonrl.ops.models.tiny_model import make_tiny_model
from tests.examples.readme import EXAMPLES, Example, environment, with_small_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def copied(tmp_path: Path, tiny_model: Path) -> Iterator[Callable[..., Example]]:
    """Return a function that copies an example; what its commands have started ends with the test."""
    made: list[Example] = []

    def copy(name: str, *, on_free_port: bool = False) -> Example:
        example = Example(
            name, tmp_path, environment(tmp_path), port=free_ports(1)[0] if on_free_port else None
        )
        made.append(example)
        target = tmp_path / "examples" / name
        shutil.copytree(EXAMPLES / name, target)
        for recipe in target.glob("recipe.toml"):
            recipe.write_text(example.on_port(with_small_model(recipe.read_text(), tiny_model)))
        (tmp_path / "runs").mkdir()
        return example

    try:
        yield copy
    finally:
        for example in made:
            example.close()
