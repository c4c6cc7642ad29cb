"""A machine with GPUs as far as `nvidia-smi` tells of them: a program of that name, first on the PATH."""

import os
from pathlib import Path

import pytest

WHOLE = "GPU 0: NVIDIA H100 (UUID: GPU-aa)\nGPU 1: NVIDIA H100 (UUID: GPU-bb)\n"
SLICED = """\
GPU 0: NVIDIA H100 (UUID: GPU-aa)
  MIG 3g.40gb     Device  0: (UUID: MIG-a1)
  MIG 3g.40gb     Device  1: (UUID: MIG-a2)
GPU 1: NVIDIA H100 (UUID: GPU-bb)
"""


def put_nvidia_smi(
    folder: Path, monkeypatch: pytest.MonkeyPatch, listed: str, code: int = 0
) -> None:
    """Put an `nvidia-smi` that prints `listed` on the PATH, and let this process see what it lists."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{listed}END\nexit {code}\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
