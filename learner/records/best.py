"""The best evaluated version of a run: its weights and its result, in `best/` of the run directory.

`eval.json` names the weights file and is replaced last, so the two belong together whenever a crash comes.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from horizonrl.common.files import atomic_write, atomic_write_text
from horizonrl.common.logs import get_logger
from horizonrl.common.run_dir import FRAME_FILE

log = get_logger()

RESULT_FILE = "eval.json"


class Best:
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def read(self) -> dict[str, Any] | None:
        """Return the result of the kept version; None if no version is kept, or if the file was damaged."""
        try:
            result: dict[str, Any] = json.loads(
                (self._directory / RESULT_FILE).read_text(encoding="utf-8")
            )
        except FileNotFoundError:
            return None
        except ValueError as error:
            log.warning(
                "best_unreadable", file=str(self._directory / RESULT_FILE), error=str(error)
            )
            return None
        return result if self.weights(result).is_file() else None

    def weights(self, result: Mapping[str, Any]) -> Path:
        """Return the weights file of a result from `read`."""
        return self._directory / str(result["weights"])

    def offer(self, result: Mapping[str, Any], frame: Path | None) -> bool:
        """Keep a version, with a hard link to its weights, if it is the best so far; return whether it is.

        The later version wins a tie. If `frame` is None, the weights are gone and nothing changes.
        """
        kept = self.read()
        if (
            frame is None
            or result["success_rate"] is None
            or (kept is not None and _rank(kept) > _rank(result))
        ):
            return False
        self._directory.mkdir(exist_ok=True)
        link = self._directory / frame.name
        # Durable: a power cut must not leave a result whose weights, or whose text, never reached the disk.
        with atomic_write(link, durable=True) as incoming:
            # A hard link: the frame is tidied away one day, the weights stay, and nothing is copied.
            os.link(frame, incoming)
        text = json.dumps({**result, "weights": frame.name}, indent=2) + "\n"
        atomic_write_text(self._directory / RESULT_FILE, text, durable=True)
        # Only now, since the earlier result named its file until it was replaced.
        for other in self._directory.glob("*.safetensors"):
            if other != link and FRAME_FILE.fullmatch(other.name):
                other.unlink()
        return True


def _rank(result: Mapping[str, Any]) -> tuple[float, int]:
    # Not by the rate itself: a round of which one episode is left, because a server was down, would have 100 %.
    return result["low"], result["version"]
