"""Temporary directories that do not outlive their owner for long, even one that was killed.

An owner holds a lock on its directory, which the kernel frees with the process; whoever makes the next directory in the
same place removes those that nobody holds. A process id in the name would not do, since each of the containers that
share /dev/shm counts its own processes.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "horizonrl-scratch-"


@contextlib.contextmanager
def scratch(parent: Path | None = None) -> Iterator[Path]:
    """Hold a new directory in `parent`, or where temporary files belong; remove it after the body."""
    parent = parent or Path(tempfile.gettempdir())
    for left in parent.glob(f"{PREFIX}*"):
        # Who gets the lock of a directory knows that its owner is dead.
        if (held := _hold(left)) is not None:
            shutil.rmtree(left, ignore_errors=True)
            os.close(held)
    held = None
    while held is None:  # another process may remove it between its creation and its lock
        place = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        held = _hold(place)
    try:
        yield place
    finally:
        # Removed under the lock: the next process would otherwise remove it at the same time.
        shutil.rmtree(place, ignore_errors=True)
        os.close(held)


def _hold(place: Path) -> int | None:
    """Return a descriptor that locks a directory, or None when it is gone, another's, or held."""
    try:
        # The folder may be shared with other users: a link in it must not lead the removal elsewhere.
        held = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The lock may be that of a directory that was removed and made again in between.
        if os.path.samestat(os.fstat(held), os.stat(place)):
            return held
    except OSError:
        pass
    os.close(held)
    return None
