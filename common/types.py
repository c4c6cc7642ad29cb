"""The records of episodes, from a ticket to its end: Ticket → Episode → Group or Void (`state.py` has the others).

Each is frozen, validated and bounded in size, so that a decoded record is a safe one. Token ids and log-probabilities
are tuples in memory; how they look on the wire is `broker/codec.py`'s business. Text travels with the token ids for
people to read; nothing is ever trained from text (token exactness).
"""

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum
from functools import partial
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from horizonrl.common.arrays import MAX_TOKENS, Logprobs, TokenIds

MAX_TURNS = 1_024
MAX_GROUP_SIZE = 256
MAX_TEMPERATURE = 10
MAX_BRANCHES = 256
"""Most token sequences of an episode, the first one included."""
MAX_SPANS = 1_024
"""Most versions that sample one turn."""
SIGNATURE_HALF = 32
"""Hexadecimal digits of half a signature: 128 bits."""
MAX_LONG_TEXT = 1 << 18
"""Characters that are kept of a text for people."""
MAX_SHORT_TEXT = 1_024
"""Characters that are kept of a note for people: an error, a reason, an engine's name."""


def _cut(text: str, most: int) -> str:
    """Return the text with at most `most` characters; one that is cut ends with its original length."""
    if len(text) <= most:
        return text
    mark = f" [... {len(text)} characters]"
    return text[: most - len(mark)] + mark


Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_\-]+$")]
"""A token of a subject: run, ticket and environment names."""
ShortText = Annotated[str, AfterValidator(partial(_cut, most=MAX_SHORT_TEXT))]
LongText = Annotated[str, AfterValidator(partial(_cut, most=MAX_LONG_TEXT))]
"""Text for people. One that is too long is cut, which loses nothing that is trained."""
Digest = Annotated[str, Field(max_length=128)]
# JavaScript's integers are exact below 2^53, and an actor may be written in it (plain protocol).
Count = Annotated[int, Field(ge=0, lt=1 << 53)]
Reward = Annotated[float, Field(ge=-1e9, le=1e9)]
"""Bounds far above any reward in use. Advantages of larger ones would be infinite, and the weights with them."""
HorizonTurns = Annotated[int, Field(ge=1, le=MAX_TURNS)]


class Record(BaseModel):
    """A frozen record. Fields that a newer writer added are ignored."""

    # `ignore`, where config has `forbid`: a newer actor must not lose its groups because of a field we do not know.
    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)


class Kind(StrEnum):
    """What a ticket's episodes are for."""

    TRAIN = "train"
    DEMO = "demo"
    EVAL = "eval"


class StopReason(StrEnum):
    """Why an episode ended. Exactly one of `terminated`, `truncated` and `broken` is true of each reason."""

    TERMINATED = "terminated"
    """The environment says that the task is over."""
    HORIZON = "horizon"
    """The horizon in force cut it: a truncation, never a failure of the agent."""
    CONTEXT = "context"
    """The next turn would not fit into the policy's context."""
    ENV_TRUNCATED = "env_truncated"
    """The environment's own step limit cut it."""
    ENV_ERROR = "env_error"
    """The environment raised."""
    ENV_TIMEOUT = "env_timeout"
    """The environment did not answer in time."""
    POLICY_ERROR = "policy_error"
    """The inference engine failed the request."""
    UNFIT = "unfit"
    """The first prompt, or a demonstration, is longer than the context or the turn limit: no retry makes it fit."""

    @property
    def terminated(self) -> bool:
        return self is StopReason.TERMINATED

    @property
    def broken(self) -> bool:
        """Whether the failure is not the agent's: the episode is kept out of baseline and batch, never a zero."""
        # Broken is not zero: a zero would teach the agent to avoid what merely broke (invariants).
        return self in (
            StopReason.ENV_ERROR,
            StopReason.ENV_TIMEOUT,
            StopReason.POLICY_ERROR,
            StopReason.UNFIT,
        )

    @property
    def truncated(self) -> bool:
        # By exclusion, so that every reason is exactly one of the three.
        return not self.terminated and not self.broken


class DropReason(StrEnum):
    """Why the learner settled a group without training on it."""

    STALE = "stale"
    """Older than `max_staleness` when it was consumed."""
    ZERO_VARIANCE = "zero_variance"
    """Every valid episode earned the same: no group-relative advantage."""
    TOO_FEW_VALID = "too_few_valid"
    """Fewer valid episodes than a baseline needs."""
    MALFORMED = "malformed"
    """Decodable, but not what the ticket ordered."""
    LINEAGE = "lineage"
    """Sampled by a version that this lineage has not reached."""
    PHASE = "phase"
    """Of a kind that the present phase does not train."""
    TEMPERATURE = "temperature"
    """Sampled at another temperature than that at which the learner scores: from before a resume that changed it."""


TRAINED = "trained"
"""How a group ends that is not dropped for one of these reasons."""


class PolicyVersion(Record):
    """A policy's place in history: `version` counts optimizer steps, `lineage` counts learner resumes."""

    version: Count = 0
    lineage: Count = 0

    def __str__(self) -> str:
        return f"v{self.version}.l{self.lineage}"


class VersionSpan(Record):
    """`tokens` consecutive generated tokens that one policy version sampled."""

    version: Annotated[int, Field(ge=0, lt=1 << 31)]
    """Batches hold it in 32 bits."""
    lineage: Count
    tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]


class Task(Record):
    """One problem of one environment, the same on every machine."""

    env_id: Name
    task_id: Annotated[str, Field(min_length=1, max_length=256)]

    def __str__(self) -> str:
        return f"{self.env_id} task {self.task_id!r}"


class Sampling(Record):
    """How the policy samples a turn. Logprobs are of the distribution after temperature."""

    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] = 1.0
    max_turn_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] = 64
    seed: Count | None = None
    """Base seed of the group's requests; None leaves the engine's own generator in charge."""


class Ticket(Record):
    """An order for one group. Its id never changes, however often it is delivered or issued again."""

    number: Count
    """Place in the deterministic task stream of its kind, from 0."""
    kind: Kind
    task: Task
    group_size: Annotated[int, Field(ge=1, le=MAX_GROUP_SIZE)]
    horizon_turns: HorizonTurns
    announce_horizon: bool = False
    """Tell the agent how many turns remain."""
    sampling: Sampling = Sampling()
    issued_at_version: PolicyVersion = PolicyVersion()
    """The learner's version when the ticket was issued: actors begin with this one or a later one."""
    repeated: bool = False
    """The task was drawn because its last group differed in return (an adaptive curriculum)."""
    signature: Annotated[str, Field(max_length=2 * SIGNATURE_HALF, pattern=r"^[0-9a-f]*$")] = ""
    """The controller's proof that it issued this ticket (`broker/signing.py`); empty in a run without a ticket key."""

    @property
    def ticket_id(self) -> str:
        return f"{self.kind.value}-{self.number:08d}"

    @property
    def end_id(self) -> str:
        """The message id under which the ticket ends: nobody can guess that of a signed one."""
        return (
            f"{self.ticket_id}.{self.signature[:SIGNATURE_HALF]}"
            if self.signature
            else self.ticket_id
        )


class Branch(Record):
    """A token sequence of an episode that does not continue an earlier one.

    A sub-agent's conversation is one, or what follows a compaction of the context, or an edited history. Text that an
    earlier branch sampled stands here as context, and is never trained a second time.
    """

    prompt_ids: TokenIds
    """What the branch begins with, rendered whole, up to and including the generation prompt."""
    prompt: LongText = ""

    @model_validator(mode="after")
    def _check_rendered(self) -> Self:
        if not self.prompt_ids:
            raise ValueError("a branch begins with a prompt")
        return self


class Turn(Record):
    """One generation and the observation that answers it.

    `output_ids` [T] are the sampled ids, end-of-turn token included where one was sampled; `logprobs` [T] are the
    behaviour policy's; `spans` partition the T tokens by the version that sampled them. `observation_ids` are the
    ids appended after the generation, up to and including the next generation prompt; empty on a branch's last turn.
    """

    output_ids: TokenIds
    logprobs: Logprobs
    spans: Annotated[tuple[VersionSpan, ...], Field(max_length=MAX_SPANS, fail_fast=True)]
    observation_ids: TokenIds = ()
    reward: Reward = 0.0
    text: LongText = ""
    """The generation, decoded for people."""
    observation: LongText = ""
    branch: Annotated[int, Field(ge=0, lt=MAX_BRANCHES)] = 0
    """The token sequence that it continues: 0 begins with the episode's `prompt_ids`, K > 0 with branch K's."""
    trained: bool = True
    """False: the generation is context of what follows in its branch, but carries no loss."""
    state: Digest = ""
    """A digest of the environment's state in which the turn was taken; empty if the environment names none."""

    @model_validator(mode="after")
    def _check_aligned(self) -> Self:
        tokens = len(self.output_ids)
        if tokens == 0:
            raise ValueError("a turn has at least one generated token")
        if len(self.logprobs) != tokens:
            raise ValueError(f"{len(self.logprobs)} logprobs for {tokens} generated tokens")
        # A token without a version could not be judged: neither its staleness nor its lineage.
        if sum(span.tokens for span in self.spans) != tokens:
            raise ValueError(
                f"version spans cover {sum(s.tokens for s in self.spans)} of {tokens} generated tokens"
            )
        return self


def sampled_in(turns: Iterable[Turn]) -> Counter[PolicyVersion]:
    """Return how many tokens of the turns each version sampled."""
    tokens: Counter[PolicyVersion] = Counter()
    for turn in turns:
        for span in turn.spans:
            tokens[PolicyVersion(version=span.version, lineage=span.lineage)] += span.tokens
    return tokens


class Episode(Record):
    """The turns from reset to a stop reason."""

    index: Count
    """Place in the group, from 0."""
    prompt_ids: TokenIds
    """The rendered first prompt, up to and including the generation prompt."""
    turns: Annotated[tuple[Turn, ...], Field(max_length=MAX_TURNS, fail_fast=True)]
    """In order of time, over all branches: the k-th one is the episode's k-th, whichever branch it continues."""
    stop: StopReason
    success: bool = False
    """The environment's own verdict, apart from the reward."""
    prompt: LongText = ""
    error: ShortText | None = None
    """What broke, for a broken episode."""
    generate_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    environment_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    branches: Annotated[tuple[Branch, ...], Field(max_length=MAX_BRANCHES - 1, fail_fast=True)] = ()
    """Branches 1, 2, ...; branch 0 begins with `prompt_ids`."""
    refused: Count = 0
    """Requests of a program that were refused as wrong. It may have taken the refusal for an answer."""
    refusal: ShortText | None = None
    """Why the last of them was refused."""

    @model_validator(mode="after")
    def _check_versions(self) -> Self:
        if self.stop.broken and not self.error:
            raise ValueError(
                f"an episode that stopped with {self.stop.value} must say what broke in `error`"
            )
        # A valid episode without a turn has nothing to train, but would count in the baseline.
        if not self.stop.broken and not (self.prompt_ids and self.turns):
            raise ValueError(
                f"an episode that stopped with {self.stop.value} must hold a prompt and a turn"
            )
        if not self.stop.broken and not any(turn.trained for turn in self.turns):
            raise ValueError(
                f"an episode that stopped with {self.stop.value} must hold a turn that is trained"
            )
        return self

    @model_validator(mode="after")
    def _check_branches(self) -> Self:
        # The last turn of each branch: a dict keeps the last value of a key.
        last = {turn.branch: turn for turn in self.turns}
        if max(last, default=0) > len(self.branches):
            raise ValueError(
                f"a turn of branch {max(last)}, and the last branch is {len(self.branches)}"
            )
        if self.branches:
            if len(last) <= len(self.branches):
                raise ValueError(f"branch {min({*range(len(last) + 1)} - last.keys())} has no turn")
            # In a linear episode they are left out instead, as ever: its schema allows them.
            if unread := [branch for branch, turn in last.items() if turn.observation_ids]:
                raise ValueError(
                    f"the last turn of branch {unread[0]} has observation ids, which nobody has read"
                )
        return self

    @property
    def linear(self) -> bool:
        """Whether it is a single token sequence of which every turn is trained."""
        return not self.branches and all(turn.trained for turn in self.turns)

    def by_branch(self) -> list[tuple[tuple[int, ...], list[tuple[int, Turn]]]]:
        """Return the prompt ids of each branch and its turns, each with its place in the episode."""
        turns: list[list[tuple[int, Turn]]] = [[] for _ in range(len(self.branches) + 1)]
        for index, turn in enumerate(self.turns):
            turns[turn.branch].append((index, turn))
        return list(
            zip(
                (self.prompt_ids, *(branch.prompt_ids for branch in self.branches)),
                turns,
                strict=True,
            )
        )

    @property
    def episode_return(self) -> float:
        return sum(turn.reward for turn in self.turns)

    @property
    def generated_tokens(self) -> int:
        return sum(len(turn.output_ids) for turn in self.turns)

    def sampled(self) -> Counter[PolicyVersion]:
        """Return how many tokens each version sampled."""
        return sampled_in(self.turns)

    @property
    def valid(self) -> bool:
        return not self.stop.broken


class Provenance(Record):
    """Where a group was made."""

    actor: Name
    engine: ShortText = ""
    """Engine name, version and precision."""
    model_digest: Digest = ""
    """Digest of the model's configuration and tokenizer: what the token ids mean."""
    template_digest: Digest = ""
    stop_ids: ShortText = ""
    """The ids with which the model's own settings end a reply, separated by spaces."""
    environment: ShortText = ""
    """Environment id and the version of its task list."""


class Group(Record):
    """The episodes of one ticket: the unit that travels and is trained."""

    ticket: Ticket
    episodes: Annotated[tuple[Episode, ...], Field(max_length=MAX_GROUP_SIZE, fail_fast=True)]
    provenance: Provenance
    deliveries: Annotated[int, Field(ge=1)] = 1
    """How often the ticket had been delivered when this group was made."""
    started_at_ms: Count = 0
    finished_at_ms: Count = 0
    damaged_version: PolicyVersion | None = None
    """The announced version that the actor could not make from what the broker holds; None if there is none."""

    @model_validator(mode="after")
    def _as_ordered(self) -> Self:
        # Broken episodes travel too: without them, a group would hide how often the environment fails.
        if len(self.episodes) != self.ticket.group_size:
            raise ValueError(
                f"{len(self.episodes)} episodes for a ticket of {self.ticket.group_size}"
            )
        if [episode.index for episode in self.episodes] != list(range(len(self.episodes))):
            raise ValueError("episode indexes are not 0, 1, 2, ...")
        # The horizon is what the ticket ordered: an actor that plays on would train a longer task than the schedule's.
        longest = max((len(episode.turns) for episode in self.episodes), default=0)
        if longest > self.ticket.horizon_turns:
            raise ValueError(
                f"an episode of {longest} turns under a horizon of {self.ticket.horizon_turns}"
            )
        return self

    @property
    def duration_s(self) -> float:
        """Seconds from the first episode's beginning to the last one's end, by the actor's clock."""
        return max(0, self.finished_at_ms - self.started_at_ms) / 1000

    @property
    def valid_episodes(self) -> tuple[Episode, ...]:
        return tuple(episode for episode in self.episodes if episode.valid)

    def spans(self) -> tuple[VersionSpan, ...]:
        # Broken episodes are not trained, so their versions make a group neither stale nor fresh.
        return tuple(span for e in self.valid_episodes for turn in e.turns for span in turn.spans)

    @property
    def oldest_version(self) -> int:
        """The oldest version that sampled a token of a valid episode; the ticket's own when there is none."""
        return min(
            (span.version for span in self.spans()), default=self.ticket.issued_at_version.version
        )

    @property
    def newest_version(self) -> int:
        return max(
            (span.version for span in self.spans()), default=self.ticket.issued_at_version.version
        )


class Void(Record):
    """A ticket's end without a group, published to the group log under the ticket's id."""

    ticket: Ticket
    reason: ShortText
    actor: Name


class Phase(StrEnum):
    """A part of a run: imitation comes first, and either may have no steps."""

    IMITATION = "imitation"
    RL = "rl"

    @property
    def kind(self) -> Kind:
        """The kind of ticket that fills the phase's batches."""
        return Kind.DEMO if self is Phase.IMITATION else Kind.TRAIN
