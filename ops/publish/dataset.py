"""`horizonrl dataset`: a run's episodes as a dataset that others can load: JSON lines, a schema and a card.

Flow: journal → `ops/run/episodes` → **dataset**. Only one group is in memory at a time. The card is written last, so a
directory without a card is incomplete.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import ConfigError
from horizonrl.common.scratch import filling
from horizonrl.common.types import Kind
from horizonrl.ops.models.models import known_model, model_identity
from horizonrl.ops.publish.card import dataset_card
from horizonrl.ops.publish.rows import DatasetCounts, EpisodeRow, TurnRow
from horizonrl.ops.rundir.directory import read_config
from horizonrl.ops.rundir.episodes import EpisodeFiles
from horizonrl.ops.rundir.files import Files

SHARD_BYTES = 250_000_000
"""Target size of a data file: small enough for a browser to download and for loaders to split."""
CARD = "README.md"
SHARDS = "episodes-[0-9][0-9][0-9][0-9][0-9].jsonl"


def write_dataset(run_dir: Path, out: Path) -> DatasetCounts:
    """Write a run's episodes into a new directory `out`; return what it holds."""
    config = read_config(run_dir)
    source = EpisodeFiles(run_dir)
    if not source.files:
        raise ConfigError(f"{run_dir} has no episodes yet: they are written with the first step")
    written = DatasetCounts()
    with filling(out):
        data = out / "data"
        data.mkdir(exist_ok=True)
        for earlier in data.glob(SHARDS):  # of an attempt that was interrupted
            earlier.unlink()
        _write_shards(data, rows(config, run_dir, source), written)
        written.unreadable = source.unreadable
        (out / "schema.json").write_text(
            json.dumps(EpisodeRow.model_json_schema(), indent=2) + "\n", encoding="utf-8"
        )
        model_dir = known_model(config.model.name)
        identity = {} if model_dir is None else model_identity(model_dir)
        (out / CARD).write_text(
            dataset_card(config, written, identity, (EpisodeRow, TurnRow)), encoding="utf-8"
        )
    return written


def rows(config: RunConfig, run_dir: Path, source: EpisodeFiles) -> Iterator[EpisodeRow]:
    """Yield the run's episodes as rows."""
    ends = {end.ticket: str(end) for end in Files.read(run_dir).ends()}
    for step, ticket, records in source.groups():
        for record in records:
            yield EpisodeRow(
                run=config.run.name,
                step=step,
                kind=Kind(ticket.partition("-")[0]).value,
                ticket=ticket,
                episode=record["episode"],
                env=record["env"],
                task=record["task"],
                horizon=record["horizon"],
                end=ends.get(ticket, "not settled"),
                stop=record["stop"],
                success=record["success"],
                episode_return=record["return"],
                error=record["error"],
                prompt=record["prompt"],
                turns=[_turn(turn) for turn in record["turns"]],
                branches=record.get("branches", []),
            )


def _turn(turn: dict[str, Any]) -> TurnRow:
    return TurnRow(
        text=turn["text"],
        observation=turn["observation"],
        reward=turn["reward"],
        token_ids=turn["ids"],
        logprobs=turn["logprobs"],
        versions=turn["spans"],
        branch=turn.get("branch", 0),
        trained=turn.get("trained", True),
    )


def _write_shards(data: Path, rows: Iterator[EpisodeRow], written: DatasetCounts) -> None:
    """Write rows into files of about SHARD_BYTES each, and keep account of them."""
    number, size, file = 0, 0, (data / "episodes-00000.jsonl").open("w", encoding="utf-8")
    try:
        for row in rows:
            if size >= SHARD_BYTES:
                file.close()
                number, size = number + 1, 0
                file = (data / f"episodes-{number:05d}.jsonl").open("w", encoding="utf-8")
            size += file.write(json.dumps(row.model_dump(mode="json")) + "\n")
            written.add(row)
    finally:
        file.close()
