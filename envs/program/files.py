"""Files where a program may write: it may leave links, pipes, devices and gigabytes under any name.

Nothing else in the actor opens what a program has left. Call these in a thread: a disk may be slow.
"""

import os
import stat
from pathlib import Path

from horizonrl.common.errors import EnvironmentFailure

LARGEST_BYTES = 4 << 20
"""Of a verdict, an answer, or the end of what was printed."""


def read_regular(file: Path, tail_bytes: int = 0) -> str | None:
    """Return the text of a regular file, or its last `tail_bytes` if that is given; None if there is no such file.

    `file` is a whole path without links. Raises EnvironmentFailure for a link, a pipe, a device or a directory, for
    what a link on the way leads to, and for a file that is too large to be read whole.
    """
    try:
        # Opening a pipe would wait for its other end.
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:  # a link, or a socket
        raise EnvironmentFailure(
            f"{file.name} is not a regular file that can be read: {error.strerror}"
        ) from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or os.readlink(f"/proc/self/fd/{descriptor}") != str(file):
        os.close(descriptor)
        raise EnvironmentFailure(f"{file.name} is not a regular file")
    with open(descriptor, "rb") as source:
        if tail_bytes:
            source.seek(max(0, status.st_size - tail_bytes))
            return source.read(tail_bytes).decode("utf-8", "replace")
        if status.st_size > LARGEST_BYTES:
            raise EnvironmentFailure(
                f"{file.name} has {status.st_size:,} bytes, and at most {LARGEST_BYTES:,} are read"
            )
        return _decode(file, source.read(LARGEST_BYTES))


def write_new(file: Path, text: str) -> None:
    """Write a file that nobody has made before, not even as a link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(file, flags, 0o600), "w", encoding="utf-8") as target:
        target.write(text)


def _decode(file: Path, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise EnvironmentFailure(f"{file.name} is not a text in UTF-8: {error}") from None
