"""Damaged lines of a run's files: one message with their place from every command that reads them."""

import json
from pathlib import Path

import pytest

from horizonrl import open_run
from horizonrl.common.errors import ConfigError
from horizonrl.ops.cli.main import main
from horizonrl.ops.rundir.lines import SHAPES, GrowingLines, read_lines
from tests.ops.report.runs import run_config, write_run

READERS = {
    "metrics.jsonl": (["status"], ["report"]),
    "evals.jsonl": (["status"], ["report"]),
    "lineages.jsonl": (["report"],),
    "ledger.jsonl": (["history lineage", "--version", "2"],),
}
DAMAGE = {
    "is not JSON": (b"garbage\n", b"\0\0\0\0\n", b'{"a": "\xe9"}\n', b"[" * 5_000 + b"\n"),
    "is not an object": (b"7\n", b"[1]\n"),
    "has no '": (b'{"lineage": 0}\n',),
}
"""What stands there, by what is said of it."""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(run_config(tmp_path_factory.mktemp("runs")))


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_line_is_one_message_with_its_place(
    run_dir: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run_dir / name
    whole = file.read_bytes()
    first, rest = whole.split(b"\n", 1)
    try:
        for said, lines in DAMAGE.items():
            for line in lines:
                file.write_bytes(first + b"\n" + line + rest)
                for command, *options in READERS[name]:
                    assert main([*command.split(), str(run_dir), *options]) == 2
                    assert f"{file}, line 2 {said}" in capsys.readouterr().err
    finally:
        file.write_bytes(whole)


WRONG = ("text", [7], {"a": [[]]}, True, 0.5)


@pytest.mark.parametrize("name", READERS)
def test_a_value_of_another_type_is_said_with_its_place_and_key(
    run_dir: Path, name: str, tmp_path: Path
) -> None:
    line = json.loads((run_dir / name).read_bytes().split(b"\n")[0])
    assert line.keys() <= SHAPES[name].model_fields.keys()
    for key in line:
        refused = 0
        for wrong in WRONG:
            (tmp_path / name).write_text(json.dumps(line | {key: wrong}) + "\n")
            try:
                read_lines(tmp_path / name)
            except ConfigError as error:
                assert f"line 1 has {key}" in str(error) and "Remove that line" in str(error)  # noqa: PT017
                refused += 1
        assert refused >= len(WRONG) - 1, key


def test_a_wrong_type_is_one_message_from_a_command(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run_dir / "metrics.jsonl"
    whole = file.read_bytes()
    try:
        file.write_bytes(whole.replace(b'"loss": ', b'"loss": "high", "was": ', 1))
        for command in ("status", "report"):
            assert main([command, str(run_dir)]) == 2
            assert (
                f"{file}, line 1 has loss = 'high': input should be a valid number"
                in capsys.readouterr().err
            )
    finally:
        file.write_bytes(whole)


@pytest.mark.parametrize(
    ("key", "entry", "at"),
    [
        (
            "growths",
            {"env_id": "a", "phase_step": "5", "from_turns": 4, "to_turns": 8, "reason": "r"},
            "phase_step",
        ),
        (
            "curriculum",
            {"env_id": "a", "category": "b", "share": "x", "differed": None, "tasks": 1},
            "share",
        ),
    ],
)
def test_what_a_list_holds_has_its_types_too(
    key: str, entry: dict[str, object], at: str, tmp_path: Path
) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({key: [entry]}) + "\n")
    with pytest.raises(ConfigError, match=rf"line 1 has {key}\.0\.{at} = "):
        read_lines(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize(
    ("name", "key", "entry"),
    [
        ("evals.jsonl", "ends", [1, "eval-00000000", "\x1b[2J"]),
        ("evals.jsonl", "ends", [1, "\x1b[2J-0", "evaluated"]),
        ("ledger.jsonl", "dropped", [1, "train-00000000", "\x1b[2J"]),
        ("ledger.jsonl", "trained", [1, "\x1b[2J"]),
        ("ledger.jsonl", "voids", [1, "train-"]),
    ],
)
def test_a_ticket_and_its_end_are_of_those_that_there_are(
    name: str, key: str, entry: list[object], run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run_dir / name
    whole = file.read_bytes()
    first, rest = whole.split(b"\n", 1)
    line = json.loads(first) | {key: [entry]}
    try:
        file.write_bytes(json.dumps(line).encode() + b"\n" + rest)
        for command in ("status", "report"):
            assert main([command, str(run_dir)]) == 2
            said = capsys.readouterr().err
            assert f"{file}, line 1 has {key}.0." in said and "\x1b" not in said
    finally:
        file.write_bytes(whole)


def test_a_key_of_a_later_version_may_hold_anything(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "later": [{}], "loss": null}\n')
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 1, "later": [{}], "loss": None}]


def test_a_column_that_a_program_misspells_is_no_damage(run_dir: Path) -> None:
    with pytest.raises(KeyError, match="sucess_rate"):
        open_run(run_dir).metrics()[0]["sucess_rate"]


def test_a_line_that_is_being_written_is_left_for_later(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    growing = GrowingLines(file)
    file.write_bytes(b'{"step": 1}\n{"st')
    assert read_lines(file) == growing.read() == [{"step": 1}]
    file.write_bytes(b'{"step": 1}\n{"step": 2}\ngarbage\n')
    with pytest.raises(ConfigError, match="line 3 is not JSON"):
        growing.read()
    file.write_bytes(b'{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    assert growing.read() == [{"step": 1}, {"step": 2}, {"step": 3}]
