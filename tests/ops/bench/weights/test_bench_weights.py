"""The bench of changes, on a tiny model that it trains itself."""

import json
from pathlib import Path

import numpy as np
import pytest

from horizonrl.common.errors import WeightsRejected
from horizonrl.ops.bench.weights.frames import made_frames
from horizonrl.ops.bench.weights.run import entropy_bytes, run
from horizonrl.ops.models.tiny_model import make_tiny_model
from tests.broker.weights.test_changes import pair, trained


@pytest.mark.process
def test_frames_are_trained_once_and_each_rate_changes_more(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    made = made_frames(model, tmp_path / "frames")
    shares = []
    for _, old, new in made:
        before, after = (np.fromfile(path, np.uint16) for path in (old, new))
        shares.append((before != after).mean())
    assert shares == sorted(shares) and shares[0] > 0
    assert made_frames(tmp_path / "no model", tmp_path / "frames") == made


def test_every_form_is_exact_and_the_json_has_what_is_promised(tmp_path: Path) -> None:
    for name, data in zip(("old", "new"), pair(*trained(300_000, 4e-5)), strict=True):
        # A header of odd length would put words between two.
        assert len(data) % 2 == 0
        (tmp_path / name).write_bytes(data)
    assert run(tmp_path / "out.json", [tmp_path / "old", tmp_path / "new"]) == 0
    (row,) = json.loads((tmp_path / "out.json").read_text())["frames"]
    promised = {"lr", "changed_share", "ratio", "over_entropy", "encode_s", "apply_s", "xor_zstd_ratio", "exact"}
    assert promised <= row.keys() and row["exact"]
    assert all(form["exact"] for form in row["forms"].values())
    assert 1 < row["over_entropy"] < 1.1 and row["xor_zstd_ratio"] > 2


def test_the_entropy_of_a_known_change() -> None:
    old = np.full(1 << 17, 0x3F80, np.uint16)
    new = old.copy()
    new[: 1 << 16] += 1
    images = [np.frombuffer(each, np.uint8) for each in pair(old, new)]
    # Half of the words change, all by one: a bit per word.
    assert entropy_bytes(*(each.view(np.uint16) for each in images)) == pytest.approx((1 << 17) / 8)


def test_what_is_no_safetensors_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "odd").write_bytes(b"\1\0\0\0\0\0\0\0{")
    with pytest.raises(WeightsRejected):
        run(None, [tmp_path / "odd", tmp_path / "odd"])
