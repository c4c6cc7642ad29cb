"""Which packages are installed; and how to import large ones without the garbage collector and without parts.

vLLM makes millions of objects as it is imported, and none of them is garbage: the collector looks through all of them
again and again, for a fifth of the time that the import takes.
"""

import atexit
import contextlib
import gc
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from importlib.machinery import ModuleSpec
from types import ModuleType


@contextlib.contextmanager
def uncollected(module: str) -> Iterator[None]:
    """Import `module` in the body without the collector, which then never looks at what there was by the end of it.

    Does nothing where the module has been imported before: what would be kept for ever then is somebody's data. What is
    imported stays, so a later collection need not look at it either; and a child that is forked later shares its pages
    for longer, since the collector writes to every object that it looks at.
    """
    if module in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)
        gc.enable()


class LeftOut:
    """A finder of modules that finds none of `modules` and says why; it leaves all others to the finders after it."""

    def __init__(self, modules: tuple[str, ...], why: str) -> None:
        self._modules = modules
        self._why = why

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in self._modules:
            raise ModuleNotFoundError(f"{name} is left out here: {self._why}", name=name)
        return None


@contextlib.contextmanager
def left_out(*modules: str, why: str) -> Iterator[None]:
    """Let `modules` look as if they were not installed, for what the body imports; afterwards they can be imported.

    For optional ones only: an import that does not expect their absence raises ModuleNotFoundError, which says `why`.
    Those that have been imported before stay.
    """
    finder = LeftOut(modules, why)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
