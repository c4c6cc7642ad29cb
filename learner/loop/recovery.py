"""Recovery: writes the checkpoints that a learner resumes from, and takes a run over where its newest one stands.

A learner that speaks ends the learner that spoke before. So `resume` first tries everything that can fail, and changes
nothing until then.
"""

import asyncio
import os
import platform
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import xxhash

from horizonrl.broker.log_continuity import resume_position
from horizonrl.common.config.changes import config_changes
from horizonrl.common.errors import CheckpointError, CheckpointMismatch, LogGap
from horizonrl.common.logs import get_logger
from horizonrl.common.run_dir import foreign_files
from horizonrl.common.service import until_stopped
from horizonrl.common.state import Progress
from horizonrl.learner.engine.checkpoint.weights_file import WEIGHTS_FILE
from horizonrl.learner.loop.log_space import LogSpace
from horizonrl.learner.loop.ports import Ports
from horizonrl.learner.loop.publication import Publication
from horizonrl.learner.loop.state import LearnerState
from horizonrl.learner.records.checkpoint import Checkpoint

log = get_logger()

CPU_KINDS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
"""Flags of a processor by which torch and oneDNN choose their kernels."""
CODE = [Path(__file__).parents[2] / package for package in ("broker", "common", "learner")]
"""What turns a log into versions."""
LORA_RANK = "lora.rank"
UNDECODABLE = (ValueError, KeyError, TypeError, AttributeError)
"""What a file raises that has the right size and the wrong bytes."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What checkpoints and `lineages.jsonl` say of a run, beside where it stands."""

    directory: Path
    identity: Mapping[str, str]
    """What must stay the same for a run to go on: digests, and the rank of LoRA's adapters."""
    config: Mapping[str, Any]
    """What may change between two learners, and is written down when it does."""
    machine: Mapping[str, Any]
    ranks: int

    @property
    def adapters(self) -> bool:
        """Whether adapters are trained, beside a frozen model."""
        return LORA_RANK in self.identity


@dataclass
class Recovery:
    ports: Ports
    state: LearnerState
    run: RunRecord
    publication: Publication
    log_space: LogSpace

    def __post_init__(self) -> None:
        self._saved_step = 0
        self._sealing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """The checkpoint that is becoming durable; done when there is none."""
        self._sealing.set_result(None)
        self._begun: tuple[float, float] | None = None
        """How long the last checkpoint took to begin, and how long the engine's calls had waited until then."""

    # ---- resume

    async def resume(self) -> None:
        """Take the run over where its newest checkpoint stands, on a new lineage if the run had one before."""
        weights = self.publication.weights
        earlier, announced = await self.ports.fence.look()
        lineages, checkpoints = self.ports.journal.lineages(), self.ports.checkpoints.all()
        used = bool(lineages) or bool(checkpoints)
        # Before this learner has said a word: one with an empty directory must not displace the learner that holds the
        # run.
        check_directory(self.run.directory, used, earlier)
        # Journal, checkpoints and broker are asked, since any of them may have lost its part. A lineage that is used
        # twice would give two policies one name.
        lineages += [checkpoint.lineage for checkpoint in checkpoints]
        lineages += [record.policy.lineage for record in (earlier, announced) if record is not None]
        self.state.lineage = max(lineages, default=-1) + 1
        if self.run.adapters and not weights.share_files:
            # Before `load`: adapters begin at 0, so these are the frozen model's weights.
            await self.ports.engine.write_weights(weights.base_file)
        checkpoint, digest, damaged = await self._load(checkpoints)
        changed: dict[str, tuple[Any, Any]] = {}
        if checkpoint is not None:
            before, now = dict(checkpoint.state["config"]), dict(self.run.config)
            if "broker" not in before:  # of a release that did not keep the section
                del now["broker"]
            changed = config_changes(before, now)
        # Needs the restored commit: its cursor and mark tell whether the log is still the one that was read.
        log_cut = await self._find_position()
        # Actors begin with version 0 of lineage 0 as their own copy, so it is never announced. An evaluation needs its
        # file all the same: it may be the best version.
        if checkpoint is None and (self.state.lineage or self.state.eval_tasks):
            digest = await self.ports.engine.write_weights(weights.path_for(self.state.policy))
        # Everything that may refuse to resume has been tried. Repeating the last learner's word fences that learner,
        # and tells the controller nothing new. Only the next word is this learner's own.
        while not await self.ports.fence.take_over(earlier, self.state.progress()):
            # What that learner has said and freed meanwhile may refuse this one.
            earlier, _ = await self.ports.fence.look()
            check_directory(self.run.directory, used, earlier)
            log_cut |= await self._find_position()
        # Cuts the journal, so it waits until this learner has spoken: one that is refused must not cut another
        # learner's lines.
        for name in damaged:
            self.ports.checkpoints.set_aside(name)
        passed_over = {"checkpoints_damaged": damaged} if damaged else {}
        self._record_start(
            resumed=checkpoint is not None, more={"changed": changed} | log_cut | passed_over
        )
        # Also for version 0: with a version that was rolled back, actors would make groups that are dropped as
        # `lineage`.
        if self.state.lineage:
            await self.publication.announcer.announce_weights(digest)
        # After the weights: tickets follow from progress, and an actor waits for the version that its ticket names.
        await self.publication.announcer.announce_progress()
        # A learner killed between a checkpoint and its purge may leave a full log, on which publishers would wait for
        # ever.
        await self.log_space.free()

    async def _load(
        self, kept: Sequence[Checkpoint]
    ) -> tuple[Checkpoint | None, str, dict[str, str]]:
        """Restore state and engine from the newest checkpoint that is whole, and write its weights to their file.

        Returns the checkpoint, the digest of that file, and by their names why newer ones were passed over. Raises
        CheckpointError if there are checkpoints and none is whole.
        """
        damaged = self.ports.checkpoints.damaged()
        for checkpoint in kept:
            try:
                check_identity(checkpoint, self.run.identity)
                self.state.restore(checkpoint.state)
                check_phase(checkpoint, self.state.schedule.imitation.steps)
                await self._load_engine(checkpoint)
                digest = await self._write_checked(checkpoint)
            except CheckpointMismatch:
                raise
            except (CheckpointError, *UNDECODABLE) as error:
                damaged[checkpoint.path.name] = f"{type(error).__name__}: {error}"
                continue
            for name, reason in damaged.items():
                log.warning(
                    "checkpoint_damaged",
                    checkpoint=name,
                    reason=reason,
                    resumed_from=checkpoint.step,
                )
            self._saved_step = checkpoint.step
            return checkpoint, digest, damaged
        if kept:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in damaged.items())
            raise CheckpointError(
                f"no checkpoint of {self.run.directory} is whole ({reasons}): restore one from a copy, or move "
                "all of them away to train again from the group log, if it was kept (learner.keep_log)"
            )
        for name, reason in damaged.items():
            log.warning("checkpoint_damaged", checkpoint=name, reason=reason, resumed_from=0)
        return None, "", damaged

    async def _load_engine(self, checkpoint: Checkpoint) -> None:
        try:
            await self.ports.engine.load(checkpoint.path)
        except CheckpointMismatch:
            raise
        except (CheckpointError, *UNDECODABLE) as error:
            if self.run.ranks == 1:
                raise
            # The other ranks wait in a call that the first one has left.
            raise CheckpointMismatch(
                f"{checkpoint.path} is damaged ({error}): move it away, and the learner resumes from the one before it"
            ) from error

    async def _write_checked(self, checkpoint: Checkpoint) -> str:
        """Write the weights of a checkpoint that was loaded; return their digest.

        Raises CheckpointError if the ledger has another digest of that step: a bit has flipped on the disk.
        """
        file = self.publication.weights.path_for(self.state.policy)
        digest = await self.ports.engine.write_weights(file)
        recorded = self.ports.journal.weights_digest(checkpoint.step)
        if recorded in (None, digest):
            return digest
        if self.run.adapters:
            # Merging multiplies matrices: another kind of processor may round otherwise.
            log.warning("weights_differ", step=checkpoint.step, ledger=recorded, loaded=digest)
            return digest
        file.unlink()
        raise CheckpointError(
            f"its weights have the digest {digest}, and those of the ledger {recorded}"
        )

    async def _find_position(self) -> dict[str, Any]:
        """Move the cursor if the log has lost entries that it counts; return what to record of that.

        Raises CheckpointMismatch when the log does not hold what comes next.
        """
        commit = self.state.last_commit
        try:
            position = await resume_position(self.ports.transport, commit.cursor, commit.mark)
            # What the commit held lies before it, and has to be there too.
            if position == commit.cursor:
                await resume_position(self.ports.transport, self.state.collector.read_after, "")
        except LogGap as error:
            raise CheckpointMismatch(
                f"{self.run.directory} cannot be resumed from step {commit.step}: {error}"
            ) from None
        if position == commit.cursor:
            return {}
        log.warning("log_cut", cursor=commit.cursor, read_on_after=position, step=commit.step)
        # To read entries again is harmless: the accounts know tickets by number, not by sequence (ADR 1).
        self.state.move_cursor(position)
        return {"log_cut": {"cursor": commit.cursor, "read_on_after": position}}

    def _record_start(self, resumed: bool, more: dict[str, Any]) -> None:
        step, lineage, now = self.state.step, self.state.lineage, time.time()
        self.ports.journal.rewind(step)
        line = {"lineage": lineage, "from_step": step, "time": now, "machine": self.run.machine}
        self.ports.journal.write_lineage(line | more)
        if foreign := foreign_files(self.run.directory):
            log.warning("foreign_files", files=foreign)
        log.info("learner_started", step=step, lineage=lineage, resumed=resumed, **more)
        self.ports.metrics.set("learner_lineage", lineage)
        self.ports.metrics.set("learner_step_timestamp_seconds", now)
        self.ports.metrics.set("max_staleness_versions", self.state.rules.max_staleness)
        self._report_disk(now)

    def _report_disk(self, saved_at: float) -> None:
        usage = shutil.disk_usage(self.run.directory)
        self.ports.metrics.set("checkpoint_timestamp_seconds", saved_at)
        self.ports.metrics.set("disk_free_ratio", usage.free / usage.total)

    # ---- checkpoints

    async def save(self, background: asyncio.TaskGroup) -> None:
        """Begin a checkpoint of the last commit, unless there is one; it is written while the next batch is trained."""
        # The store refuses a step that it has, and a run may end right after a checkpoint that was due.
        if self._saved_step == self.state.step:
            return
        self.count_stall()
        started = time.monotonic()
        await self._sealing  # one checkpoint at a time
        step = self.state.step
        state = asdict(self.state.last_commit) | {
            "lineage": self.state.lineage,
            "identity": dict(self.run.identity),
            "config": dict(self.run.config),
        }
        self._saved_step = step
        begun = asyncio.Event()
        self._sealing = background.create_task(self._write(step, state, begun))
        # From here on the engine keeps what it writes as it is: its next optimizer step waits for the files. If the
        # task fails before that, the group ends this one.
        await begun.wait()
        self._begun = time.monotonic() - started, self.ports.engine.stalled_s

    def count_stall(self, waited_s: float = 0.0) -> None:
        """Record for how long the last checkpoint has stalled the training, once the step after it has been taken.

        `waited_s` is what the loop itself has waited for it, apart from its beginning and from the engine's calls.
        """
        if self._begun is not None:
            begin_s, stalled_s = self._begun
            self._begun = None
            stall_s = begin_s + self.ports.engine.stalled_s - stalled_s + waited_s
            self.ports.metrics.observe("checkpoint_seconds", stall_s)
            log.info("checkpoint_stall", step=self._saved_step, stall_s=round(stall_s, 3))

    async def saved(self) -> None:
        """Wait until the last checkpoint is durable, and what it makes superfluous in the log is freed."""
        started = time.monotonic()
        await self._sealing
        self.count_stall(time.monotonic() - started)

    async def _write(self, step: int, state: dict[str, Any], begun: asyncio.Event) -> None:
        """Write a checkpoint and make it durable, then free what of the log it makes superfluous."""
        started, weights = time.monotonic(), self.publication.weights.path_for(self.state.policy)
        # Its own: a later one ends only after the next checkpoint has begun, which waits for this one to be sealed.
        publication = self.publication.latest
        with self.ports.checkpoints.filling(step) as directory:
            written = await self.ports.engine.begin_save(directory, state)
            begin_s = time.monotonic() - started
            begun.set()
            await written
            await self.publication.ended(publication)
            # The weights are on disk by now: a hard link costs neither time nor space.
            os.link(weights, directory / WEIGHTS_FILE)
        write_s = time.monotonic() - started
        # A step that is never trained again is never written again.
        await self.publication.recorder.written()
        # In a thread, because fsync blocks: the event loop has to answer the broker and the health checks meanwhile.
        await asyncio.to_thread(self.ports.checkpoints.seal, step, state)
        times = {
            "begin_s": begin_s,
            "write_s": write_s,
            "seal_s": time.monotonic() - started - write_s,
        }
        self._report_disk(time.time())
        log.info(
            "checkpoint_written",
            step=step,
            **{name: round(taken, 2) for name, taken in times.items()},
        )
        # Never before the checkpoint is durable: it decides which entries a resumed learner needs.
        await until_stopped(self.log_space.free(), self.ports.stopping)


def machine(threads: int) -> dict[str, Any]:
    """Return what digests depend on apart from groups and config: processor, torch, threads, and the code itself."""
    # From files, because a learner with the backend `hash` imports no torch.
    flags: set[str] = set()
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        flags.update(
            re.findall(r"^flags\s*:(.*)$", text, re.MULTILINE)[0].split() if "flags" in text else ()
        )
    kinds = [name for name in CPU_KINDS if name in flags]
    torch = version("torch") if find_spec("torch") else None
    code = xxhash.xxh3_64()
    for file in sorted(file for folder in CODE for file in folder.rglob("*.py")):
        code.update(file.read_bytes())
    return {
        "cpu": " ".join([platform.machine(), *kinds]),
        "torch": torch,
        "threads": threads,
        "code": code.hexdigest(),
    }


def check_directory(run_dir: Path, began_here: bool, earlier: Progress | None) -> None:
    """Raise CheckpointMismatch when the run directory is empty although the run has been trained, somewhere else."""
    if earlier is not None and earlier.step and not began_here:
        raise CheckpointMismatch(
            f"the broker knows this run at step {earlier.step}, but {run_dir} holds nothing of it: set run.root to the "
            "directory that it was trained in, restore that directory, or choose another run.name"
        )


def check_identity(checkpoint: Checkpoint, identity: Mapping[str, str]) -> None:
    """Raise CheckpointMismatch, with the difference, when the checkpoint is of another model or evaluation plan."""
    earlier = checkpoint.state["identity"]
    if changed := config_changes(earlier, identity):
        differences = ", ".join(
            f"{key}: {before} → {now}" for key, (before, now) in changed.items()
        )
        raise CheckpointMismatch(
            f"{checkpoint.path} was made with another model, tokenizer, template, end of a reply, lora.rank or "
            f"evaluation ({differences}): choose another run.name, or restore what was changed"
        )


def check_phase(checkpoint: Checkpoint, imitation_steps: int) -> None:
    """Raise CheckpointMismatch if steps that were RL would be imitation, with the horizon and curriculum of RL."""
    before = checkpoint.state["config"]["imitation"]["steps"]
    if imitation_steps > before and checkpoint.step > before:
        raise CheckpointMismatch(
            f"imitation.steps is {imitation_steps} but was {before}, and {checkpoint.path} has trained "
            f"{checkpoint.step - before} RL steps after them, which would count as imitation: set it back, or give "
            "demonstrations to RL (rl.demos_per_step)"
        )
