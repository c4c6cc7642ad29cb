"""Failures of environments, told so that their author finds the line: once whole in the log, and short in each episode.

Place in the flow: a failure → **the error of a broken Episode**.
"""

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field

from horizonrl.common.logs import get_logger
from horizonrl.common.texts import printable
from horizonrl.common.types import Ticket, Turn
from horizonrl.envs.contract import DEFECTS, describe

log = get_logger()

SHOWN_CHARS = 200
"""Characters shown of a text that an episode's error quotes."""
KEPT_TURNS = 4
"""Turns of a broken episode that its log line has."""
KEPT_CHARS = 2_000
"""Characters of each of their texts."""
MOST_TOLD = 100
"""Distinct failures that are told whole."""


DEFECTS_TRIED = 32
"""Failures by defects of code, before any episode went well, that are no accident."""


@dataclass
class Faults:
    """The failures of an environment that this actor has told."""

    works: bool = False
    """Whether an episode of it went well."""
    _defects: int = 0
    """Failures by defects of code, which no retry mends."""
    _told: set[str] = field(default_factory=set)

    @property
    def hopeless(self) -> bool:
        """Whether the environment's code has failed from the start and will fail again."""
        return not self.works and self._defects >= DEFECTS_TRIED

    def tell(
        self,
        error: BaseException,
        environment: object,
        ticket: Ticket,
        prompt: str,
        turns: Sequence[Turn],
        reply: str,
    ) -> str:
        """Return what an episode's record says of a failure. `reply` is what the environment could not answer.

        The first failure of each kind is logged with its traceback and the last turns: a broken episode is not
        published, so nobody could read it elsewhere.
        """
        described = describe(error, environment)
        self._defects += isinstance(error, DEFECTS)
        after = (
            f" after {printable(reply, SHOWN_CHARS)!r}"
            if reply
            else ""
            if prompt
            else " at its reset"
        )
        if described not in self._told and len(self._told) < MOST_TOLD:
            self._told.add(described)
            log.warning(
                "environment_failed",
                error=printable(described, KEPT_CHARS),
                task=str(ticket.task),
                ticket=ticket.ticket_id,
                prompt=printable(prompt, KEPT_CHARS),
                turns=[
                    (printable(turn.text, KEPT_CHARS), printable(turn.observation, KEPT_CHARS))
                    for turn in turns[-KEPT_TURNS:]
                ],
                reply=printable(reply, KEPT_CHARS),
                traceback="".join(traceback.format_exception(error)),
            )
        return f"{described} ({ticket.task}{after})"
