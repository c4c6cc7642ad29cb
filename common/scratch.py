"""Temporary directories that do not outlive their owner for long, even one that was killed; and new ones that stay.

An owner holds a lock on its directory (`locks.py`); whoever makes the next directory under the same parent removes
those that nobody holds.
"""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from horizonrl.common.errors import ConfigError
from horizonrl.common.locks import open_locked, take_lock

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
    lock = None
    while lock is None:  # another process may remove it between its creation and its lock
        directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        lock = _lock(directory)
    try:
        yield directory
    finally:
        # Removed under the lock: the next process would otherwise remove it at the same time.
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


@contextlib.contextmanager
def shared_scratch(name: str, parent: Path | None = None) -> Iterator[Path]:
    """Hold a directory that all processes of this user share under one name; the last one to leave removes it.

    Raises ConfigError if the name is taken by something that this user may not use.
    """
    parent = parent or Path(tempfile.gettempdir())
    _sweep(parent)
    directory = parent / f"{PREFIX}{os.geteuid()}-{name}"
    lock = None
    for _ in range(TRIES):
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        # None also while the last holder removes it: the next try makes a new one.
        if (lock := _lock(directory, shared=True)) is not None:
            break
        time.sleep(0.01)
    if lock is None:
        raise ConfigError(
            f"{directory} cannot be used: remove it, or give the run another run.name"
        )
    try:
        yield directory
    finally:
        if take_lock(lock):  # nobody else holds it
            shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def _sweep(parent: Path) -> None:
    """Remove what nobody holds: whoever gets the lock of a directory knows that its owners are dead."""
    for directory in parent.glob(f"{PREFIX}*"):
        if (lock := _lock(directory)) is not None:
            shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)


def _lock(directory: Path, *, shared: bool = False) -> int | None:
    """Return a descriptor that locks a directory, or None if it is gone, another user's, or held."""
    with contextlib.suppress(OSError):
        # The parent may be shared with other users: a link in it must not lead the removal elsewhere.
        return open_locked(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, shared=shared)
    return None
