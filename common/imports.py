"""Import large packages without the garbage collector.

vLLM makes millions of objects as it is imported, and none of them is garbage: the collector looks through all of them
again and again, for a fifth of the time that the import takes.
"""

import atexit
import contextlib
import gc
import sys
from collections.abc import Iterator


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
