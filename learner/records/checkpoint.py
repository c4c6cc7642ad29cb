"""Checkpoints as directories that become visible all at once: `step-NNNNNN/`, or nothing.

A checkpoint is written into a hidden directory, `.incoming-step-NNNNNN`. Its files are fsynced, then `state.json` is
written with the size of each of them, and one rename makes the directory visible. Whenever a crash comes, `newest()`
is the last checkpoint that was complete. The store knows nothing of what is in the files. Only rank 0 holds it.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horizonrl.common.errors import DISK_FULL, CheckpointError
from horizonrl.common.files import sync

STATE_FILE = "state.json"
FULL_BYTES = 16 << 20
"""A disk with less free space counts as full. It is not 0: a failed write may leave some blocks free."""
_VISIBLE = re.compile(r"step-(\d{6,})")
_INCOMING = ".incoming-"
_OUTGOING = ".outgoing-"
_ASIDE = "damaged-"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint: `step` optimizer steps, the caller's `state`, and the directory of files."""

    step: int
    path: Path
    state: Mapping[str, Any]

    @property
    def lineage(self) -> int:
        """That of the learner that wrote it; -1 if that cannot be read."""
        lineage = self.state.get("lineage")
        return lineage if isinstance(lineage, int) else -1

    @property
    def cursor(self) -> int:
        """Sequence of the last log entry that was consumed for it."""
        return int(self.state["cursor"])

    @property
    def mark(self) -> str:
        """Mark of that entry; empty in a checkpoint of a release that knew no marks."""
        return str(self.state.get("mark", ""))

    @property
    def held(self) -> list[int]:
        """Sequences of the log entries before it that are held for a later step."""
        return [int(sequence) for sequence, _ in self.state.get("waiting", {}).get("held", ())]


def checkpoint_name(step: int) -> str:
    """Return the name of a step's checkpoint, a directory in `checkpoints/`."""
    return f"step-{step:06d}"


class CheckpointStore:
    """The checkpoints of one run. The newest `keep` are kept."""

    def __init__(self, root: Path, keep: int) -> None:
        if keep < 1:
            raise ValueError(
                f"keep is {keep}: a run that keeps no checkpoint cannot resume, so keep at least 1"
            )
        self._root, self._keep = root, keep
        root.mkdir(parents=True, exist_ok=True)

    def write(self, step: int, save: Callable[[Path], None], state: Mapping[str, Any]) -> Path:
        """Make the checkpoint of `step` from the files that `save` writes; return its path once it is durable.

        If anything raises, the earlier checkpoints stay as they were. All but the newest `keep` are removed.
        """
        with self.filling(step) as directory:
            save(directory)
        return self.seal(step, state)

    @contextmanager
    def filling(self, step: int) -> Iterator[Path]:
        """Give the body a hidden directory for the files of step's checkpoint; `seal` makes it visible."""
        visible, incoming = self._places(step)
        if _opened(visible) is not None:
            raise CheckpointError(
                f"{visible} exists already: resume from it, or move it away and start again"
            )
        # Of a learner that was ended in the middle of a checkpoint: the disk has room for one, not for two.
        self._remove_leftovers()
        # A damaged one stands where a resumed learner gets to the same step again.
        self._discard(visible)
        with self._space_for(incoming):
            incoming.mkdir()
            yield incoming

    def seal(self, step: int, state: Mapping[str, Any]) -> Path:
        """Make what `filling` wrote durable and visible. It takes as long as the disk does; no step has to wait."""
        visible, incoming = self._places(step)
        with self._space_for(incoming):
            _seal(incoming, {"step": step, "state": dict(state)})
        incoming.rename(visible)
        sync(self._root)  # the rename is durable only once the directory that holds the name is
        self._tidy()
        return visible

    @contextmanager
    def _space_for(self, incoming: Path) -> Iterator[None]:
        """Report a full disk as such, and delete what was written: torch has no error of its own for a full disk."""
        try:
            yield
        except Exception as error:
            free_bytes = shutil.disk_usage(self._root).free
            if free_bytes > FULL_BYTES and getattr(error, "errno", None) not in DISK_FULL:
                raise
            _remove(incoming)
            newest = self.newest()
            raise CheckpointError(
                f"the disk of {self._root} is full, {free_bytes >> 20} MiB are left ({type(error).__name__}: {error}): "
                f"free some space and start again to resume from step {newest.step if newest else 0}"
            ) from error

    def _places(self, step: int) -> tuple[Path, Path]:
        visible = self._root / checkpoint_name(step)
        return visible, self._root / f"{_INCOMING}{visible.name}"

    def newest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint, or None. Damaged and half-written ones are skipped."""
        return next(self._complete(), None)

    def damaged(self) -> dict[str, str]:
        """Return the names of the directories that are newer than the newest complete checkpoint, each with why."""
        newest = self.newest()
        paths = [path for path in self._visible() if newest is None or _step(path) > newest.step]
        return {
            path.name: f"its {STATE_FILE} cannot be read, or a file is missing or cut"
            for path in paths
        }

    def set_aside(self, name: str) -> None:
        """Take a damaged checkpoint out of the way of the same step, under a name that nothing reads or removes."""
        if (visible := self._root / name).exists():
            aside = self._root / f"{_ASIDE}{name}"
            _remove(aside)
            visible.rename(aside)

    def all(self) -> list[Checkpoint]:
        """Return the complete checkpoints, newest first."""
        return list(self._complete())

    def _complete(self) -> Iterator[Checkpoint]:
        for path in self._visible():
            checkpoint = _opened(path)
            if checkpoint is not None:
                yield checkpoint

    def _visible(self) -> list[Path]:
        steps = [path for path in self._root.iterdir() if _VISIBLE.fullmatch(path.name)]
        return sorted(steps, key=_step, reverse=True)

    def _tidy(self) -> None:
        """Remove leftovers, and all visible directories older than the newest `keep` complete checkpoints."""
        self._remove_leftovers()
        # Never empty: the checkpoint that was just sealed is complete.
        *_, oldest_kept = self.all()[: self._keep]
        for path in self._visible():
            if _step(path) < oldest_kept.step:
                self._discard(path)

    def _remove_leftovers(self) -> None:
        for path in list(self._root.iterdir()):
            if path.name.startswith((_INCOMING, _OUTGOING)):
                _remove(path)

    def _discard(self, visible: Path) -> None:
        """Remove a visible directory. It is hidden first: an interrupted removal leaves no half of a checkpoint."""
        outgoing = self._root / f"{_OUTGOING}{visible.name}"
        _remove(outgoing)
        if visible.exists():
            _remove(visible.rename(outgoing))


def _step(visible: Path) -> int:
    return int(visible.name.removeprefix("step-"))


def opened(path: Path) -> Checkpoint:
    """Return the checkpoint at `path`; raise CheckpointError if it is not complete."""
    checkpoint = _opened(path)
    if checkpoint is None:
        raise CheckpointError(
            f"no complete checkpoint at {path}: choose another step-NNNNNN directory of the run"
        )
    return checkpoint


def _opened(path: Path) -> Checkpoint | None:
    try:
        sealed = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
        step, sizes, state = int(sealed["step"]), dict(sealed["files"]), dict(sealed["state"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    # A file whose size differs was damaged later: the checkpoint is as good as none.
    if any(
        not (path / name).is_file() or (path / name).stat().st_size != size
        for name, size in sizes.items()
    ):
        return None
    return Checkpoint(step=step, path=path, state=state)


def _seal(directory: Path, facts: Mapping[str, Any]) -> None:
    """Make a directory's files durable, then list them in `state.json`, which makes the checkpoint complete."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    for path in files:
        sync(path)
    sizes = {str(path.relative_to(directory)): path.stat().st_size for path in files}
    try:
        text = json.dumps({**facts, "files": sizes}, indent=2, sort_keys=True)
    except TypeError as error:
        raise CheckpointError(
            f"the state of step {facts['step']} is not JSON ({error}): use plain values"
        ) from error
    # Last of all files, so that it never lists one that a power cut could still take away.
    (directory / STATE_FILE).write_text(text + "\n", encoding="utf-8")
    sync(directory / STATE_FILE)
    # A file's fsync does not cover its name, which is part of the directory.
    for folder in [*(path for path in directory.rglob("*") if path.is_dir()), directory]:
        sync(folder)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
