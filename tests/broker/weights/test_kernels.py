"""The codec's kernels: one result on every processor, and no compiler before the first call."""

import subprocess
import sys

import numpy as np

from horizonrl.broker.weights import vectors


def test_a_bit_is_selected_alike_with_and_without_the_instruction() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        mask = int(random.integers(0, 1 << 63)) * 2 + 1
        bits = [i for i in range(64) if mask >> i & 1]
        for rank in (0, len(bits) // 2, len(bits) - 1):
            assert vectors.select_by_halves(np.uint64(mask), rank) == bits[rank]
            assert vectors.select(np.uint64(mask), rank) == bits[rank]


def test_the_codec_loads_numba_on_its_first_call_and_not_before() -> None:
    program = "import sys, horizonrl.broker.weights.changes; sys.exit('numba' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
