"""Which GPUs a process was given, and whether torch can use them. Imports no torch and starts no CUDA."""

import os
import re
import subprocess
from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from horizonrl.common.errors import ConfigError

_GPU = re.compile(r"\d+|(GPU|MIG)-.+")


def visible_gpus(environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the GPUs that this process may use: those of CUDA_VISIBLE_DEVICES, or all that nvidia-smi lists."""
    visible = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        # As CUDA reads it: the first name that is none (-1, NoDevFiles, an empty one) ends the list.
        return tuple(takewhile(_GPU.fullmatch, (name.strip() for name in visible.split(","))))
    # Not torch: the console starts without it, and CUDA in this process would take memory on every GPU.
    return _split_list(ask_nvidia_smi("-L"))


def ask_nvidia_smi(*arguments: str) -> str:
    """Return what nvidia-smi prints; nothing where it is not installed or finds no driver."""
    try:
        command = ["nvidia-smi", *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def has_gpu(torch: Any) -> bool:
    """Return whether torch, the module, can use a GPU.

    Raises ConfigError if it cannot use those that this process was given: it would work on the CPU, unseen.
    """
    if torch.cuda.is_available():
        return True
    if gpus := visible_gpus():
        built = "for CPUs" if torch.version.cuda is None else f"with CUDA {torch.version.cuda}"
        raise ConfigError(
            f"torch {torch.__version__}, built {built}, cannot use the GPUs {', '.join(gpus)} ({_refusal(torch)}): "
            "`horizonrl doctor` shows what does not fit together. With a driver of 580 or later, install "
            'requirements/gpu.txt (`make setup` does); to use the CPU, set CUDA_VISIBLE_DEVICES=""'
        )
    return False


def _refusal(torch: Any) -> str:
    """Return torch's own words for why it does not use CUDA."""
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        return str(error)
    return "it sees none"


def _split_list(text: str) -> tuple[str, ...]:
    """Return the GPUs of `nvidia-smi -L`: by number, or by id where a GPU is divided into slices (MIG)."""
    if "MIG-" not in text:
        return tuple(str(number) for number in range(len(re.findall(r"^GPU ", text, re.MULTILINE))))
    gpus: list[str] = []
    for card in re.split(r"^(?=GPU )", text, flags=re.MULTILINE)[1:]:
        # A process can use the slices of a divided GPU, and no longer the GPU itself.
        gpus += re.findall(r"UUID: (MIG-[^)\s]+)", card) or re.findall(r"UUID: (GPU-[^)\s]+)", card)
    return tuple(gpus)
