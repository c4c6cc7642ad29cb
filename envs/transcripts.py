"""Transcripts: recorded episodes, replayed as demonstrations (docs/environments/transcripts.md).

A file holds conversations in AgentTraj's form, as `messages`, or in the form of AgentGym's and AgentGym-RL's logs. Each
solved record is a task. Its expert replies as the recorded agent did, and the environment gives the recorded answers
whatever the reply is. So transcripts are for imitation only: a policy cannot explore them.

Records with `tools` are played by calling tools: the model's chat template writes the recorded calls and results.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    model_validator,
    validate_call,
)
from pydantic_core import from_json

from horizonrl.common.errors import ConfigError, EnvironmentFailure
from horizonrl.common.logs import get_logger
from horizonrl.common.types import MAX_LONG_TEXT, MAX_TURNS
from horizonrl.envs.agentgym.dialects import DIALECTS
from horizonrl.envs.api import Observation, Reply, Step, TaskSpec, ToolCall, Tools
from horizonrl.envs.records import explain
from horizonrl.envs.text_limits import MAX_CALLS

FORM = '{"item_id": "textcraft_12", "conversations": [{"from": "human", "value": "..."}, {"from": "gpt", ...}, ...]}'
AGENT = ("gpt", "assistant")
ACKNOWLEDGED = ("Ok.", "OK. I'll follow your instructions and try my best to solve the task.")
"""The acknowledgements that AgentGym's clients put into the agent's mouth. Its logs do not mark them."""
SUFFIXES = (".json", ".jsonl")

log = get_logger()


TurnText = Annotated[str, Field(max_length=MAX_LONG_TEXT)]
"""A text that is trained on. One that is too long is rejected, never cut."""


def _as_json(value: Any) -> Any:
    """Return the arguments of a call as JSON text: some programs write the object itself."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value


class Frozen(BaseModel, frozen=True):
    """A part of a record; it never changes."""


class CalledFunction(Frozen, extra="forbid"):
    name: Annotated[str, Field(min_length=1)]
    arguments: Annotated[TurnText, BeforeValidator(_as_json)]

    @model_validator(mode="after")
    def _require_an_object(self) -> Self:
        try:
            arguments = from_json(self.arguments)
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            raise ValueError(
                f"the arguments of {self.name} must be a JSON object, not {self.arguments[:60]!r}"
            )
        return self


class RecordedCall(Frozen):
    """A call of a tool in OpenAI's form."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ToolFunction(Frozen, extra="allow"):
    name: Annotated[str, Field(min_length=1)]
    parameters: dict[str, Any]


class RecordedTool(Frozen):
    """A tool in OpenAI's form."""

    type: Literal["function"]
    function: ToolFunction


class Message(Frozen, extra="forbid"):
    """One message of a record. Unknown keys are rejected, because they may change its meaning."""

    role: Literal["human", "gpt", "user", "assistant", "system", "tool"] = Field(
        validation_alias=AliasChoices("from", "role")
    )
    text: TurnText = Field(validation_alias=AliasChoices("value", "content"))
    tool_calls: Annotated[tuple[RecordedCall, ...], Field(max_length=MAX_CALLS)] = ()
    tool_call_id: str | None = None
    """For a tool's result: the call that it answers."""
    name: str | None = None
    """For a tool's result: the tool. It is ignored, because the call has the name."""
    loss: bool | None = None
    """For the agent's messages: false keeps the message out of training."""
    reasoning_content: str | None = None
    """The reasoning of an endpoint's model. Later prompts did not contain it, so it is ignored."""

    @model_validator(mode="before")
    @classmethod
    def _read_null(cls, value: Any) -> Any:
        """Read the nulls that OpenAI's clients write: for every absent field, and for the content beside calls."""
        if not isinstance(value, dict):
            return value
        written = {
            key: item
            for key, item in value.items()
            if item is not None or key in ("content", "value")
        }
        if written.get("tool_calls") and written.get("content", "") is None:
            written["content"] = ""
        return written

    @model_validator(mode="after")
    def _refuse_others_calls(self) -> Self:
        if self.tool_calls and self.role not in AGENT:
            raise ValueError(
                f"a message from {self.role} has tool_calls: only the agent calls tools"
            )
        return self


class Conversation(Frozen):
    """One record of a file. Other keys are ignored."""

    item_id: (
        Annotated[str, Field(min_length=1, max_length=240, coerce_numbers_to_str=True)] | None
    ) = None
    messages: tuple[Message, ...] = Field(
        validation_alias=AliasChoices("conversations", "messages")
    )
    tools: tuple[RecordedTool, ...] = ()


class Outcome(Frozen):
    """The part of a record that says how its episode ended."""

    item_id: str | int | None = None
    reward: float | None = None
    success: bool | float | None = None

    def is_solved(self, solved_at: float | None) -> bool:
        """Return whether the episode was solved. A record that does not say counts as solved.

        `solved_at` is the lowest reward of a solved episode. Raises ValueError if the reward is ambiguous without the
        environment: SciWorld pays 100, BabyAI less than 1.
        """
        if self.reward is None:
            return self.success is None or bool(self.success)
        source = DIALECTS.get(_category(str(self.item_id)).removeprefix("lmrlgym_"))
        least = source.solved_at if solved_at is None and source else solved_at
        if least is None and 0 < self.reward != 1:
            raise ValueError(
                f"the reward is {self.reward:g} and the item id {self.item_id!r} names no environment of AgentGym: set "
                "options.solved_at to the least reward of a solved episode (SciWorld 100, BabyAI 0.1, others 1)"
            )
        return self.reward >= (1.0 if least is None else least)


@dataclass(frozen=True, slots=True)
class AnsweredCall:
    call: ToolCall
    result: str


class Transcript(Frozen):
    """An episode to replay: the prompt, then turns and observations in alternation."""

    prompt: TurnText
    turns: Annotated[tuple[str, ...], Field(max_length=MAX_TURNS)]
    observations: tuple[str, ...]
    """The answers to the turns. The last one is empty unless the record has it."""
    calls: Mapping[int, tuple[AnsweredCall, ...]] = {}
    """The calls of turns that make any, by the turn's index. Their observations are the results, joined."""
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class TranscriptFile:
    digest: str
    transcripts: Mapping[str, Transcript]
    """The transcripts by task id, in the order of the file."""


class Transcripts:
    """One replayed episode at a time; solved, with a reward of 1, after the agent's last turn.

    path: a JSON list, a JSON object or a file with one object per line, or a folder of such files; read
        once per process
    solved_at: the lowest `reward` of a solved record; default: AgentGym's for the environment that the record names,
        else 1
    """

    env_id: ClassVar[str] = "transcripts"
    version: str = "1"
    demonstrations_only: ClassVar[bool] = True

    @validate_call
    def __init__(self, *, path: Path | None = None, solved_at: float | None = None) -> None:
        file = load_transcripts(path, solved_at)
        self.version = f"{self.version} sha256:{file.digest[:16]}"
        self._transcripts = file.transcripts
        self.native = any(transcript.tools for transcript in file.transcripts.values())
        self._transcript: Transcript | None = None
        self._turn = 0
        self._calls_made = 0

    @classmethod
    @validate_call
    def tasks(
        cls, *, path: Path | None = None, solved_at: float | None = None
    ) -> Sequence[TaskSpec]:
        """Return one task for each solved record, in the order of the file."""
        transcripts = load_transcripts(path, solved_at).transcripts
        return [TaskSpec(task_id, "train", _category(task_id)) for task_id in transcripts]

    async def reset(self, task_id: str) -> Observation:
        """Begin a record with its first prompt."""
        if task_id not in self._transcripts:
            raise ConfigError(
                f"the transcripts ({self.version}) have no task {task_id!r}: every machine must read the same file"
            )
        self._transcript, self._turn, self._calls_made = self._transcripts[task_id], 0, 0
        return Observation(self._transcript.prompt)

    async def step(self, text: str) -> Step:
        """Answer as the record does."""
        # The reply is not read: the record goes on as recorded, whatever an agent would have done.
        transcript = self._current()
        return self._end_turn(transcript, transcript.observations[self._turn])

    def tools(self) -> Tools:
        """Return the tools of the record."""
        return self._current().tools

    async def call(self, call: ToolCall) -> Step:
        """Answer as the record does. The last call of a turn ends it."""
        transcript = self._current()
        recorded = transcript.calls.get(self._turn)
        if recorded is None:
            return self._end_turn(transcript, transcript.observations[self._turn])
        result = recorded[self._calls_made].result
        self._calls_made += 1
        if self._calls_made == len(recorded):
            return self._end_turn(transcript, result)
        return Step(result, reward=0.0, terminated=False)

    def _end_turn(self, transcript: Transcript, observation: str) -> Step:
        self._turn, self._calls_made = self._turn + 1, 0
        done = self._turn == len(transcript.turns)
        return Step(observation, reward=float(done), terminated=done, success=done)

    def expert(self) -> "Transcripts":
        """Return the agent of the record."""
        self._current()
        return self

    def act(self, observation: str) -> str:
        """Return the recorded agent's reply in this turn."""
        return self._current().turns[self._turn]

    def reply(self, observation: str) -> Reply:
        """Return the recorded agent's reply in this turn, with its calls."""
        transcript = self._current()
        answered = transcript.calls.get(self._turn, ())
        return Reply(transcript.turns[self._turn], tuple(made.call for made in answered))

    async def close(self) -> None:
        self._transcript = None

    def _current(self) -> Transcript:
        if self._transcript is None:
            raise EnvironmentFailure("no episode has begun: reset before step and expert")
        if self._turn == len(self._transcript.turns):
            raise EnvironmentFailure(
                f"the episode is over after {self._turn} turns: reset before the next step"
            )
        return self._transcript


def to_record(item_id: str, prompt: str, turns: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return an episode in AgentTraj's form, without the observation after the last turn."""
    messages = [
        message
        for text, observation in turns
        for message in (
            {"from": "gpt", "loss": True, "value": text},
            {"from": "human", "loss": None, "value": observation},
        )
    ]
    return {
        "item_id": item_id,
        "conversations": [{"from": "human", "loss": None, "value": prompt}, *messages[:-1]],
    }


def load_transcripts(path: Path | None, solved_at: float | None = None) -> TranscriptFile:
    """Read a file or a folder. Raises ConfigError that names the file, the record and the fix."""
    if path is None:
        raise ConfigError(
            'transcripts need a file: give the environment options = { path = "demos.jsonl" }'
        )
    if not path.is_file() and not path.is_dir():
        raise ConfigError(
            f"no transcripts at {path}: a relative path starts at {Path.cwd()}, on every machine"
        )
    # Resolved, so that the cache holds a file once however its path is written.
    return _load(path.resolve(), solved_at)


@cache
def _load(path: Path, solved_at: float | None) -> TranscriptFile:
    digest = sha256()
    records: list[tuple[str, Any]] = []
    for file in _files(path):
        content = file.read_bytes()
        # Over the bytes of all files, since each machine must read the same demonstrations (see `version`).
        digest.update(content)
        records += _records(file, _decode(file, content))
    if not records:
        raise ConfigError(f"{path} holds no record: write one a line as {FORM}")
    # Unsolved records are left out unparsed: nobody has to repair what is not imitated.
    transcripts = [
        _parse(where, record) for where, record in records if _is_solved(where, record, solved_at)
    ]
    if len(transcripts) < len(records):
        log.info(
            "transcripts_unsolved",
            path=str(path),
            left_out=len(records) - len(transcripts),
            records=len(records),
        )
    if not transcripts:
        raise ConfigError(
            f"none of the {len(records)} records of {path} was solved: there is nothing to imitate"
        )
    names = _unique(
        [item_id or f"record_{number}" for number, (item_id, _) in enumerate(transcripts)]
    )
    return TranscriptFile(
        digest=digest.hexdigest(),
        transcripts={
            name: transcript for name, (_, transcript) in zip(names, transcripts, strict=True)
        },
    )


def _files(path: Path) -> Sequence[Path]:
    """Return the file, or all record files below a folder, sorted. Hidden ones are copies that programs keep."""
    if not path.is_dir():
        return [path]
    files = (file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
    # Such as `.ipynb_checkpoints/a.jsonl` and macOS's `._a.jsonl`.
    return sorted(
        file for file in files if not any(p.startswith(".") for p in file.relative_to(path).parts)
    )


def _decode(path: Path, content: bytes) -> str:
    try:
        # Some editors begin a file with a byte order mark, which JSON does not allow.
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 ({error}): write it anew as UTF-8") from None


def _records(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Yield (place, value) for each record. Only \\n ends a line, because strings may contain other line breaks."""
    if text.lstrip().startswith("["):
        values = _json(str(path), text)
        yield from ((f"{path}, record {number}", value) for number, value in enumerate(values))
        return
    # One record over many lines, as AgentGym's evaluation writes it.
    if re.match(r"\s*\{[ \t\r]*\n", text):
        yield str(path), _json(str(path), text)
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{path}, line {number}"
            yield where, _json(where, line)


def _json(where: str, text: str) -> Any:
    try:
        return from_json(text)
    except ValueError as error:
        raise ConfigError(
            f"{where} is not JSON ({error}): write a JSON list, or one record a line as {FORM}"
        ) from None


def _parse(where: str, value: Any) -> tuple[str | None, Transcript]:
    try:
        conversation = Conversation.model_validate(value)
        return conversation.item_id, _fold(conversation)
    except ValidationError as error:
        raise ConfigError(f"{where}: {explain(error, 'the record')}; write it as {FORM}") from None
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def _is_solved(where: str, value: Any, solved_at: float | None) -> bool:
    """Return whether a record should be imitated. True for a value that is no object: parsing then rejects it."""
    try:
        return not isinstance(value, dict) or Outcome.model_validate(value).is_solved(solved_at)
    except ValidationError as error:
        raise ConfigError(f"{where}: {explain(error, 'the record')}; write it as {FORM}") from None
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def _fold(conversation: Conversation) -> Transcript:
    """Make an episode of a conversation.

    The prompt is everything before the first turn with loss, except the agent's words. An agent's acknowledgement of
    the rules is not a turn, because a rollout has a single first prompt.
    """
    messages = conversation.messages
    begin = next(
        (n for n, m in enumerate(messages) if m.role in AGENT and _is_turn(n, m)), len(messages)
    )
    if begin == len(messages):
        raise ValueError(
            "no turn of the agent (from gpt, loss not false) is there to train on: leave the record out"
        )
    if any(message.role == "tool" or message.tool_calls for message in messages[:begin]):
        raise ValueError(
            "a call of a tool stands before the first turn with loss: take the loss key of that turn away"
        )
    opening = [message.text for message in messages[:begin] if message.role not in AGENT]
    if not any(opening):
        raise ValueError(
            f"turn {begin} is the agent's and nothing stands before it: begin with the task (from human)"
        )
    if not conversation.tools and any(message.tool_calls for message in messages):
        raise ValueError(
            "the agent calls tools and the record lists none: give it `tools` in OpenAI's form"
        )
    turns: list[str] = []
    observations: list[str] = []
    calls: dict[int, tuple[AnsweredCall, ...]] = {}
    number = begin
    while number < len(messages):
        message = messages[number]
        _check(number, message, agents=True)
        number += 1
        if message.tool_calls:
            results = _results(number, message, messages)
            number += len(results)
            made = [
                ToolCall(call.function.name, call.function.arguments) for call in message.tool_calls
            ]
            answers = results or [""] * len(made)
            calls[len(turns)] = tuple(
                AnsweredCall(*pair) for pair in zip(made, answers, strict=True)
            )
            observations.append("\n".join(results))
        elif number < len(messages):
            _check(number, messages[number], agents=False)
            observations.append(messages[number].text)
            number += 1
        else:
            observations.append("")
        turns.append(message.text)
    return Transcript(
        prompt="\n\n".join(opening),
        turns=tuple(turns),
        observations=tuple(observations),
        calls=calls,
        tools=tuple(tool.model_dump() for tool in conversation.tools),
    )


def _results(number: int, caller: Message, messages: Sequence[Message]) -> list[str]:
    """Return the results of a message's calls, in the order of the calls; none if the record ends with the calls.

    Raises ValueError unless each call has one.
    """
    results = list(takewhile(lambda message: message.role == "tool", messages[number:]))
    if not results and number == len(messages):
        return []
    if len(results) != len(caller.tool_calls):
        raise ValueError(
            f"turn {number - 1} makes {len(caller.tool_calls)} calls and {len(results)} results (role tool) follow: "
            "write one per call"
        )
    ids = [call.id for call in caller.tool_calls]
    if (
        all(result.tool_call_id in ids for result in results)
        and None not in ids
        and len({*ids}) == len(ids)
    ):
        results.sort(key=lambda result: ids.index(result.tool_call_id))
    return [result.text for result in results]


def _is_turn(number: int, message: Message) -> bool:
    """Return whether the model wrote a message of the agent. AgentGym's clients write the first one themselves."""
    if message.loss is None:
        return number != 1 or message.text not in ACKNOWLEDGED
    return message.loss


def _check(number: int, message: Message, agents: bool) -> None:
    """Raise ValueError unless the message may stand at this position of an episode."""
    if (message.role in AGENT) is not agents or message.role in ("system", "tool"):
        expected = "gpt" if agents else "human"
        raise ValueError(
            f"turn {number} is from {message.role} where {expected} must follow: join or split messages"
        )
    if agents and message.loss is False:
        raise ValueError(
            f"turn {number} is the agent's with loss false after one with loss: an episode is trained as a whole; end "
            "the record before it, or take the loss key away"
        )
    if agents and not message.text and not message.tool_calls:
        raise ValueError(f"turn {number} is the agent's and empty: end the record before it")


def _unique(names: Sequence[str]) -> Iterable[str]:
    """Yield the names, made unique: the second one of a name gets #2, and so on."""
    # All names are taken from the start, because a later record may itself be called `x#2`.
    taken, uses = set(names), Counter[str]()
    for name in names:
        uses[name] += 1
        unique = name
        if uses[name] > 1:
            while (unique := f"{name}#{uses[name]}") in taken:
                uses[name] += 1
            taken.add(unique)
        yield unique


def _category(task_id: str) -> str:
    """Return `textcraft` for `textcraft_12`. One file may hold episodes of several environments."""
    source, _, number = task_id.partition("#")[0].rpartition("_")
    return source if source and number.isdecimal() else "all"
