"""The header of a weights file is another program's word until it is checked."""

import json
from pathlib import Path

import pytest

from horizonrl.actors.engines.vllm import frame_shapes


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 8,
        (1 << 63).to_bytes(8, "little") + b"{}",
        (1 << 40).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (6).to_bytes(8, "little") + b'{"a":',
        (8).to_bytes(8, "little") + b'{"a":[]}',
        (8).to_bytes(8, "little") + b'{"a":{}}',
        (19).to_bytes(8, "little") + b'{"a":{"shape":null}',
    ],
)
def test_a_file_without_a_safetensors_header_is_a_clear_error(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "frame"
    file.write_bytes(content)
    with pytest.raises(ValueError):  # noqa: PT011 - of several kinds: JSON's, UTF-8's, ours
        frame_shapes(file)


def test_the_shapes_are_the_headers(tmp_path: Path) -> None:
    header = json.dumps({"__metadata__": {}, "a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}}).encode()
    file = tmp_path / "frame"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(12))
    assert frame_shapes(file) == {"a": (2, 3)}
