"""`horizonrl dataset`: a run's episodes as a dataset that others can load: JSON lines, a schema, a card.

Place: journal → `ops/episodes` → **dataset**. Episodes go through memory a group at a time. The card is written last: a
directory without it is not complete.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import ConfigError
from horizonrl.ops.publish.card import dataset_card
from horizonrl.ops.report.facts import Files, ends
from horizonrl.ops.run.directory import read_config
from horizonrl.ops.run.episodes import EpisodeFiles
from horizonrl.ops.run.models import known_model, model_identity

SHARD_BYTES = 250_000_000
"""Of a file: what a browser still downloads and a reader still splits well."""
CARD = "README.md"


class DatasetRow(BaseModel):
    """A field of the dataset is a column of the same name."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class TurnRow(DatasetRow):
    """One generation and the observation that answers it."""

    text: str
    """What the policy wrote, special tokens left out."""
    observation: str | None
    """The environment's answer; null after the last turn of some environments."""
    reward: float
    """Of this turn."""
    token_ids: list[int]
    """The ids that were sampled, the end-of-turn token included; what is trained is these, never the text."""
    logprobs: list[float]
    """Natural log of each id's probability under the policy that sampled it, to three decimals."""
    versions: list[list[int]]
    """Runs of tokens that one policy version sampled: [version, lineage, tokens]. A version is an optimizer step."""


class EpisodeRow(DatasetRow):
    """One episode."""

    run: str
    """The run's name."""
    step: int
    """The optimizer step that consumed the episode; steps count from 1."""
    kind: Literal["train", "demo"]
    """`train`: sampled by the policy. `demo`: an expert's demonstration; its logprobs are 0."""
    ticket: str
    """The group: episodes of one ticket play the same task under the same horizon."""
    episode: int
    """Number in its group."""
    env: str
    """The environment."""
    task: str
    """The task, deterministic on every machine."""
    horizon: int
    """The most turns that the episode might take."""
    end: str
    """What became of its group: `trained into version N`, or `dropped: reason`."""
    stop: str
    """Why it ended: `terminated` by the environment; cut by `horizon`, `context` or `env_truncated`; or what broke."""
    success: bool
    """Whether the task was solved."""
    episode_return: float
    """Sum of the turns' rewards."""
    error: str | None
    """What broke, of a broken episode. Such a one says nothing about the policy: leave it out of any mean."""
    prompt: str
    """What the agent read first."""
    turns: list[TurnRow]
    """In order."""


@dataclass
class Written:
    """What a dataset holds."""

    rows: int = 0
    tokens: int = 0
    untold: int = 0
    """Episodes left out: an earlier version of the program wrote them without token ids."""
    unreadable: int = 0
    by_env: Counter[str] = field(default_factory=Counter)
    solved: Counter[str] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)

    def add(self, row: EpisodeRow) -> None:
        self.rows += 1
        self.tokens += sum(len(turn.token_ids) for turn in row.turns)
        self.by_env[row.env] += 1
        self.solved[row.env] += row.success
        self.broken[row.env] += row.error is not None


def write_dataset(run_dir: Path, out: Path) -> Written:
    """Write a run's episodes into a new directory `out`; return what it holds."""
    config = read_config(run_dir)
    if (out / CARD).exists():
        raise ConfigError(f"{out} already holds a dataset: remove it or choose another directory")
    source = EpisodeFiles(run_dir)
    if not source.files:
        raise ConfigError(f"{run_dir} has no episodes yet: they are written with the first step")
    written = Written()
    data = out / "data"
    data.mkdir(parents=True, exist_ok=True)
    for earlier in data.glob("*.jsonl"):  # of an interrupted export
        earlier.unlink()
    _write_shards(data, rows(config, run_dir, source, written))
    written.unreadable = source.unreadable
    (out / "schema.json").write_text(json.dumps(EpisodeRow.model_json_schema(), indent=2) + "\n")
    model_dir = known_model(config.model.name)
    identity = {} if model_dir is None else model_identity(model_dir)
    (out / CARD).write_text(dataset_card(config, written, identity, (EpisodeRow, TurnRow)), encoding="utf-8")
    return written


def rows(config: RunConfig, run_dir: Path, source: EpisodeFiles, written: Written) -> Iterator[EpisodeRow]:
    """Yield the run's episodes as rows, and keep account of them."""
    ended = ends(Files.read(run_dir))
    for step, ticket, records in source.groups():
        for record in records:
            if any("ids" not in turn for turn in record["turns"]):
                written.untold += 1
                continue
            row = EpisodeRow(
                run=config.run.name,
                step=step,
                kind="demo" if ticket.startswith("demo-") else "train",
                ticket=ticket,
                episode=record["episode"],
                env=record["env"],
                task=record["task"],
                horizon=record["horizon"],
                end=ended[ticket].told if ticket in ended else "not settled",
                stop=record["stop"],
                success=record["success"],
                episode_return=record["return"],
                error=record["error"],
                prompt=record["prompt"],
                turns=[_turn(turn) for turn in record["turns"]],
            )
            written.add(row)
            yield row


def _turn(turn: dict[str, Any]) -> TurnRow:
    return TurnRow(
        text=turn["text"],
        observation=turn["observation"],
        reward=turn["reward"],
        token_ids=turn["ids"],
        logprobs=turn["logprobs"],
        versions=turn["spans"],
    )


def _write_shards(data: Path, rows: Iterator[EpisodeRow]) -> None:
    """Write rows into files of about SHARD_BYTES each."""
    number, size, file = 0, 0, (data / "episodes-00000.jsonl").open("w", encoding="utf-8")
    try:
        for row in rows:
            if size >= SHARD_BYTES:
                file.close()
                number, size = number + 1, 0
                file = (data / f"episodes-{number:05d}.jsonl").open("w", encoding="utf-8")
            size += file.write(json.dumps(row.model_dump(mode="json")) + "\n")
    finally:
        file.close()
