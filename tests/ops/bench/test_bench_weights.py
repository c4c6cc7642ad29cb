"""The bench of changes, on a tiny model that it trains itself."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from horizonrl.common.errors import RunFailed, WeightsRejected
from horizonrl.ops.bench.case import Request, measure
from horizonrl.ops.bench.forms import FORMS, Form
from horizonrl.ops.bench.frames import make_frames
from horizonrl.ops.bench.weights import compare, entropy_bytes, read_image, send
from horizonrl.ops.models.tiny_model import make_tiny_model
from tests.broker.weights.test_changes import pair, trained


@pytest.mark.process
def test_frames_are_trained_once_and_each_rate_changes_more(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    made = make_frames(model, tmp_path / "frames")
    shares = []
    for _, old, new in made:
        before, after = (np.fromfile(path, np.uint16) for path in (old, new))
        shares.append((before != after).mean())
    assert shares == sorted(shares) and shares[0] > 0
    assert make_frames(tmp_path / "no model", tmp_path / "frames") == made


def test_every_form_is_exact_and_ours_is_near_the_entropy() -> None:
    images = [np.frombuffer(data, np.uint16) for data in pair(*trained(300_000, 4e-5))]
    rows = asyncio.run(measure(compare("a version", *images), Request(small=True)))
    sizes = {row.peer: row.ratios[0] for row in rows if row.unit == "MB"}
    assert sizes.keys() == {*FORMS, "entropy", "the whole file"} - {"ours"}
    assert 1 < 1 / sizes["entropy"] < 1.1
    assert sizes["XOR, zstd"] > 2
    assert {row.unit for row in rows} == {"MB", "s to encode", "s to apply"}


def test_a_form_that_is_inexact_fails() -> None:
    images = [np.frombuffer(data, np.uint16) for data in pair(*trained(300_000, 4e-5))]
    inexact = Form(FORMS["ours"].encode, lambda image, data: None)
    with pytest.raises(RunFailed, match="inexact"):
        asyncio.run(send(inexact, *images))


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
        read_image(tmp_path / "odd")
