"""Locks on files and directories between processes.

The kernel frees a lock when its last holder dies, however it dies. A file with a process id would outlive a killed
process, and the containers that share a volume each count their own processes.
"""

import contextlib
import fcntl
import os
from pathlib import Path
from typing import IO, Any


def take_lock(file: int | IO[Any], *, shared: bool = False, wait: bool = False) -> bool:
    """Lock an open file for this process and those that inherit it; return False if another process holds it.

    With `wait`, wait until it is free. Several processes may hold a `shared` lock.
    """
    how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(file, how if wait else how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def open_locked(path: Path, flags: int = os.O_RDWR, *, shared: bool = False) -> int | None:
    """Open and lock a file or directory, and return its descriptor.

    Returns None if the path is not there or another process holds its lock.
    """
    try:
        descriptor = os.open(path, flags, 0o600)
    except FileNotFoundError:
        return None
    with contextlib.suppress(OSError):
        # What was opened may have been removed, and made again under its name, before it was locked.
        if take_lock(descriptor, shared=shared) and os.path.samestat(
            os.fstat(descriptor), os.stat(path)
        ):
            return descriptor
    os.close(descriptor)
    return None
