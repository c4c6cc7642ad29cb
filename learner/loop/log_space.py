"""The space of the group log: what of it is freed, when, and when the run has to end because nothing can be.

While the log is full, publishers wait. A learner that waits for groups while the log is full of entries that it has
settled would wait forever, so it frees them with an early checkpoint.
"""

from collections.abc import Sequence
from contextlib import suppress

from horizonrl.broker.api import Extent, Stream
from horizonrl.broker.log_continuity import resume_position
from horizonrl.common.errors import LogFull, LogGap
from horizonrl.common.logs import get_logger
from horizonrl.learner.loop.ports import Ports
from horizonrl.learner.records.checkpoint import Checkpoint

log = get_logger()

SHORT_SHARE = 0.5
"""Share of the log's bound above which a waiting learner frees what it can."""


class LogSpace:
    def __init__(self, ports: Ports, *, keep: bool, total_steps: int) -> None:
        self._ports = ports
        self._keep = keep
        self._total_steps = total_steps
        self._short_at = 0
        """Cursor of the commit at which the log was last found short: only a later commit can free more."""
        self._foreseen = False

    async def is_short(self, cursor: int) -> bool:
        """Return whether to write a checkpoint at `cursor` now, so that the entries before it can be freed."""
        if self._keep or cursor <= self._short_at:
            return False
        extent = await self._extent()
        if not _tight(extent):
            return False
        log.warning("log_short", stored_bytes=extent.stored_bytes, max_log_bytes=extent.limit_bytes)
        self._short_at = cursor
        return True

    async def free(self, *, short: bool = False) -> None:
        """Free what no kept checkpoint needs. If `short`, free also what only older checkpoints need, oldest first.

        A log that is kept whole is only checked against its bound. Raises Fenced when another learner speaks for the
        run: that learner may need all of it.
        """
        checkpoints = self._ports.checkpoints.all()
        if self._keep:
            await self._foresee(checkpoints[0].step if checkpoints else 0)
            return
        # Down to the newest checkpoint, without which the run could not resume: what it needs is never freed.
        while checkpoints:
            floor = await self._needed_from(checkpoints)
            # A purge has no condition that the broker could check, so the fence is asked first (one learner speaks).
            await self._ports.fence.check()
            if floor > (await self._extent()).first_sequence:
                await self._ports.log.purge_below(floor)
            if not (short and _tight(await self._extent())):
                return
            checkpoints.pop()

    async def _needed_from(self, checkpoints: Sequence[Checkpoint]) -> int:
        """Return the lowest sequence that a checkpoint needs: its last entry, whose mark proves that the log is its.

        Groups that it holds for a later step lie before that.
        """
        positions = []
        for checkpoint in checkpoints:
            with suppress(LogGap):  # an older one's entries were freed when the log was short
                position = await resume_position(
                    self._ports.transport, checkpoint.cursor, checkpoint.mark
                )
                positions.append(min([position, *checkpoint.held]))
        return min(positions, default=0)

    async def _foresee(self, step: int) -> None:
        """Warn once when the log will not hold the whole run."""
        extent = await self._extent()
        needed = extent.stored_bytes * self._total_steps // max(1, step)
        if not step or self._foreseen or extent.limit_bytes is None or needed <= extent.limit_bytes:
            return
        self._foreseen = True
        log.warning(
            "log_will_fill",
            at_step=extent.limit_bytes * step // extent.stored_bytes,
            needed_bytes=needed,
            max_log_bytes=extent.limit_bytes,
            hint=f"raise broker.max_log_bytes to {needed:,} or more, or set learner.keep_log to false",
        )

    async def check(self, groups: int, wanted: int, purpose: str, largest_bytes: int) -> None:
        """Raise LogFull when no more groups can come: the log is full, with `groups` of the `wanted` ones consumed.

        `largest_bytes` is the size of the largest message that the learner has read: a log that holds many small ones
        is full for whoever waits with a large one. Call it only when the learner has read the whole log, freed what it
        could, and received nothing for a while.
        """
        extent = await self._extent()
        if not extent.refuses(largest_bytes):
            return
        problem = f"the group log is full ({extent.stored_bytes:,} of {extent.limit_bytes:,} bytes)"
        again = "and start the controller and the learner again: the run resumes"
        if self._keep:
            raise LogFull(
                f"{problem} and learner.keep_log keeps all of it: raise broker.max_log_bytes, or set learner.keep_log "
                f"to false, {again}"
            )
        # Twice what the present entries suggest for all groups: a bound just met would only be met again.
        least = 2 * max(extent.limit_bytes or 0, extent.stored_bytes * wanted // max(1, groups))
        raise LogFull(
            f"{problem} with {groups} of {wanted} groups for {purpose}, and nothing can be freed before the others "
            f"are in: raise broker.max_log_bytes to {least:,} or more, or use fewer groups per step, {again}"
        )

    async def _extent(self) -> Extent:
        return await self._ports.transport.extent(Stream.GROUPS)


def _tight(extent: Extent) -> bool:
    return extent.limit_bytes is not None and (
        extent.full or extent.stored_bytes >= SHORT_SHARE * extent.limit_bytes
    )
