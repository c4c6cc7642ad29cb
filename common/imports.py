"""Import large packages without the garbage collector.

vLLM makes millions of objects as it is imported, and none of them is garbage: the collector looks through all of them
again and again, for a fifth of the time that the import takes.
"""

import atexit
import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Keep the collector from running in the body, and for ever from what the body made.

    What is imported stays, so a later collection need not look at it either; and a child that is forked later shares
    its pages for longer, since the collector writes to every object that it looks at.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)
        gc.enable()
