"""The packages of the hubs: imported when an environment is first used, since some take seconds, and never required."""

import importlib
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from types import ModuleType

from horizonrl.common.errors import MissingDependency
from horizonrl.common.imports import uncollected


def hub_version(rules: int, package: str) -> str:
    """Return a version of our rules and of the package, or of our rules alone where it is not installed."""
    try:
        return f"{rules} {package}=={installed_version(package)}"
    except PackageNotFoundError:
        return str(rules)


@cache
def hub_module(name: str, package: str, extra: str) -> ModuleType:
    """Import a module of a hub's package. Raises MissingDependency, with the remedy, if it is not installed."""
    try:
        with uncollected(name), quiet():
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"{package} cannot be imported, because {error.name!r} is not installed: pip install 'horizonrl[{extra}]'"
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out what a hub's package warns of in its own code, and what it prints in this thread."""
    with warnings.catch_warnings(action="ignore"), redirect_stdout(_Muted()):
        yield


class _Muted:
    """Stdout without what this thread writes. Other threads still reach it."""

    def __init__(self) -> None:
        self._stdout, self._muted = sys.stdout, threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._muted else self._stdout.write(text)

    def flush(self) -> None:
        self._stdout.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._stdout, name)
