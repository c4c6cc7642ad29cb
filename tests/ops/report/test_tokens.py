from pathlib import Path

from horizonrl.ops.report.tokens import TokenTexts
from tests.ops.report.runs import END, THOUGHT, write_tokenizer


def test_tokens_join_to_the_text_and_letters_of_several_tokens_stand_with_the_last(
    tmp_path: Path,
) -> None:
    ids = write_tokenizer(tmp_path).encode(THOUGHT + END).ids
    texts = TokenTexts.find(tmp_path)
    assert texts is not None
    pieces = texts.pieces(ids, THOUGHT)
    assert pieces is not None
    assert "".join(pieces.texts) == THOUGHT + END
    assert pieces.special == [len(ids) - 1]
    at = pieces.texts.index("🪵")
    assert pieces.texts[at - 3 : at] == ["", "", ""]


def test_a_turn_cut_in_the_middle_of_a_letter_keeps_what_the_run_has_written(
    tmp_path: Path,
) -> None:
    ids = write_tokenizer(tmp_path).encode("a🪵").ids[:-1]
    texts = TokenTexts.find(tmp_path)
    assert texts is not None
    pieces = texts.pieces(ids, "a�")
    assert pieces is not None
    assert "".join(pieces.texts) == "a�"


def test_another_tokenizer_is_noticed(tmp_path: Path) -> None:
    ids = write_tokenizer(tmp_path).encode("get").ids
    texts = TokenTexts.find(tmp_path)
    assert texts is not None
    assert texts.pieces(ids, "put") is None
    assert TokenTexts.find(tmp_path / "nowhere") is None
