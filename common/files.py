"""Replace files whole: readers, and whoever comes after a crash, find the old content or the new."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

INCOMING = ".incoming"
"""Ends the hidden names under which files are written. One that is left over comes from a killed writer."""


@contextlib.contextmanager
def atomic_write(path: Path, *, durable: bool = False, rivals: bool = False) -> Iterator[Path]:
    """Give the body a hidden path to write a file or directory to, and rename it to `path` when the body succeeds.

    If the body fails, `path` stays as it was and what was written is removed. A `durable` file survives a power cut.
    With `rivals`, other processes may write the same path meanwhile; the last one wins. Without, what a killed writer
    left is overwritten.
    """
    incoming = path.with_name(
        f".{path.name}{'.' + secrets.token_hex(8) if rivals else ''}{INCOMING}"
    )
    # Not written over: it may be a hard link, whose other names would change too.
    _remove(incoming)
    try:
        yield incoming
        if durable:
            sync(incoming)
        os.replace(incoming, path)
        if durable:
            sync(path.parent)
    finally:
        _remove(incoming)


def atomic_write_text(
    path: Path, text: str, *, durable: bool = False, rivals: bool = False
) -> None:
    """Replace a file's content in UTF-8, as `atomic_write` does."""
    with atomic_write(path, durable=durable, rivals=rivals) as incoming:
        incoming.write_text(text, encoding="utf-8")


def remove_unfinished(directory: Path) -> None:
    """Remove what killed writers have left in a directory in which nobody writes now."""
    for incoming in directory.glob(f".*{INCOMING}"):
        _remove(incoming)


def sync(path: Path) -> None:
    """Make a file's bytes, or a directory's names, durable."""
    # Read-only, because a directory cannot be opened in any other way; fsync does not mind.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
