"""The file of an evaluation: its settings, then an episode a line, so that a killed one goes on where it was.

Settings are what an episode depends on: the model, the environment's version and options, the sampling, the turns. How
many tasks and samples are asked for is none: more of them go on in the same file.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError

from horizonrl.common.config.changes import config_changes
from horizonrl.common.errors import ConfigError
from horizonrl.common.locks import take_lock
from horizonrl.common.types import Count, Episode, Name, Record, StopReason
from horizonrl.learner.records.evaluation import EpisodeResult
from horizonrl.ops.evaluation.plan import Play

FILE = "episodes.jsonl"
Key = tuple[str, str, int]
"""Environment, task, sample."""


class TurnRecord(Record):
    """A turn."""

    text: str
    observation: str
    reward: float
    tokens: int


class Line(Record):
    """An episode as it is written."""

    env: Name
    task: str
    category: str
    sample: Count
    stop: StopReason
    success: bool
    error: str | None = None
    generate_s: float
    environment_s: float
    prompt: str
    turns: tuple[TurnRecord, ...]

    @classmethod
    def of(cls, play: Play, episode: Episode) -> "Line":
        return cls(
            env=play.env.id,
            task=play.task.task.task_id,
            category=play.task.category,
            sample=play.sample,
            stop=episode.stop,
            success=episode.success,
            error=episode.error,
            generate_s=episode.generate_s,
            environment_s=episode.environment_s,
            prompt=episode.prompt,
            turns=tuple(
                TurnRecord(
                    text=turn.text,
                    observation=turn.observation,
                    reward=turn.reward,
                    tokens=len(turn.output_ids),
                )
                for turn in episode.turns
            ),
        )

    @property
    def key(self) -> Key:
        return self.env, self.task, self.sample

    @property
    def settled(self) -> bool:
        """Whether playing it again could not give another end: what broke is played again, unless it cannot fit."""
        return not self.stop.broken or self.stop is StopReason.UNFIT

    def within(self, turns: int) -> EpisodeResult | None:
        """Return the episode as a horizon of `turns` would have ended it; None where it broke before.

        Up to there it is the same under every horizon: the agent does not know it, and seeds are counted by turn.
        """
        cut = len(self.turns) > turns or (self.stop.broken and len(self.turns) == turns)
        # What broke says nothing about the policy (invariants: Broken is not zero).
        if self.stop.broken and not cut:
            return None
        taken = self.turns[:turns]
        return EpisodeResult(
            success=self.success and not cut,
            episode_return=sum(turn.reward for turn in taken),
            turns=len(taken),
            truncated=cut or self.stop.truncated,
            tokens=sum(turn.tokens for turn in taken),
        )


def read_journal(directory: Path) -> tuple[dict[str, Any], dict[Key, Line]]:
    """Return the settings and the episodes of an evaluation, which may go on. Raises ConfigError if there is none."""
    path = directory / FILE
    # Without an unfinished last line: it is being written, or was cut off by a kill.
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    return _settings(path, lines), _episodes(path, lines[1:])


def _settings(path: Path, lines: Sequence[bytes]) -> dict[str, Any]:
    try:
        settings: dict[str, Any] = json.loads(lines[0])["settings"]
    except (IndexError, ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{path.parent} is no evaluation: it holds no {FILE} that `horizonrl eval` wrote"
        ) from None
    return settings


def _episodes(path: Path, lines: Sequence[bytes]) -> dict[Key, Line]:
    """Return the episodes in the lines after the first. Raises ConfigError for a damaged one, with its place."""
    episodes: dict[Key, Line] = {}
    for number, line in enumerate(lines, 2):
        try:
            episode = Line.model_validate_json(line)
        except ValidationError:
            raise ConfigError(f"{path}, line {number} holds no episode: remove that line") from None
        # An episode that broke may stand here twice: the later line, from playing it again, wins.
        episodes[episode.key] = episode
    return episodes


class EvaluationJournal:
    """The lines of an evaluation, the latest of each episode."""

    def __init__(self, file: BinaryIO, lines: Mapping[Key, Line]) -> None:
        self._file = file
        self.lines = dict(lines)

    @classmethod
    @contextmanager
    def open(cls, directory: Path, settings: Mapping[str, Any]) -> Iterator["EvaluationJournal"]:
        """Open the file of a directory, or begin it. Raises ConfigError when it was made with other settings."""
        path = directory / FILE
        with path.open("ab+") as file:
            if not take_lock(file):
                raise ConfigError(
                    f"another evaluation writes {path}: wait for it, or give another --out"
                )
            file.seek(0)
            *lines, unfinished = file.read().split(b"\n")
            if len(lines) < 2:
                # Nothing was played yet, as when the model could not be reached: the settings may be others now.
                file.truncate(0)
                file.write((json.dumps({"settings": settings}, default=str) + "\n").encode())
            else:
                # Through JSON, as the stored settings went: there tuples are lists and paths are texts.
                _refuse_other(
                    path, _settings(path, lines), json.loads(json.dumps(settings, default=str))
                )
                file.truncate(file.tell() - len(unfinished))  # cut off by a kill
            file.flush()
            yield cls(file, _episodes(path, lines[1:]))

    def add(self, line: Line) -> None:
        """Append an episode; it is in the file when this returns."""
        # Flushed to the kernel but not fsynced: it has to survive a kill of this process, and can be played again.
        self._file.write(line.model_dump_json().encode() + b"\n")
        self._file.flush()
        self.lines[line.key] = line


def _refuse_other(path: Path, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    if changed := config_changes(then, now):
        differences = "; ".join(
            f"{key} was {old!r} and is {new!r}" for key, (old, new) in changed.items()
        )
        raise ConfigError(
            f"{path} was made with other settings: {differences}. Give another --out, or the same settings"
        )
