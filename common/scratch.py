"""Temporary directories that do not outlive their owner for long, even one that was killed; and new ones that stay.

An owner holds a lock on its directory, which the kernel frees with the process; whoever makes the next directory in the
same place removes those that nobody holds. A process id in the name would not do, since each of the containers that
share /dev/shm counts its own processes.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from horizonrl.common.errors import ConfigError

PREFIX = "horizonrl-scratch-"
TRIES = 200
"""How often a shared directory is tried, 10 ms apart, before it is taken for another user's."""
UNFINISHED = ".unfinished"
"""Marks a directory that is being filled, or was when its writer ended early."""


@contextlib.contextmanager
def filling(out: Path) -> Iterator[None]:
    """Make the directory that the body fills. One whose writer ended early is filled again.

    Raises ConfigError for any other that is not empty: the files in it may be the user's.
    """
    mark = out / UNFINISHED
    if out.is_dir() and not mark.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty: choose another directory")
    out.mkdir(parents=True, exist_ok=True)
    mark.touch()
    yield
    mark.unlink()


@contextlib.contextmanager
def scratch(parent: Path | None = None) -> Iterator[Path]:
    """Hold a new directory in `parent`, or where temporary files belong; remove it after the body."""
    parent = parent or Path(tempfile.gettempdir())
    _sweep(parent)
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


@contextlib.contextmanager
def shared_scratch(name: str, parent: Path | None = None) -> Iterator[Path]:
    """Hold a directory that all processes of this user share under one name; the last one to leave removes it.

    Raises ConfigError if the name is taken by something that this user may not use.
    """
    parent = parent or Path(tempfile.gettempdir())
    _sweep(parent)
    place = parent / f"{PREFIX}{os.geteuid()}-{name}"
    held = None
    for _ in range(TRIES):
        with contextlib.suppress(FileExistsError):
            place.mkdir(mode=0o700)
        # None also while the last holder removes it: the next try makes a new one.
        if (held := _hold(place, fcntl.LOCK_SH)) is not None:
            break
        time.sleep(0.01)
    if held is None:
        raise ConfigError(f"{place} cannot be used: remove it, or give the run another run.name")
    try:
        yield place
    finally:
        with contextlib.suppress(BlockingIOError):  # others still hold it
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(place, ignore_errors=True)
        os.close(held)


def _sweep(parent: Path) -> None:
    """Remove what nobody holds: whoever gets the lock of a directory knows that its owners are dead."""
    for left in parent.glob(f"{PREFIX}*"):
        if (held := _hold(left)) is not None:
            shutil.rmtree(left, ignore_errors=True)
            os.close(held)


def _hold(place: Path, lock: int = fcntl.LOCK_EX) -> int | None:
    """Return a descriptor that locks a directory, or None when it is gone, another's, or held."""
    try:
        # The folder may be shared with other users: a link in it must not lead the removal elsewhere.
        held = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    return locked(held, place, lock)


def locked(held: int, place: Path, lock: int) -> int | None:
    """Lock an open descriptor and return it; close it and return None when another process holds the lock."""
    try:
        fcntl.flock(held, lock | fcntl.LOCK_NB)
        # The lock may be that of a file or directory that was removed, and made again under its name, in between.
        if os.path.samestat(os.fstat(held), os.stat(place)):
            return held
    except OSError:
        pass
    os.close(held)
    return None
