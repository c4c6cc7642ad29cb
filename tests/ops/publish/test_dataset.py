import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import DatasetCard

from horizonrl.common.config.schema import RunConfig
from horizonrl.ops.cli.main import main
from horizonrl.ops.publish import dataset
from horizonrl.ops.publish.dataset import write_dataset
from horizonrl.ops.publish.rows import EpisodeRow
from horizonrl.ops.rundir.directory import write_config
from tests.ops.report.runs import Scale, run_config, write_run


def lines(file: Path) -> list[str]:
    return file.read_text().splitlines()


def read(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in sorted((out / "data").iterdir()) for line in lines(file)]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_run(run_config(tmp_path))


def test_every_episode_is_a_row_of_the_schema_with_its_tokens_and_its_end(
    run_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert main(["dataset", str(run_dir), str(out)]) == 0
    rows = [EpisodeRow.model_validate(row) for row in read(out)]
    kept = [
        json.loads(line)
        for file in sorted((run_dir / "episodes").iterdir())
        for line in lines(file)
    ]
    assert len(rows) == len(kept) == 6 * 6 * 4
    for row, record in zip(rows, kept, strict=True):
        assert (row.ticket, row.episode, row.episode_return) == (
            record["ticket"],
            record["episode"],
            record["return"],
        )
        assert [turn.token_ids for turn in row.turns] == [turn["ids"] for turn in record["turns"]]
        assert [turn.logprobs for turn in row.turns] == [
            turn["logprobs"] for turn in record["turns"]
        ]
        assert [turn.versions for turn in row.turns] == [turn["spans"] for turn in record["turns"]]
        assert [turn.observation for turn in row.turns] == [
            turn["observation"] for turn in record["turns"]
        ]
    assert {row.end for row in rows if row.step == 2} == {
        "trained into version 2",
        "dropped: zero_variance",
    }
    assert {row.kind for row in rows} == {"train"}
    schema = json.loads((out / "schema.json").read_text())
    assert schema["properties"].keys() == read(out)[0].keys()


def test_the_card_says_what_is_in_it_and_nothing_of_this_machine(
    run_dir: Path, tmp_path: Path
) -> None:
    write_dataset(run_dir, tmp_path / "out")
    card = DatasetCard.load(tmp_path / "out" / "README.md")
    assert card.data.configs == [{"config_name": "default", "data_files": "data/*.jsonl"}]
    assert "144 episodes" in card.text and "| textcraft | 72 |" in card.text
    for name in (*EpisodeRow.model_fields, "token_ids", "logprobs", "versions"):
        assert f"| `{name}` |" in card.text
    assert str(tmp_path) not in card.content


def test_every_field_has_its_meaning_in_the_schema() -> None:
    schema = EpisodeRow.model_json_schema()
    for table in (schema, schema["$defs"]["TurnRow"]):
        assert all(field.get("description") for field in table["properties"].values())


def test_a_long_run_is_written_in_files_of_a_bounded_size(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset, "SHARD_BYTES", 20_000)
    write_dataset(run_dir, tmp_path / "out")
    files = sorted((tmp_path / "out" / "data").iterdir())
    assert len(files) > 3
    assert all(20_000 <= file.stat().st_size < 30_000 for file in files[:-1])
    assert len(read(tmp_path / "out")) == 144


def test_a_run_four_times_as_long_takes_no_more_memory(tmp_path: Path) -> None:
    peaks = []
    for steps in (2, 8):
        root = tmp_path / str(steps)
        run_dir = write_run(run_config(root), Scale(steps=steps, groups=6, size=4, turns=4))
        tracemalloc.start()
        write_dataset(run_dir, root / "out")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        step_bytes = (run_dir / "episodes" / "step-000001.jsonl").stat().st_size
    assert peaks[1] - peaks[0] < 2 * step_bytes, f"{peaks} bytes; a step's file has {step_bytes}"


def test_what_cannot_be_read_is_left_out_and_counted(run_dir: Path, tmp_path: Path) -> None:
    first, second = sorted((run_dir / "episodes").iterdir())[:2]
    for file in (first, second):
        with file.open("a") as sink:
            sink.write('{"ticket": "cut sh')
    written = write_dataset(run_dir, tmp_path / "out")
    assert (written.rows, written.unreadable) == (144, 2)
    assert "2 episodes that could not be" in (tmp_path / "out" / "README.md").read_text()


def test_an_interrupted_dataset_is_made_anew_and_a_complete_one_is_never_written_over(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> str:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dataset, "dataset_card", interrupt)
        with pytest.raises(KeyboardInterrupt):
            write_dataset(run_dir, tmp_path / "out")
    (tmp_path / "out" / "data" / "episodes-00007.jsonl").write_text("{")
    assert main(["dataset", str(run_dir), str(tmp_path / "out")]) == 0
    assert len(read(tmp_path / "out")) == 144
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "README.md",
        "data",
        "schema.json",
    }
    assert main(["dataset", str(run_dir), str(tmp_path / "out")]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_a_folder_with_files_of_the_users_is_left_as_it_is(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "out" / "data" / "own.jsonl"
    own.parent.mkdir(parents=True)
    own.write_text("{}")
    assert main(["dataset", str(run_dir), str(tmp_path / "out")]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert [path for path in (tmp_path / "out").rglob("*") if path.is_file()] == [own]


def test_a_run_without_episodes_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = RunConfig.load([], [f"--run.root={tmp_path}"])
    write_config(config)
    assert main(["dataset", str(config.run_dir), str(tmp_path / "out")]) == 2
    assert "has no episodes yet" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
