"""How long a version takes on its way from the learner to the actors, and a checkpoint to the disk: pure functions.

docs/scaling.md has the formulas. A version is copied off the GPU between two steps. It is written, digested and
encoded beside the next step, and the commit of that step waits for it. Engines pause to load it.
"""

from dataclasses import dataclass

from horizonrl.common.config.schema import RunConfig
from horizonrl.ops.plan import constants as c
from horizonrl.ops.plan.hardware import Fleet
from horizonrl.ops.plan.memory import EngineMemory
from horizonrl.ops.plan.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class VersionTime:
    """Seconds of one version, and of one checkpoint."""

    copy_s: float
    """The learner stands still."""
    publish_s: float
    """Beside the learner's next step: writing, digesting, encoding; and the mean version's part of a key frame."""
    receive_s: float
    """On an actor's host, beside generation: patching and digesting."""
    load_s: float
    """An engine pauses: it loads and probes the weights."""
    refill_s: float
    """An engine reads its unfinished episodes again, whose cache was another version's."""
    checkpoint_s: float

    @property
    def pause_s(self) -> float:
        return self.load_s + self.refill_s


def version_time(
    config: RunConfig,
    shape: ModelShape,
    fleets: tuple[Fleet, Fleet],
    engine: EngineMemory,
    checkpoint: float,
) -> VersionTime:
    """Return the seconds for the weights of `shape` and a checkpoint of that many bytes."""
    learner, actors = fleets
    frame = 2.0 * shape.parameters
    copy_s = 0.0 if learner.accelerator.is_cpu else frame / c.HOST_COPY.value
    if config.learner.zero_stage == 3 and learner.count > 1:
        copy_s += frame / c.rank_link(learner.count)
    digest_s = frame / c.DIGEST.value
    key_frame_s = frame / c.KEY_FRAME.value / c.KEY_FRAME_EVERY.value
    split = config.actor.tensor_parallel
    unfinished = engine.episodes * engine.cache_per_episode * split / shape.kv_bytes_per_token / 2
    prefill = split * actors.accelerator.flops * c.PREFILL_UTILISATION.value
    return VersionTime(
        copy_s=copy_s,
        publish_s=frame / c.WRITE.value + digest_s + frame / c.ENCODE.value + key_frame_s,
        receive_s=frame / c.PATCH.value + digest_s,
        load_s=frame / c.LOAD.value + frame / c.PROBE.value,
        refill_s=unfinished * shape.forward_flops(0.0, 0.0) / prefill,
        checkpoint_s=checkpoint / c.CHECKPOINT.value,
    )
