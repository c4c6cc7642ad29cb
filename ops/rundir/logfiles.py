"""The logs of a run directory, kept short.

A process may write for weeks. It appends to its file as long as it lives and cannot be told to open another one, so a
long log is copied to `learner.log.1` and truncated.
"""

import asyncio
import os
import shutil
from pathlib import Path

from horizonrl.common.files import atomic_write
from horizonrl.common.logs import get_logger

log = get_logger()

LOG_BYTES = 64 << 20
"""Size at which a log is truncated; nats-server has the same limit. One earlier copy is kept."""
LOOK_S = 60.0


async def keep_short(folder: Path) -> None:
    """Truncate the long logs of a folder every LOOK_S seconds, until cancelled."""
    while True:
        # In a thread: the copy of a long log would hold up the loop that supervises the parts.
        await asyncio.to_thread(_shorten_all, folder)
        await asyncio.sleep(LOOK_S)


def _shorten_all(folder: Path) -> None:
    for path in folder.glob("*.log"):
        try:
            shorten(path)
        except OSError as error:  # the disk is full: no reason to end the run
            log.warning("log_not_shortened", path=str(path), error=str(error))


def shorten(path: Path, most_bytes: int = LOG_BYTES) -> None:
    """Move the content of a log of more than `most_bytes` to `path.1`, which is overwritten.

    Writers keep appending to the same file. A line written between the copy and the truncation is lost.
    """
    if path.stat().st_size <= most_bytes:
        return
    with atomic_write(path.with_name(f"{path.name}.1")) as incoming:
        shutil.copyfile(path, incoming)
        # Safe because every writer has opened it to append. Any other would go on at its old offset, behind a hole.
        os.truncate(path, 0)
