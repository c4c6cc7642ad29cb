"""How `train` divides a machine's GPUs between the learner's ranks and the actors: a pure function of their number."""

from collections.abc import Sequence
from dataclasses import dataclass

from horizonrl.common.config.schema import LARGEST_SHARED, RunConfig
from horizonrl.common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Division:
    """Which GPUs each part sees, by CUDA's numbers or ids; all empty on a machine without GPUs."""

    learner: tuple[str, ...]
    actors: tuple[tuple[str, ...], ...]
    shared: bool
    """Whether an actor has a GPU that the learner has too."""
    memory_share: float | None = None
    """Share of a shared GPU's memory for an engine."""

    def environment(self, role: str, number: int = 0) -> dict[str, str]:
        """Return what to add to the environment of the learner, of the controller, or of actor `number`."""
        if not self.learner:
            return {}
        devices = {
            "learner": self.learner,
            "actor": self.actors[number] if role == "actor" else (),
        }.get(role, ())
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(devices)}
        if role == "actor" and self.memory_share is not None:
            # An actor cannot see that it shares, so it cannot take the default itself.
            visible["HORIZONRL_ACTOR__GPU_MEMORY_SHARE"] = f"{self.memory_share:g}"
        return visible

    def __str__(self) -> str:
        actors = ", ".join(
            f"actor-{number} {'+'.join(visible)}" for number, visible in enumerate(self.actors)
        )
        return f"GPUs: learner {'+'.join(self.learner)}; {actors or 'no actors'}{' (shared)' if self.shared else ''}"


def divide(config: RunConfig, gpus: Sequence[str]) -> Division:
    """Give the learner's ranks the first GPUs and each actor the next ones; share them where there are too few.

    Raises ConfigError if they do not suffice even then, or if an engine on a shared GPU would take most of its memory.
    """
    ranks, count, per_actor = config.learner.ranks, config.actor.count, config.actor.tensor_parallel
    if not gpus:
        return Division((), ((),) * count, shared=False)
    wanted = count * per_actor
    learns = config.learner.backend != "hash"
    taken = ranks if learns else 0
    samples = config.actor.engine == "vllm"
    needed = (
        f"learner.ranks = {ranks} and {count} actors of {per_actor} GPUs need {taken + wanted} GPUs"
    )
    if taken > len(gpus) or (samples and per_actor > len(gpus)):
        raise ConfigError(
            f"{needed}, and this machine has {len(gpus)}: lower learner.ranks or actor.tensor_parallel"
        )
    if not samples:
        return Division(tuple(gpus[:taken]), ((),) * count, shared=False)
    shared = taken + wanted > len(gpus)
    # From the end, so that the ranks and the actors meet on as few GPUs as possible.
    ring = gpus[taken:] if not shared else tuple(reversed(gpus))
    if shared and wanted > len(gpus):
        raise ConfigError(
            f"{needed}, and this machine has {len(gpus)}: lower actor.count or actor.tensor_parallel"
        )
    share = config.actor.memory_share(shared=True) if shared else None
    if share is not None and share > LARGEST_SHARED:
        raise ConfigError(
            f"{needed}, and this machine has {len(gpus)}, so that an engine and a rank share a GPU, but "
            f"actor.gpu_memory_share is {share:g}: set it to {LARGEST_SHARED:g} or less, or "
            "lower learner.ranks or actor.count"
        )
    actors = tuple(
        tuple(ring[number * per_actor : (number + 1) * per_actor]) for number in range(count)
    )
    return Division(tuple(gpus[:taken]), actors, shared, share)
