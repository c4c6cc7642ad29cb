"""Engines by name: one file and one entry each, or none for an engine of another package."""

import subprocess
import sys

import pytest

from horizonrl.actors.engines.registry import ENGINES, factory
from horizonrl.actors.engines.scripted import start
from horizonrl.common.errors import ConfigError


def test_every_name_starts_an_engine_and_none_is_imported_for_another() -> None:
    assert all(callable(factory(name)) for name in ENGINES)
    code = (
        "import sys; from horizonrl.actors.engines.registry import factory; factory('scripted'); "
        "print(sorted({'vllm', 'torch', 'aiohttp'} & set(sys.modules)))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )


def test_an_engine_of_another_package_is_named_by_module_and_function() -> None:
    assert factory("horizonrl.actors.engines.scripted:start") is start


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "vlm",
            r"'vlm': choose vllm, scripted, or MODULE:FUNCTION .*; did you mean vllm\?",
        ),
        ("no_such_package:start", r"this Python has no module 'no_such_package'"),
        ("json:begin", r"has no function 'begin'"),
    ],
)
def test_an_engine_that_cannot_be_had_is_named_with_what_can(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        factory(name)
