"""Changed words: what they say turns one image into the other, and what they cannot say is loaded whole."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from horizonrl.actors.weights import words as words_module
from horizonrl.actors.weights.words import POSITIONS, changed_words, compare, read_note, write_note
from horizonrl.broker.weights.layout import read_layout
from tests.weights import image

NAN, INFINITY, SIGN = 0x7FC1, 0x7F80, 0x8000
SHAPES = {"a": (40, 50), "b": (0,), "c": (3,), "d": (600,)}


def numbers() -> dict[str, Any]:
    dice = np.random.default_rng(3)
    return {name: dice.integers(0, INFINITY, shape, np.uint16) for name, shape in SHAPES.items()}


def written(path: Path, words: Mapping[str, Any]) -> Path:
    path.write_bytes(image(dict(words)))
    return path


def changed(words: Mapping[str, Any], **places: Mapping[int, int]) -> dict[str, Any]:
    """Return the words with others at some flat positions of some tensors."""
    copies = {name: array.copy() for name, array in words.items()}
    for name, values in places.items():
        for position, value in values.items():
            copies[name].reshape(-1)[position] = value
    return copies


def read(old: Path, new: Path) -> dict[str, Any] | None:
    """Return what a file of changed words has, or None if there is no such file."""
    positions = compare(old, new)
    file = None if positions is None else changed_words(new, positions)
    if file is None:
        return None
    with file:
        return {
            name: array.tolist()
            for name, array in load_file(f"/proc/self/fd/{file.fileno()}").items()
        }


@pytest.mark.parametrize("block", [7, 1 << 20])
def test_changed_words_are_those_that_differ(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(words_module, "COMPARED_WORDS", block)
    base = numbers() | {"c": np.array([0, 5, 9], np.uint16)}
    new = changed(base, a={0: 1, 1999: 2}, c={0: SIGN, 2: INFINITY}, d={13: 4, 14: 5, 599: 6})
    files = written(tmp_path / "old", base), written(tmp_path / "new", new)
    assert read(*files) == {
        "a": [1, 2],
        f"a{POSITIONS}": [0, 1999],
        "c": [SIGN, INFINITY],
        f"c{POSITIONS}": [0, 2],
        "d": [4, 5, 6],
        f"d{POSITIONS}": [13, 14, 599],
    }
    assert read(files[0], files[0]) == {}


@pytest.mark.parametrize(
    "new",
    [
        changed(numbers(), d={3: NAN}),
        changed(numbers(), d={3: NAN | SIGN}),
        numbers() | {"a": numbers()["a"].reshape(50, 40)},
        numbers() | {"a": numbers()["a"] ^ 1},
        {name: array for name, array in numbers().items() if name != "c"},
    ],
    ids=["NaN", "negative NaN", "another shape", "too many", "a tensor less"],
)
def test_what_words_cannot_say_is_loaded_whole(new: dict[str, Any], tmp_path: Path) -> None:
    assert read(written(tmp_path / "old", numbers()), written(tmp_path / "new", new)) is None


def test_other_types_and_files_are_loaded_whole(tmp_path: Path) -> None:
    for name, value in (("old", 1.0), ("new", 2.0)):
        save_file({"a": np.full(100, 1.0, np.float32), "b": np.array([value])}, tmp_path / name)
    (tmp_path / "text").write_bytes(b"no image")
    (tmp_path / "empty").write_bytes(b"")
    for old, new in (
        ("old", "new"),
        ("old", "text"),
        ("text", "new"),
        ("old", "empty"),
        ("old", "nowhere"),
    ):
        assert compare(tmp_path / old, tmp_path / new) is None


def test_a_nan_that_stays_is_no_changed_word(tmp_path: Path) -> None:
    base = changed(numbers(), a={7: NAN})
    files = written(tmp_path / "old", base), written(tmp_path / "new", changed(base, a={8: 1}))
    assert read(*files) == {"a": [1], f"a{POSITIONS}": [8]}


def test_a_note_is_read_as_it_was_written_or_not_at_all(tmp_path: Path) -> None:
    layout, note = read_layout(image(numbers())), tmp_path / "note"
    start = layout.data_offset
    parts = [(start + 4000, np.array([2, 0], np.uint32)), (start, np.array([1999, 7], np.uint32))]
    write_note(note, layout, parts)
    positions = read_note(note)
    assert positions is not None and positions.tolist() == [7, 1999, 2000, 2002]
    whole = note.read_bytes()
    for damaged in (whole[:-4], whole[:-1] + bytes([whole[-1] ^ 1]), whole[:9], b""):
        note.write_bytes(damaged)
        assert read_note(note) is None
    note.unlink()
    assert read_note(note) is None
    write_note(note, layout, [])
    positions = read_note(note)
    assert positions is not None and positions.tolist() == []


def test_a_note_that_is_too_long_or_cannot_be_written_is_left_out(tmp_path: Path) -> None:
    layout = read_layout(image(numbers()))
    write_note(tmp_path / "note", layout, [(layout.data_offset, np.arange(1000, dtype=np.uint32))])
    assert not list(tmp_path.iterdir())
    write_note(
        tmp_path / "gone" / "note", layout, [(layout.data_offset, np.arange(20, dtype=np.uint32))]
    )
    write_note(tmp_path / "note", layout, [(layout.data_offset, np.arange(20, dtype=np.uint32))])
    assert (tmp_path / "note").is_file()
