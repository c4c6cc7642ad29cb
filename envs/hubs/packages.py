"""The packages of the hubs: imported when an environment is first used, since some take seconds, and never required."""

import importlib
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from types import ModuleType
from typing import Any

from horizonrl.common.errors import MissingDependency
from horizonrl.common.imports import uncollected


def hub_version(rules: int, package: str) -> str:
    """Return a version of our rules and of the package, or of our rules alone where it is not installed."""
    try:
        return f"{rules} {package}=={installed_version(package)}"
    except PackageNotFoundError:
        return str(rules)


@cache
def hub_module(name: str, extra: str = "hubs") -> ModuleType:
    """Import a module of a hub's package. Raises MissingDependency, with the remedy, if it is not installed."""
    try:
        with uncollected(name), quiet():
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"{name} cannot be imported, because {error.name!r} is not installed: pip install 'horizonrl[{extra}]'"
        ) from error


_lock = threading.Lock()
_quiet: Counter[int] = Counter()
"""How many bodies of `quiet` each thread is in."""


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out what a hub's package warns of in its own code, and what it prints in this thread.

    The event loop and the thread of the environments may be in here at once and leave in any order, so nothing is put
    back that another one has found: stdout is exchanged by the first and restored by the last.
    """
    thread = threading.get_ident()
    system: Any = sys  # whose stdout is no TextIO in the meantime
    with _lock:
        filters: Any = warnings.filters
        if not isinstance(system.stdout, _Muted):
            system.stdout = _Muted(system.stdout)
        # `catch_warnings` of others takes it out, and their own filters come first.
        if _IGNORED not in filters[:1]:
            filters[:] = [_IGNORED, *(other for other in filters if other != _IGNORED)]
        _quiet[thread] += 1
    try:
        yield
    finally:
        with _lock:
            _quiet[thread] -= 1
            if not _quiet[thread]:
                del _quiet[thread]
            if not _quiet and isinstance(system.stdout, _Muted):
                system.stdout = system.stdout.stdout


class _Muted:
    """Stdout without what quiet threads write."""

    def __init__(self, stdout: Any) -> None:
        self.stdout = stdout

    def write(self, text: str) -> Any:
        return len(text) if threading.get_ident() in _quiet else self.stdout.write(text)

    def flush(self) -> None:
        self.stdout.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self.stdout, name)


class _InQuietThread:
    """Stands for the message in a filter of warnings: it matches whatever a quiet thread warns of, and nothing else."""

    def match(self, message: str) -> bool:
        return threading.get_ident() in _quiet


_IGNORED = ("ignore", _InQuietThread(), Warning, None, 0)
