"""The episodes that a run directory keeps, read group by group: a run of any length takes the memory of a group.

Place: the learner's journal → **reader** → report, dataset.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from horizonrl.common.errors import ConfigError
from horizonrl.common.run_dir import episode_files
from horizonrl.ops.rundir.lines import read_line


@dataclass
class EpisodeFiles:
    """`episodes/step-NNNNNN.jsonl` of a run directory, and the held-out ones of `eval-NNNNNN.jsonl` if asked for.

    The learner may remove the oldest at any moment.
    """

    run_dir: Path
    held_out: bool = False
    unreadable: int = 0
    """Lines that were cut short or damaged, of those read so far."""
    files: list[Path] = field(init=False)

    def __post_init__(self) -> None:
        kinds = ("step", "eval") if self.held_out else ("step",)
        self.files = episode_files(self.run_dir, *kinds)

    @property
    def size_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files if file.exists())

    def groups(self) -> Iterator[tuple[int, str, list[dict[str, Any]]]]:
        """Yield step, ticket and records of every group, in the order of consumption."""
        for file in self.files:
            # groupby joins neighbours only, which is enough: the learner writes a group's episodes one after the other.
            for ticket, records in groupby(
                self._records(file), key=lambda record: str(record["ticket"])
            ):
                yield _step(file), ticket, list(records)

    def _records(self, file: Path) -> Iterator[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError), file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    record = read_line(file, number, line)
                    record["ticket"]
                except ConfigError:
                    self.unreadable += 1
                else:
                    yield record


def _step(file: Path) -> int:
    return int(file.stem.partition("-")[2])
