"""The logs of a run directory, kept short: a part may write for weeks.

A part appends to its file as long as it lives, and cannot be told to open another. So what has grown too long is copied
beside, to `learner.log.1`, and the file begins anew.
"""

import asyncio
import os
import shutil
from pathlib import Path

from horizonrl.common.logs import get_logger

log = get_logger()

LOG_BYTES = 64 << 20
"""Of a log, after which it begins anew; nats-server has the same limit. The one before it is kept."""
LOOK_S = 60.0


async def keep_short(folder: Path) -> None:
    """Let every log of a folder begin anew where it has grown too long. Woken by the clock."""
    while True:
        await asyncio.to_thread(_shorten_all, folder)
        await asyncio.sleep(LOOK_S)


def _shorten_all(folder: Path) -> None:
    for path in folder.glob("*.log"):
        try:
            shorten(path)
        except OSError as error:  # the disk is full: no reason to end the run
            log.warning("log_not_shortened", path=str(path), error=str(error))


def shorten(path: Path, most_bytes: int = LOG_BYTES) -> None:
    """Move what a log holds to `path.1` if it is more than `most_bytes`; what was there before goes.

    Whoever appends meanwhile goes on in the same file. A line that comes between the copy and the cut is lost.
    """
    if path.stat().st_size <= most_bytes:
        return
    beside = path.with_name(f".{path.name}.1")
    try:
        shutil.copyfile(path, beside)
        os.truncate(path, 0)
        beside.rename(path.with_name(f"{path.name}.1"))
    finally:
        beside.unlink(missing_ok=True)
