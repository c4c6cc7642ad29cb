"""The records of a run's state, one per key of the broker's key-value store, and the small ones inside them.

`broker/state.py` says which key holds which record. Each has one writer: the learner (`progress`, `policy`) or the
controller (`horizon`, `run`).
"""

from bisect import bisect_right
from enum import StrEnum
from operator import itemgetter
from typing import Annotated

from pydantic import BeforeValidator, ConfigDict, Field, JsonValue

from horizonrl.common.arrays import MAX_TOKENS
from horizonrl.common.types import (
    MAX_LONG_TEXT,
    MAX_SPANS,
    Count,
    Digest,
    DropReason,
    HorizonTurns,
    Kind,
    Name,
    Phase,
    PolicyVersion,
    Record,
    ShortText,
)

MAX_ENTRIES = 16
"""Most entries of a map that has one per kind or per reason."""
MAX_ENVIRONMENTS = 1_024
MAX_FINGERPRINT, MAX_SHARED_KEYS = 64, 256

Ranges = Annotated[tuple[tuple[Count, Count], ...], Field(max_length=MAX_SPANS, fail_fast=True)]


def _few(value: object) -> object:
    if isinstance(value, dict) and len(value) > MAX_ENTRIES:
        raise ValueError(f"{len(value)} entries, at most {MAX_ENTRIES}")
    return value


Few = BeforeValidator(_few)
"""The `fail_fast` of maps: pydantic would describe each of very many wrong entries, at a kilobyte each."""


class Outcomes(Record):
    """How many tickets of one kind were settled, by how they ended."""

    trained: Count = 0
    evaluated: Count = 0
    dropped: Annotated[dict[DropReason, Count], Few] = {}
    void: Count = 0

    @property
    def settled(self) -> int:
        return self.trained + self.evaluated + sum(self.dropped.values()) + self.void


class HorizonGrowth(Record):
    """An adaptive horizon's decision to grow."""

    env_id: Name
    phase_step: Count
    """RL steps taken when it was decided."""
    from_turns: HorizonTurns
    to_turns: HorizonTurns
    reason: ShortText
    """What was measured."""


MAX_CATEGORIES = 256
"""Most task categories of a run whose curriculum is adaptive: each progress record has a line for each."""


MAX_CATEGORY = 128
"""Most characters of the name of a category that an adaptive curriculum follows."""


class Yield(Record):
    """How many groups had different returns, and so something to teach. Old groups fade."""

    env_id: Name
    varied: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Groups with different returns, each weighed by its age."""
    seen: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """All groups, weighed alike."""

    @property
    def share(self) -> float:
        """The share that had different returns; 1 before one was seen."""
        # One made-up success, so that a category is tried before it is judged, and no single group decides.
        return (self.varied + 1.0) / (self.seen + 1.0)

    @property
    def differed(self) -> float | None:
        """The share that had different returns, as it was seen; None before one was."""
        return self.varied / self.seen if self.seen else None


class CategoryYield(Yield):
    """The yield of a category of an environment's tasks."""

    category: Annotated[str, Field(max_length=MAX_CATEGORY)]


MAX_REPEATED = 64
"""Most tasks of an environment that an adaptive curriculum repeats: each progress record names them."""


class RepeatedTasks(Yield):
    """The tasks of an environment whose last group had different returns, and their own yield when drawn again."""

    task_ids: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=256)], ...],
        Field(max_length=MAX_REPEATED, fail_fast=True),
    ] = ()
    """Oldest first."""


class Progress(Record):
    """How far the run is, as the learner publishes it (key `progress`)."""

    step: Count = 0
    """Optimizer steps taken in all phases; equals `policy.version`."""
    phase: Phase = Phase.IMITATION
    phase_step: Count = 0
    """Optimizer steps taken in this phase: what horizon schedules count."""
    policy: PolicyVersion = PolicyVersion()
    """The newest version."""
    cursor: Count = 0
    """Sequence of the last message of the group log that the learner has consumed."""
    outcomes: Annotated[dict[Kind, Outcomes], Few] = {}
    """Per kind, how the settled tickets ended."""
    lowest_unsettled: Annotated[dict[Kind, Count], Few] = {}
    """Per kind, the lowest ticket number that has not ended: tickets below it can be purged."""
    ended_ranges: Annotated[dict[Kind, Ranges], Few] = {}
    """Per kind, the ranges (first, last) of ticket numbers from `lowest_unsettled` on that ended up to `cursor`. With
    MAX_SPANS ranges of a kind, nothing is said of the numbers beyond the last one (`tells`)."""
    awaited: Annotated[str, Field(max_length=64)] | None = None
    """The train ticket that the next step waits for although groups enough have come: a later step may not train it."""
    growths: Annotated[tuple[HorizonGrowth, ...], Field(fail_fast=True)] = ()
    """The last growth of each environment's adaptive horizon; those that have not grown are left out."""
    yields: Annotated[
        tuple[CategoryYield, ...], Field(max_length=MAX_CATEGORIES, fail_fast=True)
    ] = ()
    """What the categories of train tasks have yielded so far; empty unless the curriculum is adaptive."""
    repeats: Annotated[
        tuple[RepeatedTasks, ...], Field(max_length=MAX_CATEGORIES, fail_fast=True)
    ] = ()
    """The tasks of each environment that are drawn again; empty unless the curriculum is adaptive."""
    finished: bool = False
    """Whether the learner has taken its last step; a run that is given more steps goes on."""

    @property
    def finished_step(self) -> int | None:
        """The step at which the run ended; None while it goes on."""
        return self.step if self.finished else None

    def settled(self, kind: Kind) -> int:
        return self.outcomes[kind].settled if kind in self.outcomes else 0

    def ended(self, kind: Kind, number: int) -> bool:
        """Return whether the learner has read the end of a ticket."""
        # Tickets end out of order. One number and a few ranges say which, however long the run is.
        ranges = self.ended_ranges.get(kind, ())
        index = bisect_right(ranges, number, key=itemgetter(0)) - 1
        return number < self.lowest_unsettled.get(kind, 0) or (
            index >= 0 and number <= ranges[index][1]
        )

    def tells(self, kind: Kind, number: int) -> bool:
        """Return whether the record says of a ticket if it has ended. It holds the lowest MAX_SPANS ranges."""
        ranges = self.ended_ranges.get(kind, ())
        return len(ranges) < MAX_SPANS or number <= ranges[-1][1]

    def reached(self, kind: Kind) -> int:
        """Return the number after the highest one of a kind whose end is known."""
        # The 0 keeps a second argument for `max` when there are no ranges.
        return max(
            self.lowest_unsettled.get(kind, 0),
            *(last + 1 for _, last in self.ended_ranges.get(kind, ())),
            0,
        )


class SentFile(Record):
    """A version's safetensors file in the weights stream: where its bytes are and how to verify them.

    `digest` is xxh3_128 of the file. `path` names it for readers on the same host. In the weights stream there is the
    newest key frame, a whole file, and after it the changes from version to version: the frame is `chunks` messages
    from `first_sequence` to `last_sequence`, and the changes end at `last_change`.
    """

    policy: PolicyVersion
    weights_bytes: Count
    digest: Digest
    path: Annotated[str, Field(max_length=4096)] | None = None
    chunks: Count = 0
    first_sequence: Count = 0
    last_sequence: Count = 0
    key_policy: PolicyVersion | None = None
    """The version of the key frame, if it is not `policy` itself."""
    key_digest: Digest | None = None
    """The digest of the key frame, if it is not that of `policy`."""
    last_change: Count = 0
    """Sequence of the last message of the changes that lead to `policy`; 0 if the key frame is its own."""

    @property
    def key_frame(self) -> "SentFile":
        """The newest key frame alone."""
        return SentFile(
            policy=self.key_policy or self.policy,
            weights_bytes=self.weights_bytes,
            digest=self.key_digest or self.digest,
            chunks=self.chunks,
            first_sequence=self.first_sequence,
            last_sequence=self.last_sequence,
        )


class WeightsManifest(SentFile):
    """A published version (key `policy`): its file, or what its file is made from.

    With LoRA the stream holds no file of the version (`chunks` is 0). It holds the adapters, and the frozen model that
    they are added to; `weights_bytes` and `digest` are those of the sum.
    """

    finished_step: Count | None = None
    """The step at which the run ended; None while it goes on. Here, so that an actor follows one small key."""
    learner: Digest = ""
    """Drawn at random by each learner that starts. After a backup is restored, a learner may draw a lineage that was
    used before: a version that another learner of its lineage has announced is of a future that is lost."""
    adapters: SentFile | None = None
    base: SentFile | None = None
    """The frozen model, which stays the same from version to version: `policy` says with which one it was sent."""


def end_of_run(total_steps: int, *records: Progress | WeightsManifest | None) -> int | None:
    """Return the step at which the run ended, if all these records say so; None while it goes on.

    A finished run that was given more steps goes on, although its records say `finished` until its learner reports.
    """
    ends = [None if record is None else record.finished_step for record in records]
    steps = [step for step in ends if step is not None and step >= total_steps]
    return min(steps) if steps and len(steps) == len(ends) else None


class HorizonState(Record):
    """The horizons in force, as the controller publishes them (key `horizon`)."""

    phase_step: Count = 0
    horizons: dict[Name, HorizonTurns] = {}
    """Per environment, the horizon of the tickets now issued; recorded before the first of them is."""
    tickets_issued: Annotated[dict[Kind, Count], Few] = {}
    """Per kind, how many tickets the controller has issued."""


class EnvironmentSettings(Record):
    """How the run's actors make an environment."""

    model_config = ConfigDict(allow_inf_nan=False)  # a NaN would differ from itself

    env_id: Name
    options: dict[str, JsonValue] = {}
    """Keyword arguments of the environment."""
    step_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """A reset or step that takes longer breaks the episode."""


class ContextRule(StrEnum):
    """What an actor does when the context is full before the horizon is."""

    STOP = "stop"
    """End the episode: truncated."""
    WINDOW = "window"
    """Go on with the task and the newest turns."""
    SUMMARISE = "summarise"
    """Ask the policy for a summary, and go on with the task and that."""


class RunSettings(Record):
    """What an actor must know of the run's recipe (key `run`). The controller sets it before its first ticket."""

    total_steps: Count
    """Optimizer steps of the run: it is over when `progress` is finished at this step or a later one."""
    max_deliver: Annotated[int, Field(ge=1)]
    """Deliveries of a ticket after which an actor ends it as void."""
    max_context_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    """Longest sequence of an episode; the learner settles a longer one as malformed."""
    system_prompt: Annotated[str, Field(max_length=MAX_LONG_TEXT)] | None = None
    """The chat's system message; None leaves the template's default."""
    context: ContextRule = ContextRule.STOP
    """What happens when the context is full before the horizon is."""
    environments: Annotated[
        tuple[EnvironmentSettings, ...], Field(max_length=MAX_ENVIRONMENTS, fail_fast=True)
    ]
    ticket_key: Annotated[str, Field(max_length=MAX_FINGERPRINT)] = ""
    """A fingerprint of the key that the controller signs tickets with; empty if it signs none."""
    recipe: Annotated[dict[str, str], Field(max_length=MAX_SHARED_KEYS)] = {}
    """What controller and learner must agree on besides, by key, as JSON; a long value as its digest."""
