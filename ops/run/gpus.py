"""How `train` divides a machine's GPUs between the learner's ranks and the actors: a pure function of their number."""

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import ConfigError

LARGEST_SHARE = 0.5
"""Of a GPU's memory for an engine on a GPU that a rank of the learner has too."""
_GPU = re.compile(r"\d+|(GPU|MIG)-.+")


@dataclass(frozen=True, slots=True)
class Division:
    """Which GPUs each part sees, by CUDA's numbers or ids; all empty on a machine without GPUs."""

    learner: tuple[str, ...]
    actors: tuple[tuple[str, ...], ...]
    shared: bool
    """Whether an actor has a GPU that the learner has too."""

    def environment(self, role: str, number: int = 0) -> dict[str, str]:
        """Return what to add to the environment of the learner, of the controller, or of actor `number`."""
        if not self.learner:
            return {}
        own = {"learner": self.learner, "actor": self.actors[number] if role == "actor" else ()}.get(role, ())
        return {"CUDA_VISIBLE_DEVICES": ",".join(own)}

    def __str__(self) -> str:
        actors = ", ".join(f"actor-{number} {'+'.join(own)}" for number, own in enumerate(self.actors))
        return f"GPUs: learner {'+'.join(self.learner)}; {actors or 'no actors'}{' (shared)' if self.shared else ''}"


def divide(config: RunConfig, gpus: Sequence[str]) -> Division:
    """Give the learner's ranks the first GPUs and each actor the next ones; share them where there are too few.

    Raises ConfigError if they do not suffice even then, or if an engine on a shared GPU would take most of its memory.
    """
    ranks, count, each = config.learner.ranks, config.actor.count, config.actor.tensor_parallel
    if not gpus:
        return Division((), ((),) * count, shared=False)
    wanted = count * each
    learns = config.learner.backend != "hash"
    taken = ranks if learns else 0
    samples = config.actor.engine == "vllm"
    needed = f"learner.ranks = {ranks} and {count} actors of {each} GPUs need {taken + wanted} GPUs"
    if taken > len(gpus) or (samples and each > len(gpus)):
        raise ConfigError(f"{needed}, and this machine has {len(gpus)}: lower learner.ranks or actor.tensor_parallel")
    if not samples:
        return Division(tuple(gpus[:taken]), ((),) * count, shared=False)
    shared = taken + wanted > len(gpus)
    # From the end, so that the ranks and the actors meet on as few GPUs as possible.
    ring = gpus[taken:] if not shared else tuple(reversed(gpus))
    if shared and wanted > len(gpus):
        raise ConfigError(f"{needed}, and this machine has {len(gpus)}: lower actor.count or actor.tensor_parallel")
    if shared and config.actor.gpu_memory_share > LARGEST_SHARE:
        raise ConfigError(
            f"{needed}, and this machine has {len(gpus)}, so that an engine and a rank share a GPU, but "
            f"actor.gpu_memory_share is {config.actor.gpu_memory_share:g}: set it to {LARGEST_SHARE:g} or less, or "
            "lower learner.ranks or actor.count"
        )
    actors = tuple(tuple(ring[number * each : (number + 1) * each]) for number in range(count))
    return Division(tuple(gpus[:taken]), actors, shared)


def visible_gpus(environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the GPUs that this process may use: those of CUDA_VISIBLE_DEVICES, or all that nvidia-smi lists."""
    given = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        # As CUDA reads it: the first name that is none (-1, NoDevFiles, an empty one) ends the list.
        return tuple(takewhile(_GPU.fullmatch, (name.strip() for name in given.split(","))))
    try:
        # Not torch: the console starts without it, and CUDA in this process would take memory on every GPU.
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return _listed(listed)


def _listed(text: str) -> tuple[str, ...]:
    """Return the GPUs of `nvidia-smi -L`: by number, or by id where a GPU is divided into slices (MIG)."""
    if "MIG-" not in text:
        return tuple(str(number) for number in range(len(re.findall(r"^GPU ", text, re.MULTILINE))))
    gpus: list[str] = []
    for card in re.split(r"^(?=GPU )", text, flags=re.MULTILINE)[1:]:
        # A process can use the slices of a divided GPU, and no longer the GPU itself.
        gpus += re.findall(r"UUID: (MIG-[^)\s]+)", card) or re.findall(r"UUID: (GPU-[^)\s]+)", card)
    return tuple(gpus)
